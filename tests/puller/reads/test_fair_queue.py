"""Pulls are fair among tenants, against shares that are simulated, a byte at a time."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from fractions import Fraction
from typing import NamedTuple, Protocol

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdconn.puller import fair_queue
from pdconn.puller.fair_queue import FairQueue


class Asked(NamedTuple):
    """A pull that is asked for at a tick."""

    at: int
    nbytes: int
    tenant: bytes = b""


class Order(Protocol):
    """What decides whose byte is next."""

    def add_pull(self, pull: int, nbytes: int, tenant: bytes = b"") -> None: ...
    def first(self) -> int | None: ...
    def served(self, pull: int, nbytes: int) -> None: ...
    def remove_pull(self, pull: int) -> None: ...


class WithoutTenants:
    """Equal shares of pulls, whoever's they are: the order that one tenant's pulls always had."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._queued: list[tuple[float, int, int]] = []
        self._sharing: list[float] = []

    def add_pull(self, pull: int, nbytes: int, tenant: bytes = b"") -> None:
        ends = self._now + nbytes
        heapq.heappush(self._queued, (ends, next(self._numbers), pull))
        heapq.heappush(self._sharing, ends)

    def first(self) -> int | None:
        return self._queued[0][-1] if self._queued else None

    def served(self, pull: int, nbytes: int) -> None:
        left = float(nbytes)
        while self._sharing:
            until_one_ends = (self._sharing[0] - self._now) * len(self._sharing)
            if left < until_one_ends:
                self._now += left / len(self._sharing)
                return
            left -= until_one_ends
            self._now = heapq.heappop(self._sharing)

    def remove_pull(self, pull: int) -> None:
        assert heapq.heappop(self._queued)[-1] == pull
        if not self._queued:
            self.__init__()  # type: ignore[misc]


def served(order: Order, asked: list[Asked]) -> str:
    """Whose byte is served at each tick: the letter of a pull; a dot where there is none."""
    left, seen, tick = [one.nbytes for one in asked], "", 0
    while any(left):
        for pull, one in enumerate(asked):
            if one.at == tick:
                order.add_pull(pull, one.nbytes, one.tenant)
        tick, pull_now = tick + 1, order.first()
        seen += "." if pull_now is None else chr(ord("a") + pull_now)
        if pull_now is not None:
            left[pull_now] -= 1
            order.served(pull_now, 1)
            if not left[pull_now]:
                order.remove_pull(pull_now)
    return seen


def ends_of(order: Order, asked: list[Asked]) -> list[int]:
    seen = served(order, asked)
    return [seen.rindex(chr(ord("a") + pull)) + 1 for pull in range(len(asked))]


def shared(asked: list[Asked]) -> list[Fraction]:
    """When each pull ends if tenants share every tick equally, and the pulls of each its part."""
    left = [Fraction(one.nbytes) for one in asked]
    ends = [Fraction(0)] * len(asked)
    now = Fraction(0)
    while any(left):
        here = [pull for pull, one in enumerate(asked) if one.at <= now and left[pull]]
        comes = min((Fraction(one.at) for one in asked if one.at > now), default=None)
        if not here:
            assert comes is not None
            now = comes
            continue
        pulls = Counter(asked[pull].tenant for pull in here)
        rates = {pull: Fraction(1, len(pulls) * pulls[asked[pull].tenant]) for pull in here}
        step = min(left[pull] / rate for pull, rate in rates.items())
        step = step if comes is None else min(step, comes - now)
        now += step
        for pull, rate in rates.items():
            left[pull] -= step * rate
            ends[pull] = ends[pull] if left[pull] else now
    return ends


def lateness(asked: list[Asked], order: Order, *, of_only_pulls: bool = False) -> Fraction:
    """By how many ticks the worst pull ends after its share.

    Args:
        of_only_pulls: count those alone whose tenants ask for no other.
    """
    numbers = Counter(one.tenant for one in asked)
    late = [
        ours - equal
        for one, ours, equal in zip(asked, ends_of(order, asked), shared(asked), strict=True)
        if not of_only_pulls or numbers[one.tenant] == 1
    ]
    return max(late, default=Fraction(0))


