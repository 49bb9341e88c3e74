"""Exponents of bfloat16 in four bits, as a store packs them, without the fixed room for escapes.

The size is 3/4 and 6 bytes an escape, whatever the values: what is to be had at most.  A store's
rows have room for escapes instead (:mod:`pdconn.store.format.exponents`), and 25/32 of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdconn.store.format.exponents import _bases, _escapes, _pack, _unpack
from tests.throughput.compression.arrangements import Parts, Unit

U16 = NDArray[np.uint16]

_NBYTES = 256 << 10
"""Slabs are packed together up to so many bytes, as in a store."""


class FourBits:
    """Packs units of bfloat16.  ``coded`` is empty: nothing is left for a codec."""

    def split(self, unit: Unit) -> Parts:
        """Packed words, bases, and places and values of escapes, for each group of slabs.

        Raises:
            ValueError: not 16-bit numbers, or a slab that is no multiple of 64 of them.
        """
        slabs = unit.reshape(len(unit), -1)
        if unit.dtype != np.uint16 or slabs.shape[1] % 64:
            raise ValueError(f"unit: expected uint16, 64 n a slab, got {unit.dtype} {unit.shape}")
        bases = _bases(slabs)
        packed = np.empty(slabs.size // 4 * 3, np.uint16)
        places, values, at = [], [], 0
        for first, last in _groups(slabs):
            group = slabs[first:last]
            words = packed[at // 4 * 3 : (at + group.size) // 4 * 3].reshape(3, -1)
            reduced = (group - bases[first:last, None]).reshape(-1)
            where = _escapes(reduced)
            reduced[where] = 0
            _pack(reduced, words)
            values.append(group.reshape(-1)[where])
            places.append((where + at).astype(np.uint32))
            at += group.size
        return Parts((), (packed, bases, np.concatenate(places), np.concatenate(values)))

    def join(self, coded: Sequence[bytes], kept: Sequence[NDArray[Any]], like: Unit) -> Unit:
        """The inverse of :meth:`split`."""
        packed, bases, places, values = kept
        unit = np.empty(like.shape, np.uint16)
        slabs = unit.reshape(len(unit), -1)
        at = 0
        for first, last in _groups(slabs):
            group = slabs[first:last]
            words = packed[at // 4 * 3 : (at + group.size) // 4 * 3].reshape(3, -1)
            _unpack(words, group.reshape(-1))
            group += bases[first:last, None]
            at += group.size
        unit.reshape(-1)[places] = values
        return unit


def _groups(slabs: U16) -> list[tuple[int, int]]:
    count = max(1, _NBYTES // (2 * slabs.shape[1]))
    return [(at, min(at + count, len(slabs))) for at in range(0, len(slabs), count)]
