"""Engines with real KV memory: every rank a RankStore, and a byte pattern to recognise KV by."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.format.prompt_rows import Chain, rows_needed
from pdconn.store.format.row import RowKind, RowName, StoreLayout, store_layout
from pdconn.store.rank.store import RankStore
from pdconn.store.rank_commands import (
    Fetch,
    FetchResult,
    LoadRows,
    OpenStore,
    SaveFailed,
    SaveResult,
    SaveRow,
    SaveRows,
    StoreCommand,
    StoreResult,
)
from pdconn.store.settings import StoreSettings
from registration.references import AttentionKind
from tests.property.oracle import Group, Layers, Side, expected, expected_gaps
from tests.store.rank.shelves import Rows

CANONICAL = 64
TOKENS = 256
PATIENCE_S = 30.0
BLANK = 0xEE
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_NUM_BLOCKS = 34
_RANK_STRIDE = 1 << 32
"""As far apart as the oracle puts the memory of ranks."""
_RANK_NBYTES = 1 << 25


def pattern(labels: NDArray[np.int64]) -> NDArray[np.uint8]:
    """A byte for each label, so that another label's byte is another with a chance of 0.995."""
    mixed = labels.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(56)) % np.uint64(200)).astype(np.uint8)


@dataclass(frozen=True)
class Shape:
    """What engines differ in; ``heads`` and ``row_nbytes`` belong to the model."""

    tp: int = 1
    layout: str = "LBHNC"
    block_tokens: int = 16
    heads: int = 4
    row_nbytes: int = 64
    window: int = 96
    stages: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)

    def side(self, base: int, seed: int) -> Side:
        """The engine's memory, with one request of 256 tokens in scattered blocks."""
        full = Layers((0, 2), AttentionKind.FULL, None, self.heads, self.row_nbytes)
        windowed = Layers(
            (1, 3), AttentionKind.SLIDING_WINDOW, self.window, self.heads, self.row_nbytes
        )
        groups = tuple(Group(one, one.numbers, self.block_tokens) for one in (full, windowed))
        random = np.random.default_rng(seed)
        count = TOKENS // self.block_tokens
        tables = tuple(
            BlockList(0, tuple((1 + random.permutation(_NUM_BLOCKS - 1))[:count].tolist()))
            for _ in groups
        )
        return Side(
            groups,
            self.layout,
            self.tp,
            self.stages,
            _NUM_BLOCKS,
            tables,
            base,
            TOKENS,
        )


