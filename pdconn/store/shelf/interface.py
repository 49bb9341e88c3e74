"""The interface of a shelf: a place where rows are kept.

A row is made in three steps, so that a writer that dies at any of them leaves nothing that a
reader takes for a row::

    begin(part)     every rank asks for room for the row; the first one makes the part
    write(part)     every rank writes its slabs, then a note with their checksums
    commit(part)    the scheduler's process adds the footer and gives the part the row's name;
                    the first commit of a name wins

A *part* is named by its writer; parts of dead writers are found by :meth:`Shelf.parts` and
discarded.  One object serves one thread; processes and threads open their own.

Errors: :class:`RowMissing`, :class:`ShelfFailure`; a shelf raises nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from pdconn.store.format.row import RowName

Buffer = memoryview
"""Host memory of bytes (format ``B``), one-dimensional; writable where it is read into."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A committed row: its size with footer, and when it was last used (seconds, epoch)."""

    namespace: str
    name: RowName
    nbytes: int
    used_at: float

    def believed(self, now: float) -> StoredRow:
        """The row with the use that counts: see :func:`believed_use`."""
        used_at = believed_use(self.used_at, now)
        return self if used_at == self.used_at else replace(self, used_at=used_at)


MOST_AHEAD_S = 2 * 86_400.0
"""A use that lies further ahead is none: no promise is so long, and clocks differ by less."""
SAME_USE_S = 1e-3
"""Uses so close to each other are one, whatever a file system rounds."""


def believed_use(used_at: float, now: float) -> float:
    """When a row counts as used: a time too far ahead, as of a damaged file, is the oldest of all.

    >>> believed_use(100.0, 90.0), believed_use(1e12, 90.0)
    (100.0, 0.0)
    """
    return used_at if used_at <= now + MOST_AHEAD_S else 0.0


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A row that is not committed: its room in bytes, and its writer's name for it."""

    writer: str
    part: str
    nbytes: int


class Shelf(Protocol):
    """Rows by namespace and name.  A namespace is text of at most 64 letters, digits, ``-``.

    Attributes:
        cuts_writes: whether a part may be written piece by piece at no cost to readers.
    """

    cuts_writes: bool

    # Rows

    def has(self, namespace: str, name: RowName) -> bool:
        """Whether the row is there now."""
        ...

    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset in the row.

        Offsets, lengths and addresses of buffers that are multiples of 4096 allow direct I/O.

        Raises:
            RowMissing: no such row.
            RowDamaged: it ends before a range does.
            ShelfFailure: the device failed.
        """
        ...

    def rows(self, namespace: str | None = None) -> Iterator[StoredRow]:
        """Every committed row, in any order; those of all namespaces for None."""
        ...

    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        """Note that the rows are used at ``at`` (seconds, epoch), or now; a later use stays.

        A use that lies ahead keeps a row: eviction takes the one that was used longest ago.  Rows
        that are gone are skipped.
        """
        ...

    def move_use(self, namespace: str, names: Sequence[RowName], old: float, new: float) -> None:
        """Note a use at ``new`` of those rows whose last one is ``old``; all others stay."""
        ...

    def used_at(self, namespace: str, name: RowName) -> float | None:
        """When the row was last used (seconds, epoch); None if there is no such row."""
        ...

    def remove_row(self, namespace: str, name: RowName) -> int:
        """Remove the row; the bytes that it had, 0 if it was gone."""
        ...

    # Parts

    def begin(self, writer: str, part: str, nbytes: int) -> None:
        """Make a part with room for ``nbytes``; one that is there gets so much, and loses none."""
        ...

    def write(self, writer: str, part: str, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Write each buffer at its offset, any number of processes at a time."""
        ...

    def put_note(self, writer: str, part: str, rank: int, note: bytes) -> None:
        """Write the note of ``rank`` beside the part, whole or not at all."""
        ...

    def notes(self, writer: str, part: str) -> Mapping[int, bytes]:
        """The notes that are there, by rank."""
        ...

    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        """Give the part its name; False if there is such a row already.  The part is gone after."""
        ...

    def discard(self, writer: str, part: str) -> None:
        """Remove a part and its notes.  Idempotent."""
        ...

    def parts(self) -> Iterator[StoredPart]:
        """Every part, of all writers."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
