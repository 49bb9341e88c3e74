"""A shelf in this process: rows are kept in memory.

::

    MemoryRows ◄── MemoryShelf of one thread
               ◄── MemoryShelf of another

The bytes are copied in and out under one lock, so that a reader sees a row whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pdconn.store.format.row import RowName
from pdconn.store.shelf.interface import (
    SAME_USE_S,
    Buffer,
    StoredPart,
    StoredRow,
    believed_use,
)
from pdconn.store.store_errors import RowDamaged, RowMissing, ShelfFailure


@dataclass(slots=True, eq=False)
class _MemoryPart:
    data: bytearray
    notes: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _MemoryRow:
    data: bytearray
    used_at: float


class MemoryRows:
    """The rows and parts that several shelves share.

    Args:
        clock: seconds since the epoch, for ``used_at``.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.lock = threading.Lock()
        self.clock = clock
        self.rows: dict[tuple[str, RowName], _MemoryRow] = {}
        self.parts: dict[tuple[str, str], _MemoryPart] = {}


class MemoryShelf:
    """One thread's way to :class:`MemoryRows`; see :class:`pdconn.store.shelf.interface.Shelf`."""

    cuts_writes = True

    def __init__(self, shared: MemoryRows) -> None:
        self._shared = shared

    def has(self, namespace: str, name: RowName) -> bool:
        """Whether the row is there now."""
        return (namespace, name) in self._shared.rows

    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset in the row.

        Raises:
            RowMissing, RowDamaged: see :class:`pdconn.store.shelf.interface.Shelf`.
        """
        with self._shared.lock:
            row = self._shared.rows.get((namespace, name))
            if row is None:
                raise RowMissing(f"{namespace}/{name.file_name}: no such row")
            for offset, buffer in ranges:
                if offset + len(buffer) > len(row.data):
                    raise RowDamaged(
                        f"{namespace}/{name.file_name}: expected {offset + len(buffer)} bytes or "
                        f"more, got {len(row.data)}"
                    )
                buffer[:] = memoryview(row.data)[offset : offset + len(buffer)]

    def rows(self, namespace: str | None = None) -> Iterator[StoredRow]:
        """Every committed row, in any order; those of all namespaces for None."""
        with self._shared.lock:
            found = [
                StoredRow(of, name, len(row.data), row.used_at)
                for (of, name), row in self._shared.rows.items()
                if namespace in (None, of)
            ]
        return iter(found)

    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        """Note that the rows are used at ``at``, or now; a later use stays."""
        now = self._shared.clock()
        with self._shared.lock:
            for name in names:
                row = self._shared.rows.get((namespace, name))
                if row is not None:
                    wanted = now if at is None else at
                    row.used_at = max(believed_use(row.used_at, now), wanted)

    def move_use(self, namespace: str, names: Sequence[RowName], old: float, new: float) -> None:
        """Note a use at ``new`` of those rows whose last one is ``old``."""
        with self._shared.lock:
            for name in names:
                row = self._shared.rows.get((namespace, name))
                if row is not None and abs(row.used_at - old) < SAME_USE_S:
                    row.used_at = new

    def used_at(self, namespace: str, name: RowName) -> float | None:
        """When the row was last used; None if there is no such row."""
        row = self._shared.rows.get((namespace, name))
        return None if row is None else row.used_at

    def remove_row(self, namespace: str, name: RowName) -> int:
        """Remove the row; the bytes that it had, 0 if it was gone."""
        with self._shared.lock:
            row = self._shared.rows.pop((namespace, name), None)
        return 0 if row is None else len(row.data)

    def begin(self, writer: str, part: str, nbytes: int) -> None:
        """Make a part with room for ``nbytes``; one that is there gets so much, and loses none."""
        with self._shared.lock:
            made = self._shared.parts.setdefault((writer, part), _MemoryPart(bytearray()))
            made.data.extend(bytes(max(0, nbytes - len(made.data))))

    def write(self, writer: str, part: str, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Write each buffer at its offset.

        Raises:
            ShelfFailure: no such part, or no room in it.
        """
        with self._shared.lock:
            room = memoryview(self._part(writer, part).data)
            for offset, buffer in ranges:
                if offset + len(buffer) > len(room):
                    raise ShelfFailure(
                        f"{writer}/{part}: expected ranges within {len(room)} bytes, got "
                        f"{offset} + {len(buffer)}"
                    )
                room[offset : offset + len(buffer)] = buffer

    def put_note(self, writer: str, part: str, rank: int, note: bytes) -> None:
        """Leave the note of ``rank`` beside the part.

        Raises:
            ShelfFailure: no such part.
        """
        with self._shared.lock:
            self._part(writer, part).notes[rank] = bytes(note)

    def notes(self, writer: str, part: str) -> Mapping[int, bytes]:
        """Notes by rank, as far as they are there."""
        with self._shared.lock:
            found = self._shared.parts.get((writer, part))
            return {} if found is None else dict(found.notes)

    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        """Give the part its name; False if there is such a row already.

        Raises:
            ShelfFailure: no such part.
        """
        with self._shared.lock:
            row = _MemoryRow(self._part(writer, part).data, self._shared.clock())
            del self._shared.parts[writer, part]
            return self._shared.rows.setdefault((namespace, name), row) is row

    def discard(self, writer: str, part: str) -> None:
        """Remove a part and its notes, also where they are gone."""
        with self._shared.lock:
            self._shared.parts.pop((writer, part), None)

    def parts(self) -> Iterator[StoredPart]:
        """Every part, of all writers."""
        with self._shared.lock:
            found = [
                StoredPart(writer, name, len(part.data))
                for (writer, name), part in self._shared.parts.items()
            ]
        return iter(found)

    def _part(self, writer: str, part: str) -> _MemoryPart:
        found = self._shared.parts.get((writer, part))
        if found is None:
            raise ShelfFailure(f"{writer}/{part}: no such part")
        return found

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
