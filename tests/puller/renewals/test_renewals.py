"""Renewals of a rank's pulls from one lender share a frame, and alarms wake it for a reason."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import Pull, PullState
from pdconn.protocol.messages import Granted, Renew
from tests.puller.renewals.one_rank import OneRank

TTL_S = 9.0
WAIT_S = TTL_S / 3
PULLS = 5


@pytest.fixture
def rank() -> OneRank:
    """Claims of one lender 0.2 s apart, and of another with the last of them."""
    made = OneRank()
    for number in range(PULLS):
        made.claim(f"a{number}", "a")
        if number == 0:
            made.greet("a")
        grant(made, "a", f"a{number}", 1)
        made.now += 0.2
    made.claim("b0", "b")
    made.greet("b")
    grant(made, "b", "b0", 1)
    for lender in "ab":
        made.frames(lender)
    return made


def grant(rank: OneRank, lender: str, request: str, seq: int) -> None:
    rank.hear(lender, Granted(seq, request, request, int(1000 * TTL_S)))
    rank.pulls.finish_turn()


def renewals(rank: OneRank, until: float) -> list[tuple[str, int]]:
    """Wake at each deadline, and grant all: each frame's lender and number of renewals.

    A wake-up without a frame is one of no renewal, of no lender.
    """
    found = []
    while (at := rank.pulls.next_alarm()) is not None and at <= until:
        rank.now = at
        rank.pulls.tick_due(at)
        rank.pulls.finish_turn()
        frames = [(lender, frame) for lender in "ab" for frame in rank.frames(lender)]
        found += [(lender, len(frame)) for lender, frame in frames] or [("", 0)]
        for lender, frame in frames:
            for message in frame:
                assert isinstance(message, Renew)
                grant(rank, lender, message.request, message.seq)
    return found


def test_renewals_of_one_lender_share_a_frame_and_no_wake_up_is_for_nothing(rank: OneRank) -> None:
    until = rank.now + 3 * WAIT_S
    found = renewals(rank, until)
    assert found == [("a", PULLS), ("b", 1)] * 3
    assert all(rank.state(f"a{number}") is PullState.HELD for number in range(PULLS))


def test_renewals_of_their_own_are_noticed(rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pull, "renew_along", lambda _self, _now: [])
    assert renewals(rank, rank.now + 3 * WAIT_S).count(("a", 1)) == 3 * PULLS


def test_an_alarm_that_was_put_off_does_not_wake() -> None:
    """Until the grant is there, the next renewal is due sooner."""
    rank = OneRank()
    rank.claim("a0", "a")
    rank.greet("a")
    grant(rank, "a", "a0", 1)
    rank.now += WAIT_S
    assert rank.pulls.next_alarm() == pytest.approx(rank.now)
    rank.pulls.tick_due(rank.now + 1e-6)
    rank.pulls.finish_turn()
    assert rank.pulls.next_alarm() == pytest.approx(rank.now + (TTL_S - WAIT_S) / 3)
    grant(rank, "a", "a0", 2)
    assert rank.pulls.next_alarm() == pytest.approx(rank.now + WAIT_S)
