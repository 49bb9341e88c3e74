"""Exponents of bfloat16 in four bits: four numbers of 16 bits in three words, without loss.

Nearly all exponents of a head's KV in one layer lie within 16 neighbouring values.  Less the least
of them, the *base*, an exponent has four zero bits, and the twelve other bits of every fourth
number fill the gaps of three others::

    x - (base << 7)    s 0000 eeee mmmmmmm      q0, q1, q2, q3: quarters of the numbers
    word 0             s aaaa eeee mmmmmmm      q0, and bits 0 to 3 of q3
    word 1             s bbbb eeee mmmmmmm      q1, and bits 4 to 7 of q3
    word 2             s cccc eeee mmmmmmm      q2, and bits 8 to 10 and the sign of q3

A number with a bit in the gap is an *escape*: zero in the words, and kept beside with its place.
The subtraction is modulo 2^16, and bits outside of the gap are all kept, so every number comes
back, whatever it means: NaNs, infinities, subnormals, or no bfloat16 at all.

What is packed at once is one head of a section, all its layers.  Their slabs are cut into *pieces*
of at most 64 Ki numbers, each with a base of its own, and neighbouring pieces are packed together::

    | words of pieces 0 to 3 | words of pieces 4 to 7 | ... | tables | places | values |
                                                room for escapes: a 64th of ^ the numbers

Zeros that a piece begins with are counted instead: tokens that a window does not reach are stored
as zeros.  The tables have the number of escapes, that of zeros and the base of each piece.

The size is thus known before, 25/32 of the bytes and 10 bytes a piece, which is what lets a row's
ranges stay where they are.  A head with more escapes does not fit, and is stored as it is.  Layers
share the room since they differ: of a head of real models 0.5 % are escapes, of one layer up to 6 %
(measured: ``tests/throughput/compression``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdconn.store.store_errors import RowDamaged

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I64 = NDArray[np.int64]

ROOM = 64
"""One number in so many may be an escape."""

_PIECE_NUMBERS = 1 << 16  # places of escapes are 16 bits
_MOST_PIECES = 64
_LANES = 64
"""Pieces are multiples of so many numbers: four quarters, 16 of which are tested at once."""

_BATCH_NBYTES = 256 << 10
"""Pieces are packed together up to so many bytes: enough to hide the calls, few enough to stay in a
core's cache."""

_GAP = np.uint16(0x7800)
_GAPS = np.uint64(0x7800_7800_7800_7800)


