"""What a store costs on the engine's thread: processor time, as ratios to hashing in the same run.

Run with ``-s`` to see microseconds.  A prompt of 131 072 tokens is 512 rows of each kind.
Processor time of this thread alone is counted, so that neither other threads nor other processes
of a loaded machine are in it.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator

import pytest

from pdconn.protocol.ticket import BlockList
from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.rank_commands import FetchResult, SaveResult
from pdconn.store.settings import StoreSettings
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import PATIENCE_S, FakeEngine, Model

TOKENS, ROW_TOKENS, PASS_TOKENS = 131_072, 256, 8192
ENGINE_BLOCK = 16
ROWS = TOKENS // ROW_TOKENS
SETTINGS = StoreSettings(
    root="", capacity=1 << 40, staging=1 << 40, block_tokens=ROW_TOKENS, window_every="all"
)
PROMPT = [17 * at % 50_000 for at in range(TOKENS + 1)]
IDS = tuple(list(range(1, TOKENS // ENGINE_BLOCK + 2)) for _ in range(2))


class _Full(MemoryShelf):
    """Has every row."""

    def has(self, namespace: str, name: RowName) -> bool:
        return True


@pytest.fixture
def engine() -> Iterator[Callable[[type[MemoryShelf]], FakeEngine]]:
    """Starts one whose ranks are never asked: only the scheduler's part is used."""
    made = []

    def start(shelf: type[MemoryShelf]) -> FakeEngine:
        made.append(FakeEngine(SETTINGS, Model(), shelf=lambda: shelf(MemoryRows())))
        return made[-1]

    yield start
    for each in made:
        each.close()


class Stopwatch:
    """Processor time of this thread, in microseconds, without garbage collection."""

    def __init__(self) -> None:
        self.us = 0.0

    def __enter__(self) -> None:
        gc.disable()
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.us += (time.thread_time() - self._began) * 1e6
        gc.enable()


def hashing_us() -> float:
    """SHA-256 of as many rows' tokens as a prompt has: the reference.  Median of five."""
    data = bytes(4 * ROW_TOKENS)
    seen = []
    for _ in range(5):
        watch = Stopwatch()
        with watch:
            for _ in range(ROWS):
                hashlib.sha256(data).digest()
        seen.append(watch.us)
    return sorted(seen)[2]


def least(measure: Callable[[int], float], times: int = 5) -> float:
    """The smallest of some measurements: what the code takes without its neighbours."""
    return min(measure(number) for number in range(times))


def test_a_look_up_of_131_072_tokens_costs_the_engine_about_as_much_as_hashing_them(
    engine: Callable[[type[MemoryShelf]], FakeEngine],
) -> None:
    store = engine(_Full).store
    blocks = tuple(BlockList(0, tuple(ids)) for ids in IDS)

    def once(number: int) -> float:
        name, watch = f"request-{number}", Stopwatch()
        with watch:
            store.on_new_request(name, PROMPT, TOKENS, lambda: (), may_load=True, reads_files=False)
            assert store.get_num_new_matched_tokens(name, TOKENS + 1, 0) is None
        lookup = store._requests[name].lookup
        assert lookup is not None
        assert store._lookups._worker.outbox.wait_for_item(PATIENCE_S)
        with watch:
            assert store.get_num_new_matched_tokens(name, TOKENS + 1, 0) is None
            (*_, fetch) = store.take_commands()
            store.note_results([FetchResult(fetch.number)])  # type: ignore[union-attr]
            assert store.get_num_new_matched_tokens(name, TOKENS + 1, 0) == TOKENS
            assert store.update_state_after_alloc(name, blocks, TOKENS)
            store.take_commands()
            store.loads.end_load(name)
            store.request_finished(name)
        return watch.us

    looked, reference = least(once), hashing_us()
    print(f"\nlook-up: {looked:.0f} us; hashing {ROWS} KiB: {reference:.0f} us")
    assert looked < 3 * reference


def test_a_saved_row_costs_the_engine_a_few_times_what_hashing_its_tokens_costs(
    engine: Callable[[type[MemoryShelf]], FakeEngine],
) -> None:
    rows = 0

    def once(number: int) -> float:
        nonlocal rows
        store, name, watch = engine(MemoryShelf).store, f"request-{number}", Stopwatch()
        store.on_new_request(name, PROMPT, TOKENS, lambda: (), may_load=True, reads_files=False)
        chain = Chain(ROW_TOKENS).extended(PROMPT, TOKENS)
        stored = store._requests[name]
        stored.saving.chain = chain  # as after a look-up
        stored.load.leave()
        stored.known_extras = ()
        rows = 0
        for before in range(0, TOKENS, PASS_TOKENS):
            with watch:
                saved = store.save_pass(name, before, before + PASS_TOKENS, _ids)
                store.take_commands()
                assert saved is not None
                store.note_results([SaveResult(saved.number)])
            rows += len(saved.rows)
        return watch.us

    us = least(once, times=3)
    reference = hashing_us() / ROWS
    assert rows == 2 * ROWS
    print(f"\nper saved row: {us / rows:.1f} us; hashing 1 KiB: {reference:.2f} us")
    assert us / rows < 20 * reference


def test_a_prompt_that_was_pulled_is_hashed_elsewhere_and_not_saved_if_it_is_there(
    engine: Callable[[type[MemoryShelf]], FakeEngine],
) -> None:
    """The engine asks the store about no prompt with a ticket before it computes its end."""

    def once(number: int, shelf: type[MemoryShelf]) -> tuple[float, int]:
        store, name, watch = engine(shelf).store, f"request-{number}", Stopwatch()
        with watch:
            store.on_new_request(
                name, PROMPT, TOKENS + 1, lambda: (), may_load=True, reads_files=False
            )
            assert store.save_pass(name, TOKENS, TOKENS + 1, _ids) is None
        lookup = store._requests[name].lookup
        assert lookup is not None
        assert store._lookups._worker.outbox.wait_for_item(PATIENCE_S)
        saved = store.save_pass(name, TOKENS + 1, TOKENS + 2, _ids)
        rows = saved.rows if saved else ()
        return watch.us, sum(name.kind is RowKind.FA for name in rows)

    us = least(lambda number: once(number, MemoryShelf)[0], times=3)
    print(f"\npulled: {us:.0f} us")
    assert us < hashing_us()
    assert once(8, MemoryShelf)[1] == ROWS
    assert once(9, _Full)[1] == 0


def test_the_reference_tells_a_cost_of_milliseconds() -> None:
    """Negative control: to hash the prompt on the engine's thread would break the bounds."""

    def once(_: int) -> float:
        watch = Stopwatch()
        with watch:
            Chain(ROW_TOKENS).extended(PROMPT, TOKENS)
        return watch.us

    assert least(once, 3) > 3 * hashing_us()


def _ids() -> tuple[list[int], ...]:
    return tuple(map(list, IDS))
