"""One rank's share of an encrypted row: sealed on the way out, opened on the way in.

A share lies in the row as it does where rows are not encrypted, slab for slab.  AES-GCM makes and
takes a tag right after the bytes, where the next slab begins, so slabs are sealed from the first
to the last, and opened from the last to the first::

    sealing   | slab 0, tag 0         tag 0 goes to the footer; slab 1 is written over it
              | slab 0 | slab 1, tag 1
    opening            | slab 1, tag 1   ► opened: slab 1 is not needed any more
              | slab 0, tag 0            over the beginning of slab 1
"""

from __future__ import annotations

from collections.abc import Sequence

from pdconn.store.format.footer import Footer
from pdconn.store.format.row import RowName, aligned
from pdconn.store.format.seals import TAG_NBYTES, RowKeys, SlabOpener, SlabSealer
from pdconn.store.rank.shares import OwnSlab, RowShare


def open_row(
    share: RowShare,
    sealed: memoryview,
    footer: memoryview,
    namespace: str,
    name: RowName,
    *,
    keys: RowKeys,
    into: memoryview,
) -> None:
    """Decrypt and verify the bytes of an encrypted row that is not packed.

    Args:
        sealed: a share as it was read, and at least ``TAG_NBYTES`` after it; overwritten.
        into: room for the share; undefined after an error.

    Raises:
        RowLocked: it is encrypted with another key.
        RowDamaged: naming what differs.
    """
    found = share.checked_footer(footer, namespace, name)
    open_slabs(share.slabs, sealed, found, keys=keys, into=into)


def open_slabs(
    slabs: Sequence[OwnSlab], sealed: memoryview, found: Footer, *, keys: RowKeys, into: memoryview
) -> None:
    """Decrypt and verify slabs of the row of an encrypted row's footer.

    Args:
        slabs: in order.
        sealed: as of :func:`open_row`.
        into: room for them at the same offsets; undefined after an error.

    Raises:
        RowLocked: they are encrypted with another key.
        RowDamaged: naming what differs.
    """
    assert found.seals is not None  # checked against the layout
    opener = SlabOpener(keys, found.namespace, found.name)
    spilled = {slab.spilled for slab in slabs}
    # From the last slab on: its tag may overwrite the beginning of the slab after it.
    for slab in reversed(slabs):
        end = slab.offset + slab.nbytes
        opener.open_slab(
            slab.number,
            slab.row_offset,
            sealed[slab.offset : end + TAG_NBYTES],
            found.seals[slab.number].tobytes(),
            into[slab.offset : end],
            has_spill=slab.number in spilled,
        )


def seal_slabs(
    slabs: Sequence[OwnSlab], data: memoryview, sealer: SlabSealer, into: memoryview
) -> dict[int, bytes]:
    """Encrypt slabs of a share.

    Args:
        slabs: in order.
        data: the share.
        into: room for it and ``TAG_NBYTES`` more.  What follows a slab there is zeros.

    Returns:
        Seals by slab number.
    """
    seals, spilled = {}, {slab.spilled for slab in slabs}
    for slab in slabs:  # in order: the tag of each lies where the next one begins
        end = slab.offset + slab.nbytes
        seals[slab.number] = sealer.seal_slab(
            slab.number,
            slab.row_offset,
            data[slab.offset : end],
            into[slab.offset : end + TAG_NBYTES],
            has_spill=slab.number in spilled,
        )
        padding = slab.offset + aligned(slab.nbytes) - end
        into[end : end + padding] = bytes(padding)
    return seals
