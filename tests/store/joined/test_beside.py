"""What a store loads beside a pull: whatever is lost of it, a rank's pull is told.

The rig's lender writes what ranks say that they have not loaded, and nothing else of full
attention; then every byte is looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pdconn.lifecycle.load import StoreLoad
from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.store.engine import beside
from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.rank.fetches import FetchUnderWay
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import MODELS, SETTINGS, SHAPES, engine, prompt

ROW, LEAST = 64, 20
LENGTH = 6 * ROW + 10
TOKENS = prompt(1, LENGTH)
TWO_RANKS = Shape(tp=2, layout="BHLNC", block_tokens=32, num_blocks=80)


def row(index: int, kind: RowKind = RowKind.FA) -> tuple[str, RowName]:
    """A row of the prompt, as the shelf names it."""
    return "ns", Chain(ROW).extended(TOKENS).name(kind, index)


def store(made: FakeEngine, num_rows: int = 4) -> None:
    """Save the beginning of the prompt."""
    made.run(TOKENS[: num_rows * ROW])
    made.settle()


class HookedShelf(MemoryShelf):
    """Calls ``before`` with the number of each row that is read."""

    def __init__(self, rows: MemoryRows, before: Callable[[int], None]) -> None:
        super().__init__(rows)
        self._before = before

    def read(self, namespace: str, name: RowName, ranges: Sequence[Any]) -> None:
        self._before(name.index)
        super().read(namespace, name, ranges)


@contextmanager
def hanging(at: int, shape: Shape = TWO_RANKS) -> Iterator[tuple[FakeEngine, threading.Event]]:
    """An engine whose reads of row ``at`` return once the event is set."""
    rows, released, hangs = MemoryRows(), threading.Event(), threading.Event()
    with engine(rows, Model(), shape) as first:
        store(first)

    def before(index: int) -> None:
        if index == at:
            hangs.set()
            released.wait(30)

    made = FakeEngine(SETTINGS, Model(), shape, shelf=lambda: HookedShelf(rows, before))
    try:
        yield made, released
    finally:
        released.set()
        made.close()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_stored_is_loaded_and_the_rest_is_the_lenders(model: Model, shape: Shape) -> None:
    with engine(MemoryRows(), model, shape) as made:
        store(made)
        for num_local in (0, 2 * ROW):
            seen = made.pull(TOKENS, num_local=num_local)
            assert seen.loaded == (4 * ROW - num_local,) * shape.tp
            assert (seen.offered, seen.wrong) == (4 * ROW - num_local, 0)
        assert made.pull(TOKENS, num_local=4 * ROW).offered == 0
        made.settle()
        assert len(made.store.loads) == len(made.store.beside) == 0


def test_a_part_is_loaded_of_which_no_window_is_stored() -> None:
    """Alone it could not be resumed: windows are of the source that ends last."""
    rows, model = MemoryRows(), MODELS["window of several blocks"]
    with engine(rows, model, Shape()) as made:
        store(made)
    for index in range(4):
        rows.rows.pop(row(index, RowKind.WA), None)
    with engine(rows, model, Shape(), "other", read_only=True) as made:
        assert made.run(TOKENS).loaded == 0
        seen = made.pull(TOKENS)
        assert (seen.loaded, seen.wrong) == ((4 * ROW,), 0)


@pytest.mark.parametrize("lost", [0, 2, 3])
@pytest.mark.parametrize("is_damaged", [False, True], ids=["gone", "damaged"])
def test_rows_before_the_first_that_is_lost_are_kept(lost: int, is_damaged: bool) -> None:
    rows = MemoryRows()
    with engine(rows, Model(), TWO_RANKS) as made:
        store(made)
        if is_damaged:  # a byte of the second rank's heads
            data = rows.rows[row(lost)].data
            data[made.layout.fa.slabs[-1].offset] ^= 1
        else:
            del rows.rows[row(lost)]
        seen = made.pull(TOKENS)
        # A footer that cannot be read is every rank's loss; a slab is that of one rank.
        kept = (4 * ROW, lost * ROW) if is_damaged else (lost * ROW,) * 2
        assert (seen.loaded, seen.wrong) == (kept, 0)
        made.step()
        assert made.store.loads.counts["store_beside_missed_tokens"] == (4 - lost) * ROW
        give_up = time.monotonic() + 30
        while made.pull(TOKENS).offered > lost * ROW:  # look-ups learn on their own thread
            assert time.monotonic() < give_up, "a row that is lost is offered again"


def test_a_read_that_hangs_keeps_its_bytes_and_not_the_pull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside, "LEAST_WAIT_S", 0.2)
    with hanging(2) as (made, released):
        seen = made.pull(TOKENS)
        assert (seen.loaded, seen.wrong) == ((2 * ROW,) * 2, 0)
        made.step()
        assert len(made.store.loads) == 1, "its bytes are free while a read writes to them"
        assert made.store.loads.patience.is_hung
        assert made.pull(prompt(2, LENGTH)).offered == 0, "others do not wait for it"
        released.set()
        made.settle()
        assert len(made.store.loads) == len(made.store.beside) == 0


def test_that_law_notices_bytes_that_are_freed_while_a_read_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    ended = property(lambda fetch: fetch.joined is not None and fetch.joined.has_ended)
    monkeypatch.setattr(FetchUnderWay, "is_over", ended)
    with pytest.raises(AssertionError, match="its bytes are free"):
        test_a_read_that_hangs_keeps_its_bytes_and_not_the_pull(monkeypatch)


def test_a_request_that_leaves_does_not_free_what_ranks_write_to() -> None:
    with engine(MemoryRows(), Model(), TWO_RANKS) as made:
        store(made)
        seen = made.pull(TOKENS, is_aborted=True)
        assert seen.loaded == (4 * ROW,) * 2, "the pull is told by every rank all the same"
        made.settle()
        assert len(made.store.loads) == len(made.store.beside) == 0


def test_a_reset_in_between_leaves_what_was_offered() -> None:
    with engine(MemoryRows(), Model(), TWO_RANKS) as made:
        store(made)
        seen = made.pull(TOKENS, before_join=lambda: made.store.clear_rows("other"))
        assert (seen.loaded, seen.wrong) == ((0, 0), 0)
        made.settle()


def offered(made: FakeEngine, pull: beside.PullOutlook) -> beside.BesideOffer:
    """What the store offers a request for the prompt that may pull."""
    made.store.on_new_request("r", TOKENS, LENGTH, lambda: (), may_load=True, reads_files=False)
    offers: list[beside.BesideOffer | None] = [None]

    def is_known() -> bool:
        offers[0] = made.store.offer_beside("r", pull)
        return offers[0] is not None

    made._until(is_known, lambda: None)
    assert offers[0] is not None
    return offers[0]


def matched(made: FakeEngine) -> int:
    """What the store loads of it once it does not pull."""
    return made._ask("r", LENGTH, 0, lambda: None)


def test_a_pull_that_is_lost_before_it_is_promised_leaves_its_request_to_the_store() -> None:
    """Its rows are of full attention alone: all are looked up, and windows with them."""
    with engine(MemoryRows(), Model(), TWO_RANKS) as made:
        store(made)
        assert offered(made, beside.PullOutlook(range(LENGTH - 1))).split == 4 * ROW
        assert matched(made) == 4 * ROW
        load = made.store._requests["r"].load
        assert {name.kind for name in load.rows} == set(RowKind)


@pytest.mark.parametrize(
    ("load", "pull", "offered"),
    [
        (None, 1e9, 4 * ROW),
        (2e9, 1e9, 4 * ROW),
        (1e9, 2e9, 3 * ROW),  # half of 393 tokens, in whole rows
        (1e9, 1e12, 0),
    ],
)
def test_no_more_is_loaded_than_takes_less_time_than_to_pull_all(
    load: float | None, pull: float, offered: int
) -> None:
    with engine(MemoryRows(), Model(), Shape()) as made:
        store(made)
        if load is not None:
            made.store.loads.bandwidth.learn_read(int(load), 1.0, made.clock())
        seen = made.pull(TOKENS, bytes_per_s=pull)
        assert (seen.offered, seen.loaded, seen.wrong) == (offered, (offered,), 0)


@pytest.mark.parametrize(
    ("prefix", "loads"), [(3 * ROW, 4 * ROW), (4 * ROW, 4 * ROW), (5 * ROW, None)]
)
def test_a_store_that_has_all_of_a_prefix_is_asked_for_all_that_it_has(
    prefix: int, loads: int | None
) -> None:
    with engine(MemoryRows(), Model(), Shape()) as made:
        store(made)
        offer = offered(made, beside.PullOutlook(range(prefix), may_yield=True))
        assert offer.is_enough == (loads is not None)
        if loads is None:
            assert offer.split == 4 * ROW
        else:
            assert matched(made) == loads


@pytest.mark.parametrize(
    ("prefix", "load", "is_enough"),
    [
        (4 * ROW, 2e9, True),
        (4 * ROW, 0.5e9, False),  # half of it takes as long as pulling all
        (4 * ROW - LEAST + 1, 0.5e9, False),  # so little more is computed
        (4 * ROW - LEAST, 0.5e9, True),
    ],
)
def test_a_slow_store_takes_a_prompt_alone_if_it_has_much_more_of_it(
    prefix: int, load: float, is_enough: bool
) -> None:
    with engine(MemoryRows(), Model(), Shape(), min_tokens=LEAST) as made:
        store(made)
        made.store.loads.bandwidth.learn_read(int(load), 1.0, made.clock())
        offer = offered(made, beside.PullOutlook(range(prefix), 1e9, may_yield=True))
        assert offer.is_enough == is_enough
        assert offer.split == (0 if is_enough else 2 * ROW if prefix == 4 * ROW else ROW)


@pytest.mark.parametrize("when", ["always", "never"])
def test_users_decide(when: str) -> None:
    with engine(MemoryRows(), Model(), Shape(), beside=when) as made:
        store(made)
        made.store.loads.bandwidth.learn_read(1 << 20, 1.0, made.clock())
        seen = made.pull(TOKENS, bytes_per_s=1e12)
        assert (seen.offered, seen.wrong) == (4 * ROW if when == "always" else 0, 0)


def test_of_staging_that_is_small_and_full_as_much_is_used_as_there_is() -> None:
    with engine(MemoryRows(), Model(windowed=()), Shape(), staging=1 << 16) as made:
        store(made)
        assert made.store._keeper.sizes.fa == 1 << 15
        seen = made.pull(TOKENS)
        assert (seen.loaded, seen.wrong) == ((2 * ROW,), 0)
        made.settle()
        assert made.store.loads.staging.take_room(StoreLoad(), 1 << 16)
        assert made.pull(TOKENS).offered == 0
        assert made.store.loads.counts["store_no_room"] == 1


def test_those_laws_notice_a_rank_that_loads_behind_a_lost_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: rows behind the lost one are copied from staging that nothing filled."""

    def all_of_it(part: Need, *_: object) -> Need:
        return part

    monkeypatch.setattr(cover, "until", all_of_it)
    with pytest.raises(AssertionError):
        test_rows_before_the_first_that_is_lost_are_kept(2, False)


def test_those_laws_notice_a_rank_that_says_that_all_was_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    rows_end = FetchUnderWay.rows_end
    monkeypatch.setattr(FetchUnderWay, "rows_end", lambda *args: rows_end(*args) and None)
    with pytest.raises(AssertionError):
        test_rows_before_the_first_that_is_lost_are_kept(2, False)
