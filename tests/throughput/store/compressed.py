"""From which store on compressed rows pay: loads and saves through stores of several bandwidths.

    python -m tests.throughput.store.compressed --json compressed.json

A rank with its own threads (two read, one writes) loads and saves two prompts, as in
:mod:`tests.throughput.store.encryption`, plain and compressed rows in turns within each round; what
is compared is a round's ratio.  A store of a bandwidth is the page cache behind a shelf that holds
each read and write back until the bytes of all threads would have come at that rate; without one it
is the page cache itself.  KV are normally distributed numbers in bfloat16.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.interface import Buffer
from tests.throughput.store.loaders import (
    HEADS,
    PROMPTS,
    ROW_TOKENS,
    SHAPES,
    Loader,
    median_ratio,
    references_of,
    run_models,
)

BANDWIDTHS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, None)
"""GB/s of the store; None for the page cache as it is."""


@dataclass(frozen=True)
class Rate:
    """Medians over the rounds, GB/s of KV; ratios are the medians of the rounds' ratios.

    ``size`` is the bytes of plain rows over those of compressed ones.
    """

    model: str
    store_gb_s: float | None
    size: float
    load_plain_gb_s: float
    load_compressed_gb_s: float
    load_ratio: float
    save_plain_gb_s: float
    save_compressed_gb_s: float
    save_ratio: float


class Link:
    """A bandwidth that threads share: each transfer follows those before it."""

    def __init__(self) -> None:
        self.gb_s: float | None = None
        self._lock, self._free_at = threading.Lock(), 0.0

    def send(self, nbytes: int, began: float) -> None:
        """Return when the bytes of a transfer that has begun would be there."""
        if self.gb_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, began) + nbytes / self.gb_s / 1e9
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


class SlowShelf(FilesShelf):
    """Files behind a link."""

    def __init__(self, link: Link, settings: StoreSettings) -> None:
        super().__init__(settings.root, direct_io=False)
        self._link = link

    def read(self, namespace: str, name: Any, ranges: Sequence[tuple[int, Buffer]]) -> None:
        began = time.perf_counter()
        super().read(namespace, name, ranges)
        self._link.send(sum(len(buffer) for _, buffer in ranges), began)

    def write(self, writer: str, part: str, ranges: Sequence[tuple[int, Buffer]]) -> None:
        began = time.perf_counter()
        super().write(writer, part, ranges)
        self._link.send(sum(len(buffer) for _, buffer in ranges), began)


def bfloat16s(memory: np.ndarray) -> None:
    """Fill bytes with normally distributed numbers."""
    drawn = np.random.default_rng(3).standard_normal(1 << 22, np.float32)
    numbers = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    memory.view(np.uint16)[:] = np.resize(numbers, memory.nbytes // 2)


def measure(model: str, rounds: int, mib: int, root: Path) -> list[Rate]:
    """Plain and compressed in turns, in changing order."""
    layers, token_nbytes = SHAPES[model]
    row_nbytes = layers * HEADS * ROW_TOKENS * token_nbytes
    rows = max(1, (mib << 20) // (PROMPTS * row_nbytes))
    references, memory = references_of(layers, token_nbytes, rows)
    bfloat16s(memory)
    link = Link()
    loaders = {
        kind: Loader(
            root / kind, references, rows,
            is_packed=kind == "compressed", open_it=partial(SlowShelf, link),
        )
        for kind in ("plain", "compressed")
    }  # fmt: skip
    held = {kind: _nbytes_below(root / kind) for kind in loaders}
    found = []
    for gb_s in BANDWIDTHS:
        rates: dict[tuple[str, str], list[float]] = defaultdict(list)
        link.gb_s, order = None, list(loaders)
        for loader in loaders.values():
            loader.use_threads(2)
        for _ in range(rounds):
            for kind in order:
                loader = loaders[kind]
                link.gb_s = None
                loader.prepare_pages("warm")
                link.gb_s = gb_s
                rates["load", kind].append(PROMPTS * loader.nbytes / loader.load() / 1e9)
                rates["save", kind].append(loader.nbytes / loader.save(0) / 1e9)
            order = order[::-1]
        size = held["plain"] / held["compressed"]
        found.append(Rate(model, gb_s, size, *_compared(rates, "load"), *_compared(rates, "save")))
    for loader in loaders.values():
        loader.close()
    del memory
    return found


def _compared(rates: dict[tuple[str, str], list[float]], what: str) -> tuple[float, float, float]:
    plain, compressed = rates[what, "plain"], rates[what, "compressed"]
    ratio = median_ratio(compressed, plain)
    return statistics.median(plain), statistics.median(compressed), ratio


def _nbytes_below(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("rows/*/*/*/*"))


def _store_of(rate: Rate) -> str:
    return "page cache" if rate.store_gb_s is None else f"{rate.store_gb_s:g}"


CELLS: dict[str, Callable[[Rate], str]] = {
    "model": lambda rate: rate.model,
    "store\nGB/s": _store_of,
    "smaller": lambda rate: f"{rate.size:.2f}",
    "load\nplain": lambda rate: f"{rate.load_plain_gb_s:.2f}",
    "load\ncompressed": lambda rate: f"{rate.load_compressed_gb_s:.2f}",
    "ratio of\nloads": lambda rate: f"{rate.load_ratio:.2f}",
    "save\nplain": lambda rate: f"{rate.save_plain_gb_s:.2f}",
    "save\ncompressed": lambda rate: f"{rate.save_compressed_gb_s:.2f}",
    "ratio of\nsaves": lambda rate: f"{rate.save_ratio:.2f}",
}


if __name__ == "__main__":
    sys.exit(run_models(__doc__ or "", measure, CELLS, rounds=8, mib=128))
