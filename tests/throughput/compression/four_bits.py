"""Exponents of bfloat16 in four bits: four numbers of 16 bits in three words, without a codec.

Of a slab nearly all exponents lie within 16 neighbouring values.  Less the least of them, the
*base*, an exponent has four zero bits, and the twelve other bits of every fourth number fill the
gaps of three others::

    x - (base << 7)    s 0000 eeee mmmmmmm      q0, q1, q2, q3: quarters of the numbers
    word 0             s aaaa eeee mmmmmmm      q0, and bits 0 to 3 of q3
    word 1             s bbbb eeee mmmmmmm      q1, and bits 4 to 7 of q3
    word 2             s cccc eeee mmmmmmm      q2, and bits 8 to 10 and the sign of q3

A number whose exponent lies outside is an *escape*: zero here, and kept beside with its place.
So the size is 3/4 and 6 bytes an escape, whatever the values; each step is one pass of numpy over
words of 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.throughput.compression.arrangements import Parts, Unit

U16 = NDArray[np.uint16]

_GAP = np.uint16(0x7800)
_GAPS = np.uint64(0x7800_7800_7800_7800)
_SAMPLE = 61
"""Every so many numbers one is looked at for the base."""

_NBYTES = 256 << 10
"""Slabs are packed together up to so many bytes: enough to hide the calls, few enough to stay in a
core's cache."""


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
            out = packed[at // 4 * 3 : (at + group.size) // 4 * 3]
            where = _pack(group, bases[first:last], out)
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
            _unpack(packed[at // 4 * 3 : (at + group.size) // 4 * 3], group, bases[first:last])
            at += group.size
        unit.reshape(-1)[places] = values
        return unit


def _groups(slabs: U16) -> list[tuple[int, int]]:
    count = max(1, _NBYTES // (2 * slabs.shape[1]))
    return [(at, min(at + count, len(slabs))) for at in range(0, len(slabs), count)]


def _bases(slabs: U16) -> U16:
    """For each slab the least of the 16 exponents that most of a sample lie in, times 128."""
    count = len(slabs)
    seen = ((slabs[:, ::_SAMPLE] >> 7) & 0xFF) + 256 * np.arange(count)[:, None]
    below = np.cumsum(np.bincount(seen.reshape(-1), minlength=256 * count).reshape(count, 256), 1)
    inside = below[:, 15:].copy()
    inside[:, 1:] -= below[:, :-16]
    found: U16 = (np.argmax(inside, axis=1) << 7).astype(np.uint16)
    return found


def _pack(group: U16, bases: U16, out: U16) -> NDArray[np.int64]:
    """Fill ``out``; returns the places of the escapes in ``group``."""
    flat = (group - bases[:, None]).reshape(-1)
    escapes = _escapes(flat)
    flat[escapes] = 0
    quarter = flat.size // 4
    q0, q1, q2, q3 = flat.reshape(4, quarter)
    word0, word1, word2 = out.reshape(3, quarter)
    np.left_shift(q3, 11, out=word0)
    word0 &= _GAP
    word0 |= q0
    np.left_shift(q3, 7, out=word1)
    word1 &= _GAP
    word1 |= q1
    np.left_shift(q3, 3, out=word2)
    word2 &= np.uint16(0x3800)
    q3 >>= 1
    q3 &= np.uint16(0x4000)
    word2 |= q3
    word2 |= q2
    return escapes


def _escapes(flat: U16) -> NDArray[np.int64]:
    """Places of numbers with a bit in the gap: of 16 at once first, since they are few."""
    words = flat.view(np.uint64).reshape(4, -1)
    any_of = np.bitwise_or.reduce(words, axis=0)
    any_of &= _GAPS
    columns = np.flatnonzero(any_of)
    at = (np.arange(4)[:, None] * words.shape[1] + columns).reshape(-1)
    numbers = flat.reshape(-1, 4)[at] & _GAP
    rows, lanes = np.nonzero(numbers)
    return at[rows] * 4 + lanes


def _unpack(packed: U16, group: U16, bases: U16) -> None:
    flat = group.reshape(-1)
    quarter = flat.size // 4
    word0, word1, word2 = packed.reshape(3, quarter)
    np.bitwise_and(packed, ~_GAP, out=flat[: 3 * quarter])
    q3 = flat[3 * quarter :]
    np.right_shift(word0, 11, out=q3)
    q3 &= np.uint16(0x000F)
    part = np.right_shift(word1, 7)
    part &= np.uint16(0x00F0)
    q3 |= part
    np.right_shift(word2, 3, out=part)
    part &= np.uint16(0x0700)
    q3 |= part
    np.left_shift(word2, 1, out=part)
    part &= np.uint16(0x8000)
    q3 |= part
    group += bases[:, None]