class StoredEngine:
    """Ranks of an engine and their stores, in this process.

    Args:
        shape: of the engine.
        rows: the shelf.
        filled: KV of the request is in memory from the beginning.
        staging: bytes.
    """

    def __init__(
        self, shape: Shape, rows: Rows, *, filled: bool, staging: int = 1 << 22, seed: int = 1
    ) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._pages = mmap.mmap(-1, shape.tp * len(shape.stages) * _RANK_STRIDE, flags=flags)
        memory = np.frombuffer(self._pages, np.uint8)
        self.memory = memory
        self.side = shape.side(int(memory.ctypes.data), seed)
        self.rows = rows
        for rank in range(len(self.side.ranks)):
            for base, labels in self.side.labels(rank).items():
                self.bytes(base, len(labels))[:] = pattern(labels) if filled else BLANK
        ranks = self.side.ranks
        self.opening = OpenStore(
            store_layout(ranks, CANONICAL),
            "ns",
            "boot",
            tuple(map(self._replicas, range(len(ranks)))),
        )
        settings = StoreSettings("unused", 1, staging=staging)
        self.stores = [
            RankStore(settings, references, rank, rows.open)
            for rank, references in enumerate(ranks)
        ]
        self._results: list[list[StoreResult]] = [[] for _ in ranks]
        self._number = 0

    @property
    def layout(self) -> StoreLayout:
        """Of whole rows."""
        return self.opening.layout

    def bytes(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """KV memory at ``address``."""
        at = address - self.side.base
        return self.memory[at : at + nbytes]

    def opened(self) -> Self:
        """Open the store on all ranks."""
        self.post(self.opening)
        return self

    def post(self, command: StoreCommand) -> None:
        """Post to every rank."""
        for store in self.stores:
            store.post_command(command)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a report makes ``condition`` true."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, "nothing was reported in time"
            for store in self.stores:
                store.wait_for_answer(0.001)

    def answer(self, rank: int, number: int) -> StoreResult:
        """The one answer of ``rank`` to command ``number``."""

        def found() -> list[StoreResult]:
            answers = (one for one in self.results_of(rank) if not isinstance(one, SaveFailed))
            return [result for result in answers if result.number == number]

        self.wait(lambda: bool(found()))
        (result,) = found()
        return result

    def results_of(self, rank: int) -> list[StoreResult]:
        """All that ``rank`` has answered."""
        self._results[rank] += self.stores[rank].take_results()
        return self._results[rank]

    def save(self, names: Iterable[RowName], label: str = "p") -> SaveRows:
        """Save rows on all ranks; returns when the blocks may be freed."""
        save = self.start_save(names, label)
        for rank in range(len(self.stores)):
            assert self.answer(rank, save.number) == SaveResult(save.number)
        return save

    def start_save(self, names: Iterable[RowName], label: str = "p") -> SaveRows:
        """Begin to save rows on all ranks, as after a pass."""
        self._number += 1
        rows = tuple(SaveRow(name, f"{label}{n}") for n, name in enumerate(names))
        save = SaveRows(self._number, self.side.tables, rows)
        self.post(save)
        for store in self.stores:
            store.after_pass()
        return save

    def noted(self, save: SaveRows) -> None:
        """Wait for the notes of all ranks."""
        deadline = threading.Event()
        for row in save.rows:
            while len(self.rows.notes[row.part]) < len(self.stores):
                assert not deadline.wait(0.002)

    def saved(self, names: Iterable[RowName], label: str = "p") -> SaveRows:
        """Save rows and commit them."""
        save = self.save(names, label)
        self.noted(save)
        for row in save.rows:
            self.rows.commit(self.opening, row, len(self.stores))
        return save

    def fetch(self, names: Iterable[RowName], offset: int = 0) -> list[FetchResult]:
        """Fetch rows on all ranks; their answers."""
        number = self.start_fetch(names, offset)
        results = [self.answer(rank, number) for rank in range(len(self.stores))]
        assert all(isinstance(result, FetchResult) for result in results)
        return results  # type: ignore[return-value]

    def start_fetch(self, names: Iterable[RowName], offset: int = 0) -> int:
        """Post a fetch to all ranks; its number."""
        self._number += 1
        self.post(Fetch(self._number, offset, tuple(names)))
        return self._number

    def load(self, need: Need, number: int | None = None) -> None:
        """LoadRows the last fetch, and wait for it."""
        self.post(LoadRows(number or self._number, "r", need))
        for store in self.stores:
            self.wait(store.has_results)
            assert store.take_load_failures() == []
            assert store.take_loaded() == ["r"]

    def check(self, need: Need) -> None:
        """Every byte of KV memory is what a load of ``need`` makes it.

        Raises:
            AssertionError: bytes that are missing, wrong or touched.
        """
        wrong = self.wrong_bytes(need)
        assert not wrong, f"{wrong} wrong bytes"

    def wrong_bytes(self, need: Need, full: bool | None = None) -> int:
        """Bytes that are not as a load makes them; of full attention or windows alone.

        To the oracle the store is an engine whose blocks are what rows keep of each section.
        """
        first, windowed = self.side.groups
        kept = self.layout.wa.sections[0].tokens if self.layout.wa else 0
        groups = replace(first, block_tokens=CANONICAL), replace(windowed, block_tokens=kept)
        stored = replace(self.side, groups=groups, ranks=[])
        wrong = 0
        for rank in range(len(self.stores)):
            bases = expected(self.side, stored, rank, need).items()
            gaps = expected_gaps(self.side, stored, rank, need)
            for group, (base, labels) in enumerate(bases):
                if full is not None and full != (group == 0):
                    continue
                wanted = np.where(labels < 0, np.uint8(BLANK), pattern(labels))
                wanted[gaps[base]] = 0
                wrong += int(np.count_nonzero(self.bytes(base, len(labels)) != wanted))
        return wrong

    def forget(self) -> None:
        """Overwrite all KV memory, as if its blocks had been freed and written again."""
        for rank in range(len(self.stores)):
            for base, labels in self.side.labels(rank, False).items():
                self.bytes(base, len(labels))[:] = BLANK

    def need(self, held: int = 0, until: int = TOKENS) -> Need:
        """All of the request's blocks."""
        return Need.for_range(held, until, self.side.tables)

    def names(self, held: int = 0, until: int = TOKENS) -> list[RowName]:
        """The rows that tokens ``[held, until)`` need, in order."""
        return [PROMPT.name(*row) for row in rows_needed(self.layout, held, until)]

    def close(self) -> None:
        """Close all ranks."""
        for store in self.stores:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replicas(self, rank: int) -> dict[tuple[str, int], tuple[int, int]]:
        found = {}
        for ref in heads(self.side, rank):
            same = [r for r in range(len(self.side.ranks)) if ref in heads(self.side, r)]
            found[ref[:2]] = (same.index(rank), len(same))
        return found


def heads(side: Side, rank: int) -> set[tuple[str, int, int, int]]:
    """Layer, chunk, first head and number of heads of all that a rank holds."""
    return {
        (ref.layer, ref.chunk, ref.first_head, ref.num_heads)
        for group in side.ranks[rank].groups
        for ref in group.data
    }


PROMPT = Chain(CANONICAL).extended(list(range(TOKENS)))
OTHER = Chain(CANONICAL).extended(list(range(1000, 1000 + TOKENS)))


def fa(index: int, chain: Chain = PROMPT) -> RowName:
    """An FA row of the prompt."""
    return chain.name(RowKind.FA, index)


def wa(index: int, chain: Chain = PROMPT) -> RowName:
    """A WA row of the prompt."""
    return chain.name(RowKind.WA, index)
