"""How fast rows are read and verified, beside the device and beside the reads of vLLM's fs tier.

    python -m tests.throughput.store.shelves --json shelves.json

One thread reads as many bytes in rows of each size, as a rank does, and two do, as every rank has:
open the file, read data and footer into staging, verify every slab's checksum.  In turns with
these within one run: plain ``preadv`` of the same files past the page cache, and ``fs_io_C``, the
batch functions of vLLM's own fs tier, over files of as many bytes (it verifies nothing), past the
page cache and through it.  Cold: the files' pages are dropped from the page cache before.  Warm:
they were read just before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pdconn.store.format.footer import Footer, checksum, encode_footer
from pdconn.store.format.row import NO_KEY, Layer, RowKind, RowLayout, RowName, Section
from pdconn.store.rank.copies import HostArea
from pdconn.store.rank.shares import RowShare
from pdconn.store.rank.store import NUM_READERS
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.transfer import RecentRows
from pdconn.tools.output.table import table
from registration.references import AttentionKind

TOKENS = 256
SIZES = {"64 KiB": (2, 2, 64), "1 MiB": (8, 2, 256), "4 MiB": (8, 8, 256), "9 MiB": (8, 18, 256)}
"""Heads, layers, and bytes of a token in one of each; 9 MiB is gpt-oss-120b's full attention."""
_MOST_ROWS = 512


@dataclass(frozen=True)
class Rate:
    """Median over the rounds, GB/s."""

    row: str
    pages: str
    reader: str
    gb_s: float


def share_of(heads: int, layers: int, nbytes: int) -> RowShare:
    """One rank that holds whole rows."""
    names = tuple(Layer(f"layers.{at}", 0, nbytes) for at in range(layers))
    section = Section(AttentionKind.FULL, None, 1, TOKENS, False, 0, heads, names)
    whole = RowLayout(RowKind.FA, TOKENS, (section,))
    return RowShare.from_layouts(whole, whole, {(layer.name, 0): (0, 1) for layer in names})


class Files:
    """Rows of one size below ``root``, and files of the same bytes for the others.

    ``count`` rows fill the staging area once.
    """

    def __init__(self, root: Path, share: RowShare, count: int) -> None:
        self.share, self._root = share, root
        self.staging = HostArea(count * share.nbytes)
        areas = [HostArea(share.footer_nbytes) for _ in range(NUM_READERS)]
        self._footers = [area.bytes_at(0, share.footer_nbytes) for area in areas]
        self.plain = [root / f"plain-{number}" for number in range(count)]
        self._shelves = [FilesShelf(root / "shelf") for _ in range(NUM_READERS)]
        self.names = [self._save(number) for number in range(count)]
        os.sync()
        self.rows = sorted(root.glob("shelf/rows/*/*/*/*"))

    @property
    def nbytes(self) -> int:
        """Of all rows, without footers."""
        return len(self.names) * self.share.nbytes

    def _save(self, number: int) -> RowName:
        share = self.share
        data = np.random.default_rng(number).integers(0, 256, share.nbytes, np.uint8).tobytes()
        self.plain[number].write_bytes(data)
        name = RowName(RowKind.FA, number.to_bytes(16), NO_KEY, number)
        sums = [checksum(data[slab.offset : slab.offset + slab.nbytes]) for slab in share.slabs]
        tokens = range(number * TOKENS, (number + 1) * TOKENS)
        footer = Footer("ns", name, tokens, share.nbytes, np.array(sums, dtype=np.uint64))
        part = f"part-{number}"
        shelf = self._shelves[0]
        shelf.begin("writer", part, share.nbytes + share.footer_nbytes)
        ranges = [(0, memoryview(data)), (share.nbytes, memoryview(encode_footer(footer)))]
        shelf.write("writer", part, ranges)
        shelf.commit("writer", part, "ns", name)
        return name

    def drop_pages(self) -> None:
        """Out of the page cache."""
        for path in [*self.rows, *self.plain]:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def fill_pages(self) -> None:
        """Into the page cache."""
        for path in [*self.rows, *self.plain]:
            path.read_bytes()

    def view(self, number: int) -> memoryview:
        """Where row ``number`` is read to."""
        return self.staging.bytes_at(number * self.share.nbytes, self.share.nbytes)

    # Readers

    def read_rows(self, threads: int = 1) -> None:
        """As a rank that has not read them before; every row is verified."""
        with ThreadPoolExecutor(threads) as pool:
            for read in [pool.submit(self._read_rows, at, threads) for at in range(threads)]:
                read.result()

    def _read_rows(self, first: int, step: int) -> None:
        shelf, footer = self._shelves[first], self._footers[first]
        shelf._recent = RecentRows()
        for number in range(first, len(self.names), step):
            data, name = self.view(number), self.names[number]
            shelf.read("ns", name, self.share.ranges(data, footer))
            self.share.verify_row(data, footer, "ns", name)

    def read_device(self) -> None:
        """Past the page cache, nothing else."""
        for number, path in enumerate(self.rows):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(fd, [self.view(number)], 0) == self.share.nbytes
            os.close(fd)

    def read_fs_io(self, *, direct: bool) -> None:
        """vLLM's batch function."""
        from vllm.fs_io_C import batch_load_block

        paths = [str(path) for path in self.plain]
        views = [self.view(number) for number in range(len(paths))]
        batch_load_block(paths, views, direct)


