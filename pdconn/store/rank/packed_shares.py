"""One rank's share of a packed row: packed on the way out, unpacked on the way in.

A share has two forms.  As it is copied to and from KV blocks, its heads lie as in a plain row; as
it is stored, each head is smaller, and one that does not fit goes on in its spill, behind all of
them::

    copied    | h2: L0 L1 L2     | h3: L0 L1 L2     |
                    │ packed           │ does not fit
    stored    | h2       |  h3 as it is, its beginning | (spill of h2) | h3: the rest |

Rows are encrypted after they are packed, and checksums are of the bytes that are stored: what is
unpacked was verified before.

A reader asks for a row as if nothing had spilled.  Of one that did, which is rare, there is no
footer at that place, and the reader asks again.  Between two of its questions the row may have been
evicted and saved anew, by another engine and in the other form, since what is computed elsewhere
may differ in a bit.  So all that it returns is of one answer, and it looks twice before it calls a
row damaged, which is removed then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdconn.store.format.footer import Footer, decode_footer
from pdconn.store.format.row import RowName
from pdconn.store.rank.shares import OwnHead, OwnSlab, RowShare, joined_runs, ranges_of
from pdconn.store.shelf.interface import Shelf
from pdconn.store.store_errors import RowDamaged

_TRIES = 2
"""Of reading a row in either form."""


def pack_share(share: RowShare, index: int, data: memoryview, into: memoryview) -> list[OwnSlab]:
    """Pack the heads of row ``index`` that this rank saves.

    Args:
        data: the share as it was copied from KV blocks.
        into: room for ``share.stored_nbytes``.

    Returns:
        The slabs to write, in their order; spills come last.
    """
    slabs, spills = [], []
    for head in share.heads:
        slab, spill = head.slab, head.spill
        if not slab.is_written(index):
            continue
        slabs.append(slab)
        given = data[head.offset : head.offset + head.nbytes]
        room = into[slab.offset : slab.offset + slab.nbytes]
        if head.packing is None or spill is None:
            room[:] = given
        elif not head.packing.pack_head(given, room):
            room[:] = given[: slab.nbytes]
            into[spill.offset : spill.offset + spill.nbytes] = given[slab.nbytes :]
            spills.append(spill)
    return slabs + spills


def read_packed(
    shelf: Shelf,
    share: RowShare,
    namespace: str,
    name: RowName,
    *,
    data: memoryview,
    footer: memoryview,
) -> tuple[Footer, list[OwnSlab]]:
    """Read our share of a packed row as it is stored, unverified.

    Args:
        data: room for ``share.stored_nbytes``.
        footer: room for ``share.most_footer_nbytes``.

    Returns:
        The row's footer, and the slabs that it has.

    Raises:
        RowDamaged: it has no sound footer, or ends early.
        RowMissing, ShelfFailure: as of the shelf.
    """
    short = footer[: share.footer_nbytes]
    first: RowDamaged | None = None
    for _ in range(_TRIES):
        try:
            shelf.read(namespace, name, share.ranges(data, short))
            return share.checked_footer(short, namespace, name), list(share.slabs)
        except RowDamaged as damaged:
            first = first or damaged
        spilled = _read_spilled(shelf, share, namespace, name, data=data, footer=footer)
        if spilled is not None:
            return spilled
    assert first is not None
    raise first


def _read_spilled(
    shelf: Shelf,
    share: RowShare,
    namespace: str,
    name: RowName,
    *,
    data: memoryview,
    footer: memoryview,
) -> tuple[Footer, list[OwnSlab]] | None:
    """As :func:`read_packed`, of a row that spilled; None if it is no such row."""
    layout = share.whole.most
    behind = (layout.data_nbytes, footer)

    def checked() -> tuple[Footer, list[OwnSlab]]:
        found = decode_footer(footer)
        found.check_row(namespace, name, layout)
        heads = (one for one in share.heads if one.spill and found.has_slab(one.spill.number))
        return found, [*share.slabs, *(one.spill for one in heads if one.spill is not None)]

    try:
        shelf.read(namespace, name, [behind])
        _, slabs = checked()
        # With the footer again: that of before may be of a row that is gone.
        shelf.read(namespace, name, [*ranges_of(joined_runs(slabs), data), behind])
        spilled = checked()
    except RowDamaged:
        return None
    return spilled if spilled[1] == slabs else None


def unpack_share(
    heads: Sequence[OwnHead], has_slab: Callable[[int], bool], data: memoryview, into: memoryview
) -> None:
    """Unpack a share that was verified.

    Args:
        has_slab: whether the row has the slab of this number.
        data: the share as it is stored.
        into: room for the share as it is copied.

    Raises:
        RowDamaged: bytes that no head is packed to.
    """
    for head in heads:
        slab, spill = head.slab, head.spill
        stored = data[slab.offset : slab.offset + slab.nbytes]
        room = into[head.offset : head.offset + head.nbytes]
        if head.packing is None or spill is None:
            room[:] = stored
        elif has_slab(spill.number):
            room[: slab.nbytes] = stored
            room[slab.nbytes :] = data[spill.offset : spill.offset + spill.nbytes]
        else:
            head.packing.unpack_head(stored, room)
