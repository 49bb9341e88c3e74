"""Checks without an engine that rows are what was saved.

::

    footer      is there, whole, and of this row of this namespace     always
    slabs       have the checksums that the footer names                with the rows' layout
    seals       fit the slabs: these were encrypted with a key of ours  with a key file, too

A footer has the checksums of its slabs, but not their sizes; these are in the layout that engines
write beside the rows of a namespace.  A layout that does not fit sound footers is ignored: with it
every row would look damaged.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdconn.store.format.footer import (
    TAIL_NBYTES,
    Footer,
    checksum,
    decode_footer,
    footer_nbytes_of,
)
from pdconn.store.format.row import (
    ALIGNMENT,
    Packing,
    RowKind,
    RowLayout,
    Slab,
    StoreLayout,
    aligned,
)
from pdconn.store.format.seals import TAG_NBYTES, RowKeys, SlabOpener
from pdconn.store.shelf.interface import Shelf, StoredRow
from pdconn.store.store_errors import RowDamaged, RowLocked, RowMissing, ShelfFailure

_AT_ONCE = 32 << 20
"""Bytes of a row that are in memory at a time, unless one slab is larger."""
_MOST_FOOTER_NBYTES = 16 << 20
"""Of two million slabs, a hundred times those of large models."""
_MOST_TOKENS = 1 << 40


class RowState(StrEnum):
    """The result of checking a row."""

    GOOD = "good"
    """Footer and every slab are as saved."""
    FOOTER_GOOD = "footer good"
    """The footer is as saved; without a layout the slabs were not compared."""
    ENCRYPTED = "encrypted"
    """Its bytes have the checksums that the footer names; without their key no more is known."""
    DAMAGED = "damaged"
    """Its bytes are not those that were saved."""
    UNREADABLE = "unreadable"
    """The device or the file system refused."""
    GONE = "gone"
    """It was removed after it was listed."""


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row, its state, and why where it is neither good nor gone."""

    row: StoredRow
    state: RowState
    why: str = ""


def check_rows(
    shelf: Shelf,
    rows: Iterable[StoredRow],
    layouts: Mapping[str, StoreLayout],
    keys: RowKeys | None = None,
) -> Iterator[CheckedRow]:
    """Check each row; ``layouts`` by namespace, ``keys`` of encrypted rows."""
    for row in rows:
        yield check_row(shelf, row, layouts.get(row.namespace), keys)


def check_row(
    shelf: Shelf, row: StoredRow, layout: StoreLayout | None, keys: RowKeys | None = None
) -> CheckedRow:
    """Read one row and compare it with its footer."""
    try:
        state, why = _compared(shelf, row, layout, keys)
    except RowMissing:
        return CheckedRow(row, RowState.GONE)
    except RowDamaged as error:
        return CheckedRow(row, RowState.DAMAGED, str(error))
    except ShelfFailure as error:
        return CheckedRow(row, RowState.UNREADABLE, str(error))
    return CheckedRow(row, state, why)


def _compared(
    shelf: Shelf, row: StoredRow, layout: StoreLayout | None, keys: RowKeys | None
) -> tuple[RowState, str]:
    """The state of a row that is not damaged, and why it is not good."""
    footer = footer_of(shelf, row)
    of_kind = _fitting(layout, row.name.kind, footer)
    if of_kind is None:
        return (
            RowState.FOOTER_GOOD,
            "no layout" if layout is None else "the layout is of other rows",
        )
    try:
        _check_slabs(shelf, row, of_kind, footer, keys)
    except RowLocked as error:
        return RowState.ENCRYPTED, str(error)
    if footer.seals is not None and keys is None:
        return RowState.ENCRYPTED, "no key file was given"
    return RowState.GOOD, ""