def num_tenants(asked: list[Asked]) -> int:
    return len({one.tenant for one in asked})


tenants = st.sampled_from([b"A", b"B", b"C", b"D"])
ticks, sizes = st.integers(0, 40), st.integers(1, 25)
pulls = st.lists(st.builds(Asked, ticks, sizes, tenants), min_size=1, max_size=10).map(sorted)


def _in_pairs(pairs: list[tuple[Asked, int]]) -> list[Asked]:
    return sorted(pull for one, more in pairs for pull in (one, one._replace(nbytes=more)))


in_pairs = st.lists(
    st.tuples(st.builds(Asked, ticks, sizes, tenants), sizes), min_size=1, max_size=6
).map(_in_pairs)
"""Pulls of tenants that never have one alone when they begin."""

FLOOD = [Asked(0, 6, b"A") for _ in range(8)]
ONE_EACH = [Asked(0, 20, b"A"), Asked(0, 20, b"B"), Asked(10, 20, b"C")]
STREAM = [Asked(0, 2, b"A"), Asked(0, 30, b"B"), *(Asked(at, 2, b"A") for at in range(2, 38, 2))]
RUSH = [
    Asked(0, 3, b"C"), Asked(0, 16, b"C"), Asked(3, 6, b"A"), Asked(3, 9, b"A"),
    *(Asked(18, nbytes, b"C") for nbytes in (8, 10, 13, 14)),
]  # fmt: skip


# The order of one tenant's pulls, and of one pull of each


@given(pulls, st.binary(max_size=8))
def test_pulls_of_one_tenant_are_served_in_the_order_that_they_always_had(
    asked: list[Asked], tenant: bytes
) -> None:
    """So are all pulls without a tenant."""
    asked = [one._replace(tenant=tenant) for one in asked]
    assert served(FairQueue[int](), asked) == served(WithoutTenants(), asked)


@given(pulls)
def test_tenants_with_one_pull_each_are_served_in_that_order_too(asked: list[Asked]) -> None:
    asked = [one._replace(tenant=bytes([number])) for number, one in enumerate(asked)]
    assert served(FairQueue[int](), asked) == served(WithoutTenants(), asked)