def measure(sizes: Sequence[str], rounds: int, mib: int, root: Path) -> list[Rate]:
    """All readers in turns, in changing order."""
    found = []
    for size in sizes:
        share = share_of(*SIZES[size])
        count = max(1, min(_MOST_ROWS, (mib << 20) // share.nbytes))
        with tempfile.TemporaryDirectory(dir=root) as folder:
            files = Files(Path(folder), share, count)
            readers: dict[str, Callable[[], None]] = {
                "store": files.read_rows,
                "store, 2 threads": partial(files.read_rows, NUM_READERS),
                "device": files.read_device,
                "fs_io_C, O_DIRECT": partial(files.read_fs_io, direct=True),
                "fs_io_C, buffered": partial(files.read_fs_io, direct=False),
            }
            for read in readers.values():
                read()
            for pages in ("cold", "warm"):
                for reader, rates in _turns(files, readers, rounds, pages).items():
                    found.append(Rate(size, pages, reader, statistics.median(rates)))
    return found


def _turns(
    files: Files, readers: dict[str, Callable[[], None]], rounds: int, pages: str
) -> dict[str, list[float]]:
    rates = defaultdict(list)
    order = list(readers)
    for _ in range(rounds):
        for reader in order:
            files.drop_pages()
            if pages == "warm":
                files.fill_pages()
            began = time.perf_counter()
            readers[reader]()
            rates[reader].append(files.nbytes / (time.perf_counter() - began) / 1e9)
        order = [*order[1:], order[0]]
    return rates


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--mib", type=int, default=144, help="bytes of all rows of a size")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--root", type=Path, help="a folder of the device to measure")
    parser.add_argument("--json", type=Path, help="write the rates there, too")
    options = parser.parse_args()
    import torch  # noqa: F401 - fs_io_C needs its libraries

    with tempfile.TemporaryDirectory(dir=options.root) as root:
        found = measure(options.sizes, options.rounds, options.mib, Path(root))
    rates = {(rate.row, rate.pages, rate.reader): rate.gb_s for rate in found}
    readers = list(dict.fromkeys(rate.reader for rate in found))
    body = [
        [size, pages, *(f"{rates[size, pages, reader]:.2f}" for reader in readers)]
        for size in options.sizes
        for pages in ("cold", "warm")
    ]
    print(table(["row", "pages", *readers], body))
    if options.json:
        options.json.write_text(
            json.dumps([asdict(rate) for rate in found], indent=1), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
