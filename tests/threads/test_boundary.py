"""Nothing is shared between two threads but what the boxes between them carry.

Checked on real objects after real work: no mutable thing is reached from two sides.  What the
boxes carry is reached from the side that has it now, and no lock is needed anywhere.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.settings import StoreSettings
from pdconn.threads import Box, Worker
from tests.fakes.pair import Pair
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready
from tests.threads.inside import loop_of
from tests.threads.ownership import Side, locks, shared, sides_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A lender and a puller after a few pulls, one of them by a name that was looked up."""
    with Pair(warms=True) as made:
        for number in range(3):
            made.pull(f"d{number}", made.lend(f"r{number}"))
            assert made.outcome_of(f"d{number}") is None
        yield made


def test_a_puller_and_its_threads_share_nothing(pair: Pair) -> None:
    sides = sides_of(pair.puller)
    assert [side.name for side in sides] == ["Puller", "pdconn-puller", "pdconn-reader"]
    assert len(sides[1].reached) > 50, "the walk reaches what the thread owns"
    assert shared(sides) == []
    assert locks(sides) == []


def test_a_lender_and_its_thread_share_nothing(pair: Pair) -> None:
    sides = sides_of(pair.lender)
    assert [side.name for side in sides] == ["Lender", "pdconn-lender"]
    assert len(sides[1].reached) > 20
    assert shared(sides) == []
    assert locks(sides) == []


def _by_attribute(pair: Pair) -> None:
    pair.puller.peek = loop_of(pair.puller)._pulls  # type: ignore[attr-defined]


def _by_callback(pair: Pair) -> None:
    """As the store's keeper had it: what is being saved, emptied by another thread."""
    loop_of(pair.puller).settled = pair.puller._awaited.discard


def _by_partial(pair: Pair) -> None:
    loop_of(pair.puller).clock = partial(pair.puller._reported.counts.update, {})


def _by_closure(pair: Pair) -> None:
    reports = pair.puller._reported.reports
    loop_of(pair.puller).report = lambda: [reports.clear(), reports.append]


def _through_the_reader(pair: Pair) -> None:
    loop = loop_of(pair.puller)
    loop_of(loop._reader).peers = loop._pulls.peers


@pytest.mark.parametrize(
    "share", [_by_attribute, _by_callback, _by_partial, _by_closure, _through_the_reader]
)
def test_what_two_threads_reach_is_found(pair: Pair, share: Callable[[Pair], None]) -> None:
    """Negative controls: each way in which sides had shared something before."""
    share(pair)
    assert shared(sides_of(pair.puller)) != []


def test_a_lock_outside_of_boxes_is_found(pair: Pair) -> None:
    """Negative control."""
    loop_of(pair.puller).lock = threading.Lock()
    assert locks(sides_of(pair.puller)) == ["pdconn-puller.__self__.lock"]


def test_values_and_boxes_are_shared_freely() -> None:
    box: Box[Any] = Box()
    worker = Worker("w", partial(box.take_one, 0.0), box, Box())
    assert not Side.of("s", (worker, box, "text", 1)).reached


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FakeEngine]:
    """An engine's store after rows were saved, loaded, missed and dropped."""
    settings = StoreSettings(
        str(tmp_path / "root"), 1 << 30, staging=8 << 20, block_tokens=64, min_tokens=1
    )
    engine = FakeEngine(settings, Model(), Shape(tp=2), budget=None)
    until_ready(engine)
    for prompt in (range(300), range(300), range(1000, 1300)):
        assert engine.run(list(prompt)).wrong == 0
        engine.settle()
    yield engine
    engine.close()


def test_a_store_and_its_threads_in_the_scheduler_share_nothing(store: FakeEngine) -> None:
    sides = sides_of(store.store)
    assert {side.name for side in sides} == {
        "StoreScheduler", "pdconn-store-keeper", "pdconn-store-lookup",
    }  # fmt: skip
    assert shared(sides) == []
    assert locks(sides) == []


def test_a_rank_of_a_store_and_its_threads_share_nothing(store: FakeEngine) -> None:
    sides = sides_of(store.rank_stores[0])
    assert {side.name for side in sides} == {
        "RankStore", "pdconn-store-read-0", "pdconn-store-read-1", "pdconn-store-write",
    }  # fmt: skip
    assert all(len(side.reached) > 5 for side in sides), "the walk reaches what threads began with"
    assert shared(sides) == []
    assert locks(sides) == []


def test_what_two_threads_of_a_store_reach_is_found(store: FakeEngine) -> None:
    """Negative controls, as it was: the catalogue of two threads, and what is being saved."""
    keeper = loop_of(store.store._keeper)
    lookups = loop_of(store.store._lookups)
    before, keeper._catalogue = keeper._catalogue, lookups._finder.catalogue
    assert shared(sides_of(store.store)) != []
    keeper._catalogue = before
    keeper.settle = store.store._keeper._saving.discard
    assert shared(sides_of(store.store)) != []


LIBRARIES = ("pdconn/store/shelf/obj/bucket.py", "pdconn/store/shelf/transfer.py")
THREADING = {"pdconn/threads.py", *LIBRARIES}
"""Boxes and workers; and what locks a library that all threads of a process share."""
ROOMS = ("puller", "lender", "sidechannel", "faults", "store", "integrity", "threads.py")


def test_only_boxes_and_workers_have_locks_and_threads() -> None:
    found = set()
    for room in ROOMS:
        path = ROOT / "pdconn" / room
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            if re.search(r"^(import|from) (threading|queue)\b", file.read_text("utf-8"), re.M):
                found.add(file.relative_to(ROOT).as_posix())
    assert found == THREADING