def test_that_law_notices_tenants_that_get_no_more_than_their_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: equal pulls of several tenants would all end at the end."""
    assert served(FairQueue[int](), ONE_EACH) == served(WithoutTenants(), ONE_EACH)
    monkeypatch.setattr(
        fair_queue._TenantPulls, "may_be_served", lambda tenant, now: tenant.level <= now
    )
    assert served(FairQueue[int](), ONE_EACH) != served(WithoutTenants(), ONE_EACH)


def test_the_picture_of_the_module() -> None:
    asked = [*(Asked(0, 4, b"A") for _ in range(3)), Asked(2, 5, b"B")]
    assert served(WithoutTenants(), asked) == "aaaabbbbccccddddd"
    assert served(FairQueue[int](), asked) == "aaadaddddbbbbcccc"
    assert shared(asked)[-1] == 12


# The shares of tenants


@given(pulls)
@example(sorted([*FLOOD, Asked(3, 4, b"B")]))
@example(sorted(STREAM))
def test_the_only_pull_of_a_tenant_ends_no_later_than_with_its_share(asked: list[Asked]) -> None:
    late = lateness(asked, FairQueue[int](), of_only_pulls=True)
    assert late <= num_tenants(asked), "a chunk of each tenant"


@given(in_pairs)
@example(sorted(RUSH))
def test_no_pull_does_while_each_tenant_has_several(asked: list[Asked]) -> None:
    assert lateness(asked, FairQueue[int]()) <= num_tenants(asked)


@given(pulls)
def test_the_link_is_never_idle_while_a_pull_waits(asked: list[Asked]) -> None:
    idle = [at for at, seen in enumerate(served(FairQueue[int](), asked)) if seen == "."]
    assert idle == [at for at, seen in enumerate(served(WithoutTenants(), asked)) if seen == "."]


def test_shares_of_pulls_break_the_first_of_these_laws() -> None:
    """Negative control: eight pulls of one tenant have eight shares."""
    asked = sorted([*FLOOD, Asked(0, 6, b"B")])
    assert lateness(asked, FairQueue[int](), of_only_pulls=True) <= 2
    assert lateness(asked, WithoutTenants(), of_only_pulls=True) > 2


class Forgetful(FairQueue[int]):
    """What a tenant was served is forgotten when it has no pull."""

    def remove_pull(self, pull: int) -> None:
        tenant = self._queued[pull].tenant
        super().remove_pull(pull)
        if tenant.turn is None:
            tenant.level, tenant.num_pulls = self._now, 0


def test_a_tenant_that_comes_back_at_once_has_one_share() -> None:
    """With a negative control: pull after pull, each the only one, would all go first."""
    asked = sorted(STREAM)
    assert lateness(asked, FairQueue[int](), of_only_pulls=True) <= 2
    assert lateness(asked, Forgetful(), of_only_pulls=True) > 2


def test_a_tenant_that_is_served_ahead_breaks_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    asked = sorted(RUSH)
    assert lateness(asked, FairQueue[int]()) <= 2
    monkeypatch.setattr(fair_queue._TenantPulls, "may_be_served", lambda tenant, now: True)
    assert lateness(asked, FairQueue[int]()) > 2


# Pulls that fail, and what is remembered


def first_after_a_failure(left: int) -> str | None:
    """The first of two pulls, after one of a third tenant has failed with so many bytes left."""
    queue = FairQueue[str]()
    queue.add_pull("fails", 1000, b"A")
    queue.add_pull("earlier", 10, b"B")
    queue.served("earlier", 2)
    queue._queued["fails"].left = left
    queue.remove_pull("fails")
    queue.served("earlier", 6)
    queue.add_pull("later", 5, b"C")
    return queue.first()


def test_the_rest_of_a_pull_that_fails_takes_nobodys_share() -> None:
    """With a negative control: a share that goes on without a pull slows the virtual time."""
    assert first_after_a_failure(1000) == "earlier", "7 of its 10 bytes are its share by then"
    assert first_after_a_failure(0) == "later"


@given(st.data())
def test_nothing_is_left_when_all_pulls_have_ended_or_failed(data: st.DataObject) -> None:
    queue, left, number = FairQueue[int](), dict[int, int](), itertools.count()
    names: dict[int, bytes] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["add", "serve", "serve", "fail"]))
        if what == "add":
            pull, nbytes = next(number), data.draw(st.sampled_from([0, 1, 7, 10**15]))
            left[pull], names[pull] = nbytes, data.draw(tenants)
            queue.add_pull(pull, nbytes, names[pull])
        elif left and what == "fail":
            pull = data.draw(st.sampled_from(sorted(left)))
            queue.remove_pull(pull)
            del left[pull]
        elif left:
            first = queue.first()
            assert first in left
            part = min(left[first], data.draw(st.sampled_from([1, 3, 10**14])))
            queue.served(first, part)
            left[first] -= part
            if not left[first]:
                queue.remove_pull(first)
                del left[first]
        assert len(queue) == len(left)
        assert (queue.first() is None) == (not left)
        assert queue.num_tenants >= len({names[pull] for pull in left})
    for pull in list(left):
        queue.remove_pull(pull)
    assert (len(queue), queue.num_tenants, queue.first()) == (0, 0, None)


def test_tenants_are_remembered_no_longer_than_their_shares_last() -> None:
    """A thousand tenants with a small pull each, beside one whose pull is long."""
    queue, most = FairQueue[int](), 0
    queue.add_pull(0, 10_000, b"long")
    for number in range(1, 1001):
        queue.add_pull(number, 2, b"%d" % number)
        for _ in range(8):
            first = queue.first()
            assert first is not None
            queue.served(first, 1)
            if first and first == number and not queue._queued[first].left:
                queue.remove_pull(first)
        most = max(most, queue.num_tenants)
    assert most <= 3
