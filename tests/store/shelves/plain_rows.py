"""Rows of plain bytes: made, saved, loaded and listed on any shelf, by threads at once, too."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import Shelf

OpenShelf = Callable[[], Shelf]


PAGE = 4096
MIB = 1 << 20
PATIENCE_S = 30.0


def row_name(number: int = 0, kind: RowKind = RowKind.FA) -> RowName:
    """A row of its own for each number; keys differ from their first byte on."""
    key = random.Random(number).randbytes(16)
    parent = random.Random(number - 1).randbytes(16) if number else bytes(16)
    return RowName(kind, key, parent, number)


def pages(data: bytes | int) -> memoryview:
    """Writable host memory that begins at a page, of these bytes or of so many zeros."""
    nbytes = data if isinstance(data, int) else len(data)
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    if not isinstance(data, int):
        view[:] = data
    return view


def payload(seed: int, nbytes: int = 4 * PAGE) -> bytes:
    """Bytes that are other ones for each seed."""
    return random.Random(seed).randbytes(nbytes)


def save(
    shelf: Shelf, name: RowName, data: bytes, *, namespace: str = "ns", part: str = "p", ranks=1
) -> bool:
    """Begin, write, note and commit a row; whether it is new."""
    shelf.begin("writer", part, len(data))
    shelf.write("writer", part, [(0, pages(data))])
    for rank in range(ranks):
        shelf.put_note("writer", part, rank, b"note %d" % rank)
    return shelf.commit("writer", part, namespace, name)


def load(
    shelf: Shelf,
    name: RowName,
    nbytes: int,
    *,
    namespace: str = "ns",
    at: Sequence[tuple[int, int]] | None = None,
) -> bytes:
    """The bytes of the ranges ``at`` (offset, length), joined; the first ``nbytes`` for None."""
    ranges = [(offset, pages(length)) for offset, length in at or [(0, nbytes)]]
    shelf.read(namespace, name, ranges)
    return b"".join(bytes(view) for _, view in ranges)


def names_of(shelf: Shelf, namespace: str | None = None) -> list[tuple[str, RowName]]:
    """What ``rows`` lists, in order."""
    return sorted((row.namespace, row.name) for row in shelf.rows(namespace))


def parts_of(shelf: Shelf) -> set[tuple[str, str]]:
    """What ``parts`` lists."""
    return {(part.writer, part.part) for part in shelf.parts()}


def at_once(calls: Iterable[Callable[[], object]]) -> list[object]:
    """What the calls return, each made by a thread of its own, begun together."""
    calls = list(calls)
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        start.wait(PATIENCE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