@dataclass(frozen=True, slots=True)
class _Batch:
    """``count`` pieces of ``numbers`` each, one after another, numbered from ``first`` on.

    They begin at byte ``start`` of the head, and their words at byte ``words_at`` when packed.
    """

    first: int
    count: int
    numbers: int
    start: int
    words_at: int

    @property
    def pieces(self) -> slice:
        """Its pieces among all."""
        return slice(self.first, self.first + self.count)

    @property
    def starts(self) -> range:
        """The first number of each piece, counted from the batch's."""
        return range(0, self.count * self.numbers, self.numbers)

    @property
    def end(self) -> int:
        """The first byte of the head after it."""
        return self.start + 2 * self.count * self.numbers

    def numbers_of(self, head: U8) -> U16:
        """A view of shape (pieces, numbers)."""
        return head[self.start : self.end].view(np.uint16).reshape(self.count, self.numbers)

    def words_of(self, packed: U8) -> U16:
        """A view of shape (3, a quarter of the batch)."""
        nbytes = self.count * self.numbers // 4 * 6
        return packed[self.words_at : self.words_at + nbytes].view(np.uint16).reshape(3, -1)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Views of what follows the words: of each piece, and of the room for escapes."""

    bases: U16
    counts: NDArray[np.uint32]
    zeros: NDArray[np.uint32]
    places: U16
    values: U16


class HeadPacking:
    """How one head of a section is packed.

    Attributes:
        nbytes: of the head's slabs, with what aligns them.
        packed_nbytes: of the head when it is packed.
    """

    def __init__(self, batches: Sequence[_Batch], nbytes: int) -> None:
        self.nbytes = nbytes
        self._batches = tuple(batches)
        self._pieces = sum(batch.count for batch in batches)
        numbers = sum(batch.count * batch.numbers for batch in batches)
        self._room = numbers // ROOM
        self._tables_at = numbers // 4 * 6
        self.packed_nbytes = self._tables_at + 10 * self._pieces + 4 * self._room

    def pack_head(self, head: memoryview, into: memoryview) -> bool:
        """Pack a head.

        Args:
            head: its ``nbytes`` bytes; what aligns slabs is not kept.
            into: room for at least ``packed_nbytes``; all of it is overwritten.

        Returns:
            Whether it fits; if not, ``into`` is undefined.
        """
        source, packed = np.frombuffer(head, np.uint8), np.frombuffer(into, np.uint8)
        tables = self._tables(packed)
        packed[self._tables_at :] = 0
        used = 0
        for batch in self._batches:
            numbers = batch.numbers_of(source)
            bases = tables.bases[batch.pieces] = _bases(numbers)
            reduced = (numbers - bases[:, None]).reshape(-1)
            for piece in np.flatnonzero(numbers[:, 0] == 0).tolist():
                zeros = _leading_zeros(numbers[piece])
                tables.zeros[batch.first + piece] = zeros
                reduced[piece * batch.numbers :][:zeros] = 0
            escapes = _escapes(reduced)
            until = used + len(escapes)
            if until > self._room:
                return False
            counts = np.diff(np.searchsorted(escapes, [*batch.starts, reduced.size]))
            tables.counts[batch.pieces] = counts
            tables.places[used:until] = escapes - np.repeat(batch.starts, counts)
            tables.values[used:until] = numbers.reshape(-1)[escapes]
            used = until
            reduced[escapes] = 0
            _pack(reduced, batch.words_of(packed))
        return True

    def unpack_head(self, packed: memoryview, into: memoryview) -> None:
        """The inverse of :meth:`pack_head`; what aligns slabs becomes zeros.

        Raises:
            RowDamaged: bytes that no head is packed to.
        """
        source, head = np.frombuffer(packed, np.uint8), np.frombuffer(into, np.uint8)
        tables = self._tables(source)
        counts = tables.counts.astype(np.int64)
        if int(counts.sum()) > self._room:
            raise RowDamaged(f"escapes: expected at most {self._room}, got {counts.sum()}")
        used = 0
        for batch in self._batches:
            numbers, of_pieces = batch.numbers_of(head), counts[batch.pieces]
            until = used + int(of_pieces.sum())
            places = tables.places[used:until]
            if until > used and int(places.max()) >= batch.numbers:
                raise RowDamaged(f"escapes: expected places below {batch.numbers}")
            flat = numbers.reshape(-1)
            _unpack(batch.words_of(source), flat)
            numbers += tables.bases[batch.pieces][:, None]
            flat[places + np.repeat(batch.starts, of_pieces)] = tables.values[used:until]
            for piece in np.flatnonzero(tables.zeros[batch.pieces]).tolist():
                numbers[piece, : tables.zeros[batch.first + piece]] = 0
            used = until
        for start, end in self._gaps():
            head[start:end] = 0

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """What aligns slabs, which is not kept."""
        held = 0
        for batch in self._batches:
            if held < batch.start:
                yield held, batch.start
            held = batch.end
        if held < self.nbytes:
            yield held, self.nbytes

    def _tables(self, packed: U8) -> _Tables:
        sizes = 4 * self._pieces, 4 * self._pieces, 2 * self._pieces, 2 * self._room, 2 * self._room
        ends = np.cumsum([self._tables_at, *sizes]).tolist()
        counts, zeros, bases, places, values = (packed[a:b] for a, b in pairwise(ends))
        return _Tables(
            bases.view(np.uint16),
            counts.view(np.uint32),
            zeros.view(np.uint32),
            places.view(np.uint16),
            values.view(np.uint16),
        )


@lru_cache(256)
def head_packing(slabs: tuple[tuple[int, int], ...], nbytes: int) -> HeadPacking | None:
    """The packing of a head whose slabs begin at these bytes, with so many each.

    Returns:
        None where a slab has no pieces of whole multiples of 64 numbers.
    """
    batches: list[_Batch] = []
    number = words_at = 0
    for offset, slab_nbytes in slabs:
        pieces = _num_pieces(slab_nbytes)
        if pieces is None:
            return None
        size = slab_nbytes // pieces
        for start in range(offset, offset + slab_nbytes, size):
            last = batches[-1] if batches else None
            if last is not None and _joins(last, start, size):
                batches[-1] = replace(last, count=last.count + 1)
            else:
                batches.append(_Batch(number, 1, size // 2, start, words_at))
            number += 1
            words_at += size // 4 * 3
    return HeadPacking(batches, nbytes)


def _joins(batch: _Batch, start: int, nbytes: int) -> bool:
    is_next = start == batch.end and nbytes == 2 * batch.numbers
    return is_next and (batch.count + 1) * nbytes <= _BATCH_NBYTES


def _num_pieces(nbytes: int) -> int | None:
    """The fewest equal pieces of a slab; None if there are none."""
    least = max(1, -(-nbytes // (2 * _PIECE_NUMBERS)))
    fitting = (n for n in range(least, _MOST_PIECES + 1) if nbytes % (2 * _LANES * n) == 0)
    return next(fitting, None) if nbytes else None


def _bases(numbers: U16) -> U16:
    """For each piece the least of the 16 exponents that most of a sample lie in, times 128."""
    count, size = numbers.shape
    # An odd step, so that channels, whose number is even, all take part.
    step = 61 if size >= 1 << 13 else 1
    seen = ((numbers[:, ::step] >> 7) & 0xFF) + 256 * np.arange(count)[:, None]
    counts = np.bincount(seen.reshape(-1), minlength=256 * count).reshape(count, 256)
    counts[:, 0] = 0  # zeros, of which pieces may have many
    below = np.cumsum(counts, 1)
    inside = below[:, 15:].copy()
    inside[:, 1:] -= below[:, :-16]
    found: U16 = (np.argmax(inside, axis=1) << 7).astype(np.uint16)
    return found


def _leading_zeros(numbers: U16) -> int:
    is_other = numbers != 0
    first = int(np.argmax(is_other))
    return first if is_other[first] else len(numbers)


def _escapes(flat: U16) -> I64:
    """Places of numbers with a bit in the gap, ascending: of 16 at once first, as they are few."""
    words = flat.view(np.uint64).reshape(4, -1)
    any_of = np.bitwise_or.reduce(words, axis=0)
    any_of &= _GAPS
    columns = np.flatnonzero(any_of)
    at = (np.arange(4)[:, None] * words.shape[1] + columns).reshape(-1)
    numbers = flat.reshape(-1, 4)[at] & _GAP
    rows, lanes = np.nonzero(numbers)
    found: I64 = at[rows] * 4 + lanes
    return found


def _pack(reduced: U16, words: U16) -> None:
    """Fill ``words``, of shape (3, a quarter), and overwrite ``reduced``."""
    q0, q1, q2, q3 = reduced.reshape(4, -1)
    word0, word1, word2 = words
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


def _unpack(words: U16, flat: U16) -> None:
    """Fill ``flat`` with numbers that lack their bases."""
    kept = words.size
    np.bitwise_and(words.reshape(-1), ~_GAP, out=flat[:kept])
    q3 = flat[kept:]
    np.right_shift(words[0], 11, out=q3)
    q3 &= np.uint16(0x000F)
    part = np.right_shift(words[1], 7)
    part &= np.uint16(0x00F0)
    q3 |= part
    np.right_shift(words[2], 3, out=part)
    part &= np.uint16(0x0700)
    q3 |= part
    np.left_shift(words[2], 1, out=part)
    part &= np.uint16(0x8000)
    q3 |= part
