"""Rows with footers, saved as an engine saves them, and verified as readers verify them."""

from __future__ import annotations

import numpy as np

from pdconn.store.format.footer import (
    Footer,
    checksum,
    decode_footer,
    decode_note,
    encode_footer,
    encode_note,
    footer_nbytes,
    joined,
)
from pdconn.store.format.row import RowName
from pdconn.store.shelf.interface import Shelf
from pdconn.store.store_errors import RowDamaged
from tests.store.shelves.plain_rows import PAGE, pages, payload

SLABS = 4
RANKS = 2
DATA_NBYTES = SLABS * PAGE
ROW_NBYTES = DATA_NBYTES + footer_nbytes(SLABS, is_sealed=False)


def save_row(
    shelf: Shelf, name: RowName, *, writer: str = "writer", is_early: bool = False
) -> bool:
    """Save a row of two ranks; whether it is new.

    Args:
        is_early: commit before the footer is there: a mutant.
    """
    data = payload(name.index, DATA_NBYTES)
    part = f"part{name.index}"
    shelf.begin(writer, part, ROW_NBYTES)
    for rank in range(RANKS):
        sums = {}
        for slab in range(rank, SLABS, RANKS):
            at = slab * PAGE
            shelf.write(writer, part, [(at, pages(data[at : at + PAGE]))])
            sums[slab] = checksum(data[at : at + PAGE])
        shelf.put_note(writer, part, rank, encode_note(sums))
    notes = shelf.notes(writer, part)
    sums_of_all = joined([decode_note(notes[rank]).sums for rank in range(RANKS)], SLABS)
    assert sums_of_all is not None
    tokens = range(name.index * 256, name.index * 256 + 256)
    footer = encode_footer(Footer("ns", name, tokens, DATA_NBYTES, sums_of_all))
    is_new = shelf.commit(writer, part, "ns", name) if is_early else False
    if not is_early:
        shelf.write(writer, part, [(DATA_NBYTES, pages(footer))])
        is_new = shelf.commit(writer, part, "ns", name)
    return is_new


def verify(shelf: Shelf, name: RowName, nbytes: int = ROW_NBYTES) -> None:
    """Read a row and compare it with its footer and with what was saved.

    Raises:
        StoreError: it cannot be read, or is not what its footer says.
    """
    row = pages(nbytes)
    shelf.read("ns", name, [(0, row)])
    footer = decode_footer(row)
    data = row[: footer.data_nbytes]
    slabs = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
    if footer.name != name or not np.array_equal(
        footer.checksums, np.array([checksum(slab) for slab in slabs], dtype=np.uint64)
    ):
        raise RowDamaged("not the bytes of the footer")
    assert data == payload(name.index, DATA_NBYTES)


def verify_all(shelf: Shelf) -> set[RowName]:
    """The rows that are listed, each verified."""
    found = set()
    for row in shelf.rows():
        assert row.namespace == "ns"
        verify(shelf, row.name, row.nbytes)
        found.add(row.name)
    return found


def discard_all(shelf: Shelf, writer: str = "writer") -> None:
    """Discard the parts of a dead writer, as an engine does for others."""
    for part in list(shelf.parts()):
        if part.writer == writer:
            shelf.discard(part.writer, part.part)
