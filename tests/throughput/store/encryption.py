"""How fast a rank loads rows that are encrypted, beside the same rows as they are.

    python -m tests.throughput.store.encryption --json encryption.json

A rank with its own threads loads two prompts at a time: it opens, reads and verifies (or decrypts,
which verifies) their rows, and copies them to KV blocks of 16 tokens in host memory.  One thread or
two read, plain and encrypted rows in turns within each round; what is compared is a round's ratio.
Cold: dropped from the page cache before.  Warm: read just before.  Saved are the rows of a prompt,
by the rank's one writer: gathered, hashed (and encrypted), written to the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

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
THREADS = (1, 2)
_PROMPTS = 2
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Rate:
    """Medians over the rounds, GB/s; ``ratio`` is that of the rounds' ratios."""

    model: str
    what: str
    threads: int
    row_nbytes: int
    slab_nbytes: int
    plain_gb_s: float
    encrypted_gb_s: float
    ratio: float


class Loader:
    """One rank over ``root`` that has saved the rows of two prompts."""

    def __init__(
        self, root: Path, references: KVCacheReferences, key_file: str | None, rows: int
    ) -> None:
        layout = store_layout([references], ROW_TOKENS)
        self._layout = layout if key_file is None else layout.sealed()
        self._keys, self._rows, self._number = load_keys(key_file), rows, 0
        self._settings = StoreSettings(
            str(root), 1 << 40, staging=(rows + 1) * layout.fa.data_nbytes * _PROMPTS,
            block_tokens=ROW_TOKENS, key_file=key_file,
        )  # fmt: skip
        self._references = references
        blocks = rows * ROW_TOKENS // BLOCK_TOKENS
        ids = 1 + np.random.default_rng(1).permutation(_PROMPTS * blocks)
        self._blocks = [
            (BlockList(0, tuple(ids[at * blocks : (at + 1) * blocks].tolist())),)
            for at in range(_PROMPTS)
        ]
        chains = [
            self._keys.names.chain(ROW_TOKENS).extended(range(at, at + rows * ROW_TOKENS))
            for at in range(_PROMPTS)
        ]
        self.names = [[one.name(RowKind.FA, at) for at in range(rows)] for one in chains]
        self.root = root
        self._store = self._opened(1)
        for prompt in range(_PROMPTS):
            self.save(prompt, keeps=True)

    @property
    def nbytes(self) -> int:
        """Of KV of one prompt."""
        return self._rows * self._layout.fa.data_nbytes

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
        opened = RankStore(self._settings, self._references, 0, partial(open_shelf, self._settings))
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
                    shelf.write("writer", row.part, [(self._layout.fa.data_nbytes, data)])
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
        for prompt in range(_PROMPTS):
            self._number += 1
            numbers[self._number] = prompt
            offset = prompt * self._rows * self._layout.fa.data_nbytes
            self._store.post_command(Fetch(self._number, offset, tuple(self.names[prompt])))
        loaded = 0
        until = time.monotonic() + PATIENCE_S
        while loaded < _PROMPTS:
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


def references_of(layers: int, token_nbytes: int, rows: int) -> tuple[KVCacheReferences, object]:
    """KV memory of two prompts, by layer, with blocks of 16 tokens; and what keeps it alive."""
    num_blocks = 1 + _PROMPTS * rows * ROW_TOKENS // BLOCK_TOKENS
    nbytes = layers * num_blocks * HEADS * BLOCK_TOKENS * token_nbytes
    memory = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8)
    placed = layout_memory(
        "LBHNC", base=memory.ctypes.data, num_blocks=num_blocks,
        layers=[f"layers.{at}" for at in range(layers)], num_heads=HEADS,
        block_tokens=BLOCK_TOKENS, token_nbytes=token_nbytes,
    )  # fmt: skip
    group = GroupMemory(AttentionKind.FULL, None, BLOCK_TOKENS, placed)
    return build_kv_cache_references([group]), memory


def measure(model: str, rounds: int, mib: int, root: Path) -> list[Rate]:
    """Plain and encrypted in turns, in changing order."""
    layers, token_nbytes = SHAPES[model]
    row_nbytes = layers * HEADS * ROW_TOKENS * token_nbytes
    rows = max(1, (mib << 20) // (_PROMPTS * row_nbytes))
    references, memory = references_of(layers, token_nbytes, rows)
    key_file = root / "keys"
    key_file.write_text(f"names {secrets.token_hex(32)}\nkey {secrets.token_hex(32)}\n", "utf-8")
    key_file.chmod(0o600)
    loaders = {
        "plain": Loader(root / "plain", references, None, rows),
        "encrypted": Loader(root / "encrypted", references, str(key_file), rows),
    }
    os.sync()
    rates: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    order = list(loaders)
    for threads in THREADS:
        for loader in loaders.values():
            loader.use_threads(threads)
        for _, pages in product(range(rounds), ("warm", "cold")):
            for which in order:
                loader = loaders[which]
                loader.prepare_pages(pages)
                rate = _PROMPTS * loader.nbytes / loader.load() / 1e9
                rates[f"load, {pages}", threads, which].append(rate)
            order = order[::-1]
    for _ in range(rounds):
        for which in order:
            loader = loaders[which]
            rates["save", 1, which].append(loader.nbytes / loader.save(0) / 1e9)
        order = order[::-1]
    for loader in loaders.values():
        loader.close()
    del memory
    slab_nbytes = ROW_TOKENS * token_nbytes
    return [
        Rate(
            model, what, threads, row_nbytes, slab_nbytes, statistics.median(plain),
            statistics.median(rates[what, threads, "encrypted"]),
            _ratio(rates[what, threads, "encrypted"], plain),
        )
        for (what, threads, which), plain in sorted(rates.items())
        if which == "plain"
    ]  # fmt: skip


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each (%(default)s)")
    parser.add_argument("--mib", type=int, default=256, help="KV of two prompts (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--root", type=Path, help="a folder of the device to measure")
    parser.add_argument("--json", type=Path, help="write the rates there, too")
    options = parser.parse_args()
    found = []
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.root) as root:
            found += measure(model, options.rounds, options.mib, Path(root))
    body = [
        [rate.model, rate.what, str(rate.threads), f"{rate.plain_gb_s:.2f}",
         f"{rate.encrypted_gb_s:.2f}", f"{rate.ratio:.2f}"]
        for rate in found
    ]  # fmt: skip
    heads = ["model", "what", "threads", "plain\nGB/s", "encrypted\nGB/s", "ratio"]
    print(table(heads, body))
    if options.json:
        document = {"mib": options.mib, "rounds": options.rounds, "rows": list(map(asdict, found))}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
