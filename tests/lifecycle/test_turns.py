"""The order of classes and of tenants, each law with a variant that breaks it."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.lifecycle import turns
from pdconn.lifecycle.turns import (
    MOST_LEVELS,
    MOST_WAIT_S,
    ClassOrder,
    TenantTurns,
    TurnKey,
    TurnQueue,
    Urgency,
)

A, B, C = b"a", b"b", b"c"
MOST_NBYTES = 9
arrivals = st.lists(
    st.one_of(st.tuples(st.sampled_from([A, B, C]), st.integers(1, MOST_NBYTES)), st.just("take")),
    max_size=80,
)


class FirstCome(TenantTurns[int]):
    """The control: items in order of arrival, as a queue without tenants has them."""

    def __init__(self) -> None:
        super().__init__()
        self._all: deque[tuple[int, bytes]] = deque()

    def add_item(self, item: int, tenant: bytes, nbytes: int, *, is_first: bool = False) -> None:
        self._all.append((item, tenant))

    def take_item(self) -> int:
        return self._all.popleft()[0]

    def __bool__(self) -> bool:
        return bool(self._all)


def most_unfair(queue: TenantTurns[int], events: list[object]) -> int:
    """By how many bytes one tenant is served more than another, in any span of takes in which both
    always have something that waits.
    """
    items: list[tuple[bytes, int]] = []
    backlog: Counter[bytes] = Counter()
    lead: dict[tuple[bytes, bytes], tuple[int, int, int]] = {}
    worst = 0
    pairs = list(itertools.permutations((A, B, C), 2))
    for event in [*events, *["take"] * len(events)]:
        if isinstance(event, tuple):
            queue.add_item(len(items), *event)
            items.append(event)
            backlog[event[0]] += 1
            continue
        if not queue:
            continue
        tenant, nbytes = items[queue.take_item()]
        for one, other in pairs:
            if not (backlog[one] and backlog[other]):
                lead.pop((one, other), None)
                continue
            now, low, _ = lead.get((one, other), (0, 0, 0))
            now += nbytes * ((tenant == one) - (tenant == other))
            low = min(low, now)
            lead[one, other] = now, low, 0
            worst = max(worst, now - low)
        backlog[tenant] -= 1
    return worst


@given(arrivals)
def test_of_two_tenants_that_wait_none_is_served_more_than_an_item_of_each_ahead(
    events: list[object],
) -> None:
    assert most_unfair(TenantTurns(), events) <= 2 * MOST_NBYTES


def test_that_law_notices_first_come_first_served() -> None:
    """Negative control."""
    events = [*[(A, 5)] * 20, *[(B, 5)] * 20]
    assert most_unfair(TenantTurns(), list(events)) <= 2 * MOST_NBYTES
    assert most_unfair(FirstCome(), list(events)) > 2 * MOST_NBYTES


def test_one_load_does_not_wait_for_a_hundred_of_another_tenant() -> None:
    queue = TurnQueue[str]()
    for number in range(100):
        queue.add_item(f"a{number}", TurnKey(Urgency.LOAD, A, 5))
    taken = [queue.take_item(0.0)]
    queue.add_item("b", TurnKey(Urgency.LOAD, B, 5))
    taken += [queue.take_item(0.0), queue.take_item(0.0)]
    assert "b" in taken


def test_a_tenant_that_comes_back_is_owed_nothing() -> None:
    queue = TenantTurns[str]()
    for number in range(10):
        queue.add_item(f"a{number}", A, 5)
    queue.add_item("b", B, 5)
    taken = [queue.take_item() for _ in range(8)]
    for number in range(8):
        queue.add_item(f"b{number}", B, 5)
    taken = [queue.take_item() for _ in range(6)]
    assert sum(name.startswith("b") for name in taken) in (3, 4)


def test_one_that_always_has_one_large_item_gets_its_share_in_bytes() -> None:
    queue, nbytes = TenantTurns[bytes](), Counter[bytes]()
    sizes = {A: 1, B: 8}
    for _ in range(500):
        queue.add_item(A, A, 1)
    queue.add_item(B, B, 8)
    while nbytes[A] < 300:
        taken = queue.take_item()
        nbytes[taken] += sizes[taken]
        if taken == B:
            queue.add_item(B, B, 8)
    assert abs(nbytes[A] - nbytes[B]) <= 9


def test_levels_of_many_tenants_are_forgotten() -> None:
    queue = TenantTurns[int]()
    for number in range(3 * MOST_LEVELS):
        queue.add_item(number, str(number).encode(), 10)
        queue.take_item()
    assert len(queue._levels) <= MOST_LEVELS + 1


def test_items_of_a_tenant_keep_their_order_and_the_first_are_first() -> None:
    queue = TurnQueue[int]()
    load = TurnKey(Urgency.LOAD, A, 1)
    for number in (3, 4):
        queue.add_item(number, load)
    queue.add_first([(1, load), (2, load)])
    assert queue.remove_items(lambda item: item == 3) == [3]
    assert (len(queue), sorted(queue), queue.first_item(0.0)) == (3, [1, 2, 4], 1)
    assert [queue.take_item(0.0) for _ in range(4)] == [1, 2, 4, None]
    assert queue.due_at() is None


# Classes

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(Urgency)),
        st.tuples(st.just("elsewhere"), st.sampled_from([None, *Urgency])),
        st.tuples(st.just("wait"), st.sampled_from([0.001, 0.01, 0.1, 0.6])),
        st.tuples(st.just("take"), st.none()),
    ),
    max_size=100,
)


def check_classes(events: list[tuple[str, object]]) -> None:
    """Run events; after each, who is served is compared with what the table says of who waits."""
    queue, now, elsewhere = TurnQueue[Urgency](), 0.0, None
    waits: Counter[Urgency] = Counter()
    since: dict[Urgency, float] = {}
    overdue = 0
    for what, value in events:
        if what == "add":
            assert isinstance(value, Urgency)
            queue.add_item(value, TurnKey(value))
            waits[value] += 1
            since.setdefault(value, now)
        elif what == "wait":
            assert isinstance(value, float)
            now += value
        elif what == "elsewhere":
            elsewhere = value if isinstance(value, Urgency) else None
        # A thread looks after every event.
        if what != "take":
            queue.first_item(now, elsewhere)
            continue
        taken = queue.take_item(now, elsewhere)
        before = [urgency for urgency in Urgency if waits[urgency]]
        if taken is None:
            assert all(now - since[urgency] < MOST_WAIT_S[urgency] for urgency in before)
            assert all(urgency > Urgency.LOAD for urgency in before)
            assert not before or elsewhere is not None
            continue
        more_urgent = [urgency for urgency in before if urgency < taken]
        is_held = taken > Urgency.LOAD and elsewhere is not None and elsewhere < taken
        if more_urgent or is_held:
            overdue += 1
            assert now - since[taken] >= MOST_WAIT_S[taken]
        waits[taken] -= 1
        if waits[taken]:
            since[taken] = now
        else:
            del since[taken]
            queue.first_item(now, elsewhere)
    assert queue.take_overdue() == overdue


@given(steps)
def test_a_class_goes_before_another_unless_that_has_waited_as_long_as_it_may(
    events: list[tuple[str, object]],
) -> None:
    check_classes(events)


EXAMPLE = [
    ("add", Urgency.SAVE), ("add", Urgency.PREFETCH), ("add", Urgency.LOAD),
    *[("take", None)] * 2, ("add", Urgency.LOAD), ("wait", 0.6), ("wait", 0.6),
    *[("take", None)] * 3, ("elsewhere", Urgency.PULL), ("add", Urgency.PREFETCH), ("take", None),
]  # fmt: skip


STARVING = [("add", Urgency.SAVE), ("elsewhere", Urgency.PULL), ("wait", 0.6), ("take", None)]


class LeastUrgentFirst(ClassOrder):
    """A control."""

    def choose(
        self, waiting: Collection[Urgency], now: float, elsewhere: Urgency | None = None
    ) -> Urgency | None:
        return max(waiting, default=None)


class StarvesOthers(ClassOrder):
    """A control."""

    def choose(
        self, waiting: Collection[Urgency], now: float, elsewhere: Urgency | None = None
    ) -> Urgency | None:
        first = min(waiting, default=None)
        return None if elsewhere is not None and first and elsewhere < first else first


@pytest.mark.parametrize("broken", [LeastUrgentFirst, StarvesOthers])
def test_that_law_notices(broken: type[ClassOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: of another order, and of one without a bound."""
    check_classes(EXAMPLE)
    monkeypatch.setattr(turns, "ClassOrder", broken)
    assert not all(map(_holds, (EXAMPLE, STARVING)))


def _holds(events: list[tuple[str, object]]) -> bool:
    try:
        check_classes(events)
    except AssertionError:
        return False
    return True
