"""One rank with its own threads that saves and loads the rows of two prompts, for benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.engine.build import replicas_of
from pdconn.store.format.footer import Footer, encode_footer
from pdconn.store.format.row import RowKind, store_layout
from pdconn.store.rank import store as rank_store
from pdconn.store.rank.store import RankStore
from pdconn.store.rank_commands import Fetch, FetchResult, LoadRows, OpenStore, SaveRow, SaveRows
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.interface import Shelf
from pdconn.store.shelf.open import open_shelf
from pdconn.store.shelf.transfer import recent_rows
from pdconn.store.store_keys import load_keys
from pdconn.tools.output.table import table
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory

ROW_TOKENS, BLOCK_TOKENS, HEADS = 256, 16, 8
SHAPES = {"gpt-oss-120b": (18, 256), "Llama 3.1 8B": (32, 512)}
"""Layers of full attention, and bytes of a token in one head of each: slabs of 64 and 128 KiB."""
PROMPTS = 2
PATIENCE_S = 120.0

RateT = TypeVar("RateT")
"""A benchmark's row of results, a dataclass."""


class Loader:
    """One rank over ``root`` that has saved the rows of two prompts.

    Args:
        key_file: rows are encrypted with; None for rows as they are.
        is_packed: rows are compressed.
        open_it: opens the shelf of a thread of the rank; by default that of files.
    """

    def __init__(
        self,
        root: Path,
        references: KVCacheReferences,
        rows: int,
        *,
        key_file: str | None = None,
        is_packed: bool = False,
        open_it: Callable[[StoreSettings], Shelf] = open_shelf,
    ) -> None:
        layout = store_layout([references], ROW_TOKENS)
        self._share_nbytes, self._open = layout.fa.data_nbytes, open_it
        layout = layout.packed() if is_packed else layout
        self._layout = layout if key_file is None else layout.sealed()
        self._keys, self._rows, self._number = load_keys(key_file), rows, 0
        self._settings = StoreSettings(
            str(root), 1 << 40, staging=(rows + 1) * self._share_nbytes * PROMPTS,
            block_tokens=ROW_TOKENS, key_file=key_file,
        )  # fmt: skip
        self._references = references
        blocks = rows * ROW_TOKENS // BLOCK_TOKENS
        ids = 1 + np.random.default_rng(1).permutation(PROMPTS * blocks)
        self._blocks = [
            (BlockList(0, tuple(ids[at * blocks : (at + 1) * blocks].tolist())),)
            for at in range(PROMPTS)
        ]
        chains = [
            self._keys.names.chain(ROW_TOKENS).extended(range(at, at + rows * ROW_TOKENS))
            for at in range(PROMPTS)
        ]
        self.names = [[one.name(RowKind.FA, at) for at in range(rows)] for one in chains]
        self.root = root
        self._store = self._opened(1)
        for prompt in range(PROMPTS):
            self.save(prompt, keeps=True)

    @property
    def nbytes(self) -> int:
        """Of KV of one prompt."""
        return self._rows * self._share_nbytes

    def use_threads(self, count: int) -> None:
        """Begin anew with so many readers, whose staging memory is touched."""
        self._store.close()
        self._store = self._opened(count)
        self.load()

    def close(self) -> None:
        """End the threads."""
        self._store.close()

    def _opened(self, readers: int) -> RankStore:
        rank_store.NUM_READERS = readers
        opened = RankStore(self._settings, self._references, 0, partial(self._open, self._settings))
        opened.post_command(
            OpenStore(self._layout, "ns", "writer", replicas_of([self._references]))
        )
        return opened

    def save(self, prompt: int, *, keeps: bool = False) -> float:
        """Save a prompt's rows; seconds.  They are discarded, or committed if ``keeps``."""
        self._number += 1
        rows = [SaveRow(name, f"p{self._number}-{name.index}") for name in self.names[prompt]]
        began = time.perf_counter()
        self._store.post_command(SaveRows(self._number, self._blocks[prompt], tuple(rows)))
        self._store.after_pass()
        with open_shelf(self._settings) as shelf:
            last = rows[-1].part
            until = time.monotonic() + PATIENCE_S
            while not shelf.notes("writer", last):
                assert time.monotonic() < until, "not saved in time"
                time.sleep(0.001)
            seconds = time.perf_counter() - began
            for row in rows:
                notes = list(shelf.notes("writer", row.part).values())
                if keeps:
                    footer = Footer.from_notes("ns", row.name, self._layout.fa, notes)
                    data = memoryview(encode_footer(footer))
                    shelf.write("writer", row.part, [(footer.data_nbytes, data)])
                    assert shelf.commit("writer", row.part, "ns", row.name)
                else:
                    shelf.discard("writer", row.part)
        self._store.take_results()
        return seconds

    def load(self) -> float:
        """Load both prompts; seconds until both are in their blocks."""
        need = [Need.for_range(0, self._rows * ROW_TOKENS, blocks) for blocks in self._blocks]
        began = time.perf_counter()
        numbers = {}
        for prompt in range(PROMPTS):
            self._number += 1
            numbers[self._number] = prompt
            offset = prompt * self._rows * self._share_nbytes
            self._store.post_command(Fetch(self._number, offset, tuple(self.names[prompt])))
        loaded = 0
        until = time.monotonic() + PATIENCE_S
        while loaded < PROMPTS:
            assert time.monotonic() < until, "not loaded in time"
            self._store.wait_for_answer(0.01)
            for result in self._store.take_results():
                if not isinstance(result, FetchResult):
                    continue
                assert (result.missing, result.damaged) == ((), ())
                prompt = numbers[result.number]
                self._store.post_command(LoadRows(result.number, f"r{prompt}", need[prompt]))
            assert not self._store.take_load_failures()
            loaded += len(self._store.take_loaded())
        return time.perf_counter() - began

    def prepare_pages(self, pages: str) -> None:
        """Drop the rows from the page cache, or read them."""
        recent_rows(str(self.root))._paths.clear()
        for path in self.root.glob("rows/*/*/*/*"):
            with path.open("rb") as file:
                if pages == "cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    file.read()


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def run_models(
    what: str,
    measure: Callable[[str, int, int, Path], list[RateT]],
    cells: Mapping[str, Callable[[RateT], str]],
    *,
    rounds: int,
    mib: int,
) -> int:
    """A benchmark's program: measure each model, print the table, write the JSON.

    Args:
        what: what it does, as its help says.
        measure: takes a model, rounds, MiB of KV of both prompts, and a folder.
        cells: a rate's cells, by their headings.
        rounds, mib: defaults.
    """
    parser = argparse.ArgumentParser(description=what.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="of each (%(default)s)")
    parser.add_argument("--mib", type=int, default=mib, help="KV of two prompts (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--root", type=Path, help="a folder of the device to measure")
    parser.add_argument("--json", type=Path, help="write the rates there, too")
    options = parser.parse_args()
    found = []
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.root) as root:
            found += measure(model, options.rounds, options.mib, Path(root))
    print(table(list(cells), [[cell(rate) for cell in cells.values()] for rate in found]))
    if options.json:
        document = {"mib": options.mib, "rounds": options.rounds, "rows": list(map(asdict, found))}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def references_of(layers: int, token_nbytes: int, rows: int) -> tuple[KVCacheReferences, Any]:
    """KV memory of two prompts, by layer, with blocks of 16 tokens; and its bytes, random ones."""
    num_blocks = 1 + PROMPTS * rows * ROW_TOKENS // BLOCK_TOKENS
    nbytes = layers * num_blocks * HEADS * BLOCK_TOKENS * token_nbytes
    memory = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8)
    placed = layout_memory(
        "LBHNC", base=memory.ctypes.data, num_blocks=num_blocks,
        layers=[f"layers.{at}" for at in range(layers)], num_heads=HEADS,
        block_tokens=BLOCK_TOKENS, token_nbytes=token_nbytes,
    )  # fmt: skip
    group = GroupMemory(AttentionKind.FULL, None, BLOCK_TOKENS, placed)
    return build_kv_cache_references([group]), memory
