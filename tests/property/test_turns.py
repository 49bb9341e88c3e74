"""No pull ends later than if all shared equally, in a naive world served byte by byte."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import Protocol

from hypothesis import given
from hypothesis import strategies as st

from pdconn.puller.fair_queue import FairQueue

Asked = list[tuple[int, int]]
"""(bytes served in all when it was asked for, bytes wanted) of each pull, in order."""


class Order(Protocol):
    """What decides whose byte is next."""

    def add_pull(self, pull: int, nbytes: int) -> None: ...
    def first(self) -> int | None: ...
    def remove_pull(self, pull: int) -> None: ...
    def served(self, pull: int, nbytes: int) -> None: ...


class FirstCome:
    """As if there were no turns."""

    def __init__(self) -> None:
        self._queue: deque[int] = deque()

    def add_pull(self, pull: int, nbytes: int) -> None:
        self._queue.append(pull)

    def first(self) -> int | None:
        return self._queue[0] if self._queue else None

    def remove_pull(self, pull: int) -> None:
        self._queue.remove(pull)

    def served(self, pull: int, nbytes: int) -> None:
        pass


asked_for = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=8).map(
    sorted
)


def one_by_one(order: Order, asked: Asked) -> dict[int, int]:
    """When each pull ends, a byte a tick to the first; idle ticks pass too."""
    left = [nbytes for _, nbytes in asked]
    ends: dict[int, int] = {}
    tick = 0
    while len(ends) < len(asked):
        for pull, (when, nbytes) in enumerate(asked):
            if when == tick:
                order.add_pull(pull, nbytes)
        tick += 1
        if (pull_now := order.first()) is not None:
            left[pull_now] -= 1
            order.served(pull_now, 1)
            if not left[pull_now]:
                order.remove_pull(pull_now)
                ends[pull_now] = tick
    return ends


def shared(asked: Asked) -> dict[int, Fraction]:
    """When each pull ends if every tick's byte is cut into equal parts."""
    left = {pull: Fraction(nbytes) for pull, (_, nbytes) in enumerate(asked)}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(asked):
        here = [p for p, (when, _) in enumerate(asked) if when <= now and p not in ends]
        comes = min((Fraction(when) for when, _ in asked if when > now), default=None)
        if not here:
            assert comes is not None
            now = comes
            continue
        step = min(left[pull] for pull in here) * len(here)
        if comes is not None:
            step = min(step, comes - now)
        now += step
        for pull in here:
            left[pull] -= step / len(here)
            if not left[pull]:
                ends[pull] = now
    return ends


def latest(asked: Asked, order: Order) -> Fraction:
    """By how many ticks the worst pull ends after its equal share; at most 1 is a byte."""
    ours, equal = one_by_one(order, asked), shared(asked)
    return max(ours[pull] - equal[pull] for pull in equal)


@given(asked_for)
def test_no_pull_ends_later_than_with_equal_shares(asked: Asked) -> None:
    assert latest(asked, FairQueue[int]()) <= 1


@given(asked_for)
def test_the_link_is_never_idle_while_a_pull_waits(asked: Asked) -> None:
    ours, plain = one_by_one(FairQueue[int](), asked), one_by_one(FirstCome(), asked)
    assert max(ours.values()) == max(plain.values())


def test_first_come_breaks_that_law() -> None:
    assert latest([(0, 30), (1, 1)], FirstCome()) > 1


def test_equal_pulls_asked_at_once_go_one_after_the_other() -> None:
    ends = one_by_one(FairQueue[int](), [(0, 8)] * 4)
    assert list(ends.values()) == [8, 16, 24, 32]


def test_the_picture_of_the_module() -> None:
    asked = [(0, 8), (0, 8), (4, 1)]
    assert one_by_one(FirstCome(), asked) == {0: 8, 1: 16, 2: 17}
    assert one_by_one(FairQueue[int](), asked) == {0: 9, 1: 17, 2: 5}
    assert {pull: float(end) for pull, end in shared(asked).items()} == {0: 17, 1: 17, 2: 7}


def test_an_empty_queue_has_no_first() -> None:
    turns = FairQueue[str]()
    assert turns.first() is None
    assert len(turns) == 0
    turns.add_pull("a", 1)
    assert len(turns) == 1
    turns.remove_pull("a")
    turns.remove_pull("a")
    assert (turns.first(), len(turns)) == (None, 0)
