"""Fair shares of a room: each law with a variant that breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.store.budget.fair_room import (
    ASKS_S,
    HALF_S,
    MOST_TENANTS,
    RETURN_SHARE,
    RETURNS_S,
    FairRoom,
)

ROW = 10
FLOOD, OTHER = b"flood", b"other"


class FirstCome(FairRoom):
    """The control: whoever asks while there is room."""

    def admits(self, tenant: bytes, nbytes: int, room: int, now: float) -> bool:
        return nbytes <= room


class Quotas(FairRoom):
    """The control of work that is conserved: a fixed part of the room for each of four tenants."""

    def admits(self, tenant: bytes, nbytes: int, room: int, now: float) -> bool:
        return nbytes <= room // 4


# A share for each


@dataclass
class Round:
    """Bytes that come, then the tenants in some order, each until it is refused."""

    came: int
    order: Sequence[int]
    sizes: Sequence[int]


def rounds_of(num_tenants: int, most_came: int) -> st.SearchStrategy[list[Round]]:
    one = st.builds(
        Round,
        st.integers(0, most_came),
        st.permutations(range(num_tenants)),
        st.lists(st.integers(1, ROW), min_size=num_tenants, max_size=num_tenants),
    )
    return st.lists(one, min_size=1, max_size=25)


def admitted(
    law: FairRoom, rounds: Sequence[Round], num_tenants: int
) -> tuple[list[int], list[list[int]]]:
    """Bytes that came, and bytes of each tenant, by round; all ask once before anything comes."""
    room, came, got = 0, [], []
    for tenant in range(num_tenants):
        assert not law.admits(bytes([tenant]), ROW, room, 0.0)
    for round_ in rounds:
        room += round_.came
        mine = [0] * num_tenants
        for tenant in round_.order:
            while law.admits(bytes([tenant]), round_.sizes[tenant], room, 0.0):
                room -= round_.sizes[tenant]
                mine[tenant] += round_.sizes[tenant]
                assert room >= 0
        came.append(round_.came)
        got.append(mine)
    return came, got


def least_behind(came: list[int], got: list[list[int]], num_tenants: int) -> float:
    """By how much a tenant had less than its share of a window of rounds, at worst."""
    worst = 0.0
    for begin, end in itertools.combinations(range(len(came) + 1), 2):
        share = sum(came[begin:end]) / num_tenants
        for tenant in range(num_tenants):
            worst = max(worst, share - sum(mine[tenant] for mine in got[begin:end]))
    return worst


@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), rounds_of(n, 120))))
def test_each_of_n_tenants_that_ask_gets_its_share_of_any_window_within_two_rows(
    drawn: tuple[int, list[Round]],
) -> None:
    num_tenants, rounds = drawn
    came, got = admitted(FairRoom(), rounds, num_tenants)
    assert least_behind(came, got, num_tenants) <= 2 * ROW + num_tenants


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(st.just(n), rounds_of(n, 120), st.integers(4 * ROW, 120))
    )
)
def test_it_is_within_one_row_where_there_is_room_for_a_row_of_each(
    drawn: tuple[int, list[Round], int],
) -> None:
    num_tenants, rounds, least = drawn
    for round_ in rounds:
        round_.came = max(round_.came, least)
    came, got = admitted(FairRoom(), rounds, num_tenants)
    assert least_behind(came, got, num_tenants) <= ROW + num_tenants


def test_that_law_notices_first_come_first_served() -> None:
    """Negative control."""
    flooded = [Round(40, (0, 1), (ROW, ROW))] * 10
    for law, is_fair in ((FairRoom(), True), (FirstCome(), False)):
        behind = least_behind(*admitted(law, flooded, 2), 2)
        assert (behind <= ROW + 2) == is_fair


# Nothing is left unused that nobody wants


events = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, ROW),
        st.integers(-30, 60),
        st.sampled_from([0.0, 0.1, 1.5, 30.0, 70.0]),
    ),
    max_size=60,
)


def check_conserved(law: FairRoom, given_: Sequence[tuple[int, int, int, float]]) -> None:
    """A row is refused for want of room, or because another tenant has asked of late."""
    room, now = 0, 0.0
    usual = 0.0
    last: dict[int, float] = {}
    for tenant, nbytes, came, waited in given_:
        room, now = room + came, now + waited
        usual = max(room, usual * 0.5 ** (waited / HALF_S))
        others = [at for other, at in last.items() if other != tenant]
        is_alone = all(now - at > RETURNS_S for at in others)
        is_admitted = law.admits(bytes([tenant]), nbytes, room, now)
        last[tenant] = now
        if is_admitted:
            assert nbytes <= room
            room -= nbytes
        elif nbytes <= room:
            assert not is_alone
            # For tenants that do not ask now, a quarter of the usual room is kept at most.
            if all(now - at > ASKS_S for at in others):
                assert nbytes > room - usual / RETURN_SHARE - 1


@given(events)
def test_a_row_is_refused_only_for_want_of_room_or_for_another_that_asks(
    drawn: list[tuple[int, int, int, float]],
) -> None:
    check_conserved(FairRoom(), drawn)


@pytest.mark.parametrize("law", [Quotas, FirstCome])
def test_that_law_notices(law: type[FairRoom]) -> None:
    """Negative control: fixed parts; first come first served breaks only the other law."""
    alone = [(0, ROW, 3 * ROW, 0.0)] * 2
    if law is FirstCome:
        check_conserved(law(), alone)
        return
    with pytest.raises(AssertionError):
        check_conserved(law(), alone)


@pytest.mark.parametrize("pause_s", [ASKS_S / 2, 10.0, RETURNS_S * 0.9])
def test_one_that_comes_back_finds_room_beside_a_flood(pause_s: float) -> None:
    law, room, now = FairRoom(), 40 * ROW, 0.0
    assert law.admits(OTHER, ROW, room, now)
    room -= ROW
    for _ in range(20):
        now += pause_s / 20
        room = 40 * ROW
        while law.admits(FLOOD, ROW, room, now):
            room -= ROW
    for _ in range(5):  # half of the quarter, or of all while it keeps its credit
        assert law.admits(OTHER, ROW, room, now)
        room -= ROW


def test_first_come_first_served_has_none_for_it() -> None:
    """Negative control of the scenario: the flood has taken all but what has just come."""
    law, room = FirstCome(), 40 * ROW
    while law.admits(FLOOD, ROW, room, 0.0):
        room -= ROW
    assert not law.admits(OTHER, ROW, room, 0.0)


def test_many_tenants_are_bounded_and_each_finds_room() -> None:
    law, room = FairRoom(), 8 * ROW
    admitted_ = 0
    for number in range(4 * MOST_TENANTS):
        if law.admits(number.to_bytes(4, "big"), ROW, room, number * 0.05):
            room, admitted_ = room - ROW, admitted_ + 1
        assert len(law) <= MOST_TENANTS
        room = min(room + ROW, 8 * ROW)
    assert admitted_ > 3 * MOST_TENANTS
