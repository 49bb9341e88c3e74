"""Rows as two ranks seal them, without threads and shelves, and what a reader makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from os import urandom

import numpy as np

from pdconn.store.format.footer import (
    Footer,
    checksum,
    encode_footer,
    encode_note,
)
from pdconn.store.format.row import Layer, RowKind, RowLayout, RowName, Section
from pdconn.store.format.seals import SALT_NBYTES, TAG_NBYTES, RowKeys
from pdconn.store.rank.sealed_shares import open_row, seal_slabs
from pdconn.store.rank.shares import RowShare
from registration.references import AttentionKind
from tests.store.encryption.key_files import KEYS

TOKENS, HEADS, NBYTES = 16, 4, 24
NAMESPACE = "sealed-00000000-0123"
NAME = RowName(RowKind.FA, bytes(range(16)), bytes(16), 0, b"tenant-1")


def row_keys(*masters: bytes, new_salt: Callable[[], bytes] | None = None) -> RowKeys:
    """Keys with the salts that they have in a store, or others."""
    return RowKeys(masters or KEYS[:1], new_salt or partial(urandom, SALT_NBYTES))


@cache
def share_of(rank: int, ranks: int = 2) -> RowShare:
    """One rank's share of a row: a part of the heads of two layers, and padding after each slab."""
    layers = tuple(Layer(f"layers.{at}", 0, NBYTES) for at in range(2))

    def layout(first: int, count: int) -> RowLayout:
        section = Section(AttentionKind.FULL, None, 1, TOKENS, False, first, count, layers)
        return RowLayout(RowKind.FA, TOKENS, (section,), is_sealed=True)

    each = HEADS // ranks
    replicas = {(layer.name, 0): (0, 1) for layer in layers}
    return RowShare.from_layouts(layout(0, HEADS), layout(rank * each, each), replicas)


@dataclass
class SealedRow:
    """A row as it lies on a shelf: ``data`` and what the footer says."""

    data: bytearray
    footer: Footer

    def encoded(self) -> bytes:
        """The whole row."""
        return bytes(self.data) + encode_footer(self.footer)


def plaintext(rank: int, seed: int = 0) -> bytes:
    """The KV of one rank's share."""
    share = share_of(rank)
    random = np.random.default_rng([rank, seed])
    data = bytearray(share.nbytes)
    for slab in share.slabs:
        made = random.integers(0, 256, slab.nbytes, np.uint8).tobytes()
        data[slab.offset : slab.offset + slab.nbytes] = made
    return bytes(data)


def sealed_row(
    keys: RowKeys, namespace: str = NAMESPACE, name: RowName = NAME, seed: int = 0
) -> SealedRow:
    """A row that two ranks have saved."""
    whole = share_of(0).whole
    data, notes = bytearray(whole.data_nbytes), []
    for rank in range(2):
        share = share_of(rank)
        kv, into = memoryview(plaintext(rank, seed)), memoryview(bytearray(share.nbytes + 4096))
        seals = seal_slabs(share.slabs, kv, keys.new_sealer(namespace, name), into)
        sums = {}
        for slab in share.slabs:
            written = into[slab.offset : slab.offset + slab.nbytes]
            sums[slab.number] = checksum(written)
        for at, start, nbytes in share.runs:
            data[at : at + nbytes] = into[start : start + nbytes]
        notes.append(encode_note(sums, seals))
    return SealedRow(data, Footer.from_notes(namespace, name, whole, notes))


def opened(
    row: bytes, keys: RowKeys, rank: int, namespace: str = NAMESPACE, name: RowName = NAME
) -> bytes:
    """What rank ``rank`` loads of a row; raises as :meth:`RowShare.open_row` does."""
    share = share_of(rank)
    sealed = memoryview(bytearray(share.nbytes + TAG_NBYTES))
    for at, start, nbytes in share.runs:
        sealed[start : start + nbytes] = row[at : at + nbytes].ljust(nbytes, b"\0")
    footer = memoryview(bytearray(row[share.whole.data_nbytes :]))
    into = memoryview(bytearray(share.nbytes))
    open_row(share, sealed, footer, namespace, name, keys=keys, into=into)
    return bytes(into)
