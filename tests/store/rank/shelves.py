"""A shelf in two dictionaries that fails on demand, and what commits its parts."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from pdconn.store.format.footer import Footer, encode_footer
from pdconn.store.format.row import RowName
from pdconn.store.rank_commands import OpenStore, SaveRow
from pdconn.store.store_errors import RowDamaged, RowMissing

Hook = Callable[..., None]


def nothing(*_: object) -> None:
    """The hook of a shelf without faults."""


@dataclass(eq=False)
class Rows:
    """Rows and parts of all threads, and hooks that are called before reads, writes and notes."""

    rows: dict[tuple[str, RowName], bytearray] = field(default_factory=dict)
    parts: dict[str, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    notes: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    written: list[tuple[str, int, int]] = field(default_factory=list)
    reads: list[RowName] = field(default_factory=list)
    before_open: Hook = nothing
    before_read: Hook = nothing
    before_begin: Hook = nothing
    before_write: Hook = nothing
    before_note: Hook = nothing
    num_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> RowsShelf:
        """A shelf for one thread."""
        self.before_open()
        with self.lock:
            self.num_open += 1
        return RowsShelf(self)

    def commit(self, opening: OpenStore, row: SaveRow, num_ranks: int) -> None:
        """Make a row of a part and the notes of all ranks."""
        layout = opening.layout.for_kind(row.name.kind)
        notes = self.notes[row.part]
        assert sorted(notes) == list(range(num_ranks))
        footer = Footer.from_notes(opening.namespace, row.name, layout, list(notes.values()))
        data = self.parts.pop(row.part)
        assert len(data) == layout.data_nbytes
        self.rows[opening.namespace, row.name] = data + encode_footer(footer)


class RowsShelf:
    """The part of a shelf that ranks use."""

    cuts_writes = True

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._rows.reads.append(name)
        self._rows.before_read(name)
        row = self._rows.rows.get((namespace, name))
        if row is None:
            raise RowMissing(name.file_name)
        for offset, buffer in ranges:
            found = row[offset : offset + len(buffer)]
            buffer[: len(found)] = found
            if len(found) < len(buffer):
                raise RowDamaged("the row ends before the range")

    def begin(self, writer: str, part: str, nbytes: int) -> None:
        """Parts grow as they are written."""
        self._rows.before_begin(writer, part)

    def write(self, writer: str, part: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._rows.before_write(writer, part)
        with self._rows.lock:
            data = self._rows.parts[part]
            for offset, buffer in ranges:
                data.extend(bytes(max(0, offset + len(buffer) - len(data))))
                data[offset : offset + len(buffer)] = buffer
                self._rows.written.append((part, offset, len(buffer)))

    def put_note(self, writer: str, part: str, rank: int, note: bytes) -> None:
        self._rows.before_note(writer, part)
        with self._rows.lock:
            self._rows.notes[part][rank] = note

    def close(self) -> None:
        with self._rows.lock:
            self._rows.num_open -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ok(notes: Mapping[int, bytes]) -> bool:
    """Whether no note reports a failure."""
    return all(note[:2] == b"ok" for note in notes.values())
