"""Nothing counted is lost between the lender's thread and the engine's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from pdconn.lender.server import Lender
from tests.fakes.pair import Pair
from tests.threads.inside import sessions_of

PATIENCE_S = 20.0


class PausedIncrement(Counter[str]):
    """The first increment of ``name`` stops between its read and its write.

    Python may switch threads there at any time; here it always does.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name: str | None = name
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __missing__(self, key: str) -> int:
        if key == self._name:
            self._name = None
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
        return 0


def swap_counters(lender: Lender) -> dict[str, int]:
    """The negative control: the engine's thread swaps the counter of the lender's thread."""
    counts, sessions_of(lender).counts = sessions_of(lender).counts, Counter()
    return dict(counts + Counter(lender.take_lease_counts()))


@pytest.mark.parametrize(
    ("take", "seen"),
    [(Lender.take_lease_counts, 1), (swap_counters, 0)],
    ids=["outbox", "swapped by the engine"],
)
def test_an_increment_that_meets_the_taking_of_counts_is_not_lost(
    take: Callable[[Lender], dict[str, int]], seen: int
) -> None:
    with Pair() as pair:
        counts = sessions_of(pair.lender).counts = PausedIncrement("lent")
        pair.lend("r")
        assert counts.reached.wait(PATIENCE_S)
        total = Counter(take(pair.lender))
        counts.go_on.set()
        pair.pull("d", pair.lend("s"))
        assert pair.outcome_of("d") is None  # the lender has counted it before it granted
        total.update(take(pair.lender))
        assert total["claims"] == 1
        assert total["lent"] == seen + 1


def test_every_increment_is_taken_once_by_an_engine_that_takes_all_the_time() -> None:
    num_leases = 3000
    with Pair() as pair:
        total: Counter[str] = Counter()
        freed = 0
        for number in range(num_leases):
            pair.lender.lend(f"r{number}", bytes(16), 60.0)
            pair.lender.abort_lease(f"r{number}")
            total.update(pair.lender.take_lease_counts())
            freed += len(pair.lender.take_freed())

        def drained() -> bool:
            nonlocal freed
            freed += len(pair.lender.take_freed())
            total.update(pair.lender.take_lease_counts())
            return freed == num_leases

        pair.wait(drained, PATIENCE_S)
        total.update(pair.lender.take_lease_counts())
        assert total == {"lent": num_leases, "freed_aborted": num_leases}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "pdconn-lender"]
