"""Lending wakes the lender's thread only where it must, and never too late."""

from __future__ import annotations

import math
import time

from pdconn.protocol.ticket import BlockList
from tests.fakes.pair import Pair


class Woken:
    """Counts how often a lender's thread is woken."""

    def __init__(self, pair: Pair) -> None:
        self.times = 0
        queue = pair.lender._inbox
        wake = queue.wake

        def counted() -> None:
            self.times += 1
            wake()

        queue.wake = counted  # type: ignore[method-assign]
        self._pair = pair
        self.lent = 0
        # It sleeps until a connection comes.
        pair.wait(lambda: pair.lender._inbox.sleeps_until == math.inf)

    def by_lending(self, ttl_s: float) -> bool:
        """Whether lending something for so long wakes the thread."""
        before, self.lent = self.times, self.lent + 1
        self._pair.lender.lend(f"r{self.lent}", b"x" * 16, ttl_s)
        return self.times > before


def test_only_a_lease_that_ends_before_the_others_wakes_the_lender() -> None:
    with Pair() as pair:
        woken = Woken(pair)
        assert woken.by_lending(60.0)
        pair.wait(lambda: not woken.by_lending(61.0))  # once it knows of the first
        assert woken.by_lending(0.05)
        assert pair.freed() == "expired"


def lasted_s() -> float:
    """Seconds of a lease of 4 s that wakes nobody, lent while one of 3 s runs."""
    with Pair() as pair:
        woken = Woken(pair)
        assert woken.by_lending(3.0)
        pair.wait(lambda: not woken.by_lending(4.0))
        lent_at, freed_at = time.monotonic(), []
        while len(freed_at) < woken.lent:
            assert time.monotonic() < lent_at + 60.0
            freed_at += [time.monotonic()] * len(pair.lender.take_freed())
            time.sleep(0.005)
        return freed_at[-1] - lent_at


def test_a_lease_without_a_wake_up_begins_when_it_was_lent() -> None:
    """And not as the first one ends; a busy machine makes it last longer, not always."""
    assert any(lasted_s() < 6.5 for _ in range(3))


def test_a_lease_without_a_wake_up_can_be_claimed_at_once() -> None:
    with Pair(ttl_s=90.0) as pair:
        woken = Woken(pair)
        pair.wait(lambda: not woken.by_lending(60.0))
        before = woken.times
        ticket = pair.lend_blocks("quiet", (BlockList(0, (3, 4, 5)),))
        assert woken.times == before
        pair.pull("d", ticket)
        assert pair.outcome_of("d") is None
