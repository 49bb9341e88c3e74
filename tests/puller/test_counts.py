"""Counts cross from the puller's thread to the engine's, and none is lost on the way."""

from __future__ import annotations

import threading
from collections import Counter

from tests.fakes.pair import Pair
from tests.threads.inside import pulls_of


class Interrupted(Counter[str]):
    """A counter whose increments the engine's thread interrupts to take the counts.

    ``counts[key] += 1`` reads, adds and writes back; the engine takes in between.
    """

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.taken: Counter[str] = Counter()
        self.times = 0

    def __getitem__(self, key: str) -> int:
        value = super().__getitem__(key)
        engine = threading.Thread(target=self._take)
        engine.start()
        engine.join(20.0)
        assert not engine.is_alive(), "the engine's thread waits for the puller's"
        return value

    def _take(self) -> None:
        self.times += 1
        self.taken.update(self.pair.puller.take_pull_counts())


def test_an_increment_that_meets_the_taking_of_counts_is_not_lost() -> None:
    with Pair() as pair:
        ticket = pair.lend("r")
        pair.pull("d", ticket)
        assert pair.outcome_of("d") is None
        counts = Interrupted(pair)
        pulls_of(pair.puller).counts = counts
        for number in range(3):
            pair.pull(f"again{number}", ticket)
            assert "refused, consumed" in str(pair.outcome_of(f"again{number}"))
        counts.taken.update(pair.puller.take_pull_counts())
        assert counts.times, "no increment was interrupted"
        assert counts.taken["pulls_refused_consumed"] == 3