def footer_of(shelf: Shelf, row: StoredRow) -> Footer:
    """Read the footer of a row, which identifies the row.

    Raises:
        RowDamaged: no footer, another row's, or one of a row of another length.
        RowMissing, ShelfFailure: it cannot be read now.
    """
    if row.nbytes < ALIGNMENT or row.nbytes % ALIGNMENT:
        raise RowDamaged(f"row: expected whole pages of {ALIGNMENT} bytes, got {row.nbytes} bytes")
    last = _pages(ALIGNMENT)
    shelf.read(row.namespace, row.name, [(row.nbytes - ALIGNMENT, last)])
    nbytes = footer_nbytes_of(last[-TAIL_NBYTES:])
    if nbytes > row.nbytes:
        raise RowDamaged(f"footer: expected {nbytes} bytes, got a row of {row.nbytes}")
    if nbytes > _MOST_FOOTER_NBYTES:
        raise RowDamaged(f"footer: expected at most {_MOST_FOOTER_NBYTES} bytes, got {nbytes}")
    if nbytes > ALIGNMENT:
        last = _pages(nbytes)
        shelf.read(row.namespace, row.name, [(row.nbytes - nbytes, last)])
    footer = decode_footer(last)
    for field, expected, seen in (
        ("namespace", row.namespace, footer.namespace),
        ("name", row.name.file_name, footer.name.file_name),
        ("kind", row.name.kind, footer.name.kind),
        ("bytes", footer.data_nbytes + nbytes, row.nbytes),
    ):
        if expected != seen:
            raise RowDamaged(f"{field}: expected {expected}, got {seen}")
    first, until = footer.tokens.start, footer.tokens.stop
    if not 0 <= first < until <= _MOST_TOKENS or first != footer.name.index * (until - first):
        raise RowDamaged(
            f"tokens: expected those of block {footer.name.index}, got {footer.tokens}"
        )
    return footer


def _fitting(layout: StoreLayout | None, kind: RowKind, footer: Footer) -> RowLayout | None:
    """The layout of rows of this kind, if a sound footer agrees with it."""
    found = None if layout is None else layout.fa if kind is RowKind.FA else layout.wa
    if found is not None and found.data_nbytes != footer.data_nbytes:
        found = found.most
    if found is None or found.data_nbytes != footer.data_nbytes:
        return None
    if (found.packing is not Packing.NONE) != footer.is_packed:
        return None
    if found.is_sealed != (footer.seals is not None):
        return None
    return found if len(found.slabs) == len(footer.checksums) else None


def _check_slabs(
    shelf: Shelf, row: StoredRow, layout: RowLayout, footer: Footer, keys: RowKeys | None
) -> None:
    """Raises RowDamaged at the first slab whose bytes have another checksum or seal.

    Raises RowLocked where slabs were encrypted with another key.
    """
    # Slabs that were written: of a row that spilled not every spill is there.
    slabs = [
        (number, slab)
        for number, slab in enumerate(layout.slabs)
        if slab.spilled is None or footer.has_slab(number)
    ]
    locked: RowLocked | None = None
    spilled = {slab.spilled for _, slab in slabs}
    opener = None if keys is None else SlabOpener(keys, row.namespace, row.name)
    first = 0
    while first < len(slabs):
        start, until = slabs[first][1].offset, first + 1
        while until < len(slabs) and _end(slabs[until][1]) - start <= _AT_ONCE:
            until += 1
        data = _pages(_end(slabs[until - 1][1]) - start)
        ranges = [(at, data[at - start : end - start]) for at, end in _joined(slabs[first:until])]
        shelf.read(row.namespace, row.name, ranges)
        for number, slab in slabs[first:until]:
            at = slab.offset - start
            sealed = data[at : at + slab.nbytes]
            if checksum(sealed) != footer.checksums[number]:
                where = f"{slab.layer}, head {slab.head}"
                raise RowDamaged(f"slab {number} ({where}): its checksum differs")
            if opener is None or footer.seals is None or locked is not None:
                continue
            padded = memoryview(bytearray(bytes(sealed) + bytes(TAG_NBYTES)))
            seal = footer.seals[number].tobytes()
            opened = memoryview(bytearray(slab.nbytes))
            try:
                opener.open_slab(
                    number, slab.offset, padded, seal, opened, has_spill=number in spilled
                )
            except RowLocked as error:
                locked = error  # checksums of the slabs after it may still differ
        first = until
    if locked is not None:
        raise locked


def _joined(slabs: Iterable[tuple[int, Slab]]) -> list[tuple[int, int]]:
    """First byte and end of the ranges of a row that these slabs take, neighbours joined."""
    found: list[tuple[int, int]] = []
    for _, slab in slabs:
        start = found.pop()[0] if found and found[-1][1] == slab.offset else slab.offset
        found.append((start, _end(slab)))
    return found


def _end(slab: Slab) -> int:
    return slab.offset + aligned(slab.nbytes)


def _pages(nbytes: int) -> memoryview:
    """Writable memory that begins at a page, as direct I/O needs it."""
    return memoryview(mmap.mmap(-1, nbytes))
