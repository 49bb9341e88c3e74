"""Sums of pieces: what is hashed, under which name, and how sums add up.

A *unit* is up to ``unit_tokens`` tokens of one block of the lender, cut at multiples of
that from the block's start.  A *piece* is one head of one layer's chunk in one unit::

    lender's block       |        5        |        6        |     32 tokens
    units                |   10   |   11   |   12   | 13 ..  |     16 tokens
    tokens written       ------------------------------->          until 213
    pieces of a head     |  hash  |  hash  |  hash  | hash|        the last: 5 tokens

A piece's sum is XXH3-64 of its rows in order, seeded with its name: layer, chunk,
model-wide head, number of the unit.  A block, head or layer in the place of another therefore
changes the sum though all bytes are there.  Sums of many pieces are added modulo 2^64:
any reader can ask for the sum over just what it read.  That detects accidents (a wrong
address, a freed block, a torn copy), each missed with a chance of 2^-64; it is no
defence against a lender that lies.

Units exist because readers have other block sizes.  vLLM's are multiples of 16 tokens, and so is
the greatest common divisor of any two, in which plans move bytes: every unit is then read whole or
not at all.

Rows beyond the tokens that the lender computed were never written.  They are moved with the last
block and not hashed: a step that vLLM has scheduled already may still write them.  An opaque block
cannot be cut and is hashed whole.

``verify: sample`` sums one block in sixteen.  Both sides choose the same ones without a message, by
a hash of the request's name, the lender's group and the logical block, so that over many requests
every block, group and layer is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pdconn.integrity.memory import U8, Cells, ReadMemory
from registration.references import KVCacheDataReference

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

UNIT_TOKENS = 16
"""Tokens of a unit; it divides every block size of vLLM's attention backends."""

SAMPLED_ONE_IN = 16
"""Of how many blocks one is in the sample."""

_GATHERED_NBYTES = 1 << 21
"""Bytes hashed at a time, under the interpreter's lock (0.3 ms), and copied if scattered."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What both sides of a check agree on.

    Attributes:
        request: the lender's name of the request, as in the ticket.
        num_tokens: tokens that the lender computed, as in the ticket.
        sampled: whether only blocks of the sample count.
        unit_tokens: the most tokens of a unit.
    """

    request: str
    num_tokens: int
    sampled: bool
    unit_tokens: int = UNIT_TOKENS

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ValueError(f"num_tokens: expected 0 or more, got {self.num_tokens}")
        if self.unit_tokens <= 0:
            raise ValueError(f"unit_tokens: expected above 0, got {self.unit_tokens}")


@dataclass(frozen=True, slots=True)
class Grain:
    """How a chunk's blocks are cut: rows of a unit, units of a block, tokens of a row."""

    rows: int
    units: int
    row_tokens: int

    @classmethod
    def for_chunk(cls, ref: KVCacheDataReference, block_tokens: int, unit_tokens: int) -> Grain:
        """Units of at most ``unit_tokens`` tokens, but never less than a row."""
        stored = ref.num_rows or 1
        row_tokens = block_tokens // stored
        rows = gcd(stored, max(1, unit_tokens // row_tokens))
        return cls(rows, stored // rows, row_tokens)

    def written(self, num_tokens: int) -> int:
        """Rows that hold a token below ``num_tokens``, from the start of the sequence."""
        return -(-num_tokens // self.row_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Units of equally many rows, and their place in memory: one or several strips each.

    ``numbers`` has shape (n,) and counts from the start of the sequence; ``ids`` and
    ``strips`` have shape (n, k): the j-th ``step`` rows of unit i are strip
    ``strips[i, j]`` of block ``ids[i, j]``.  The first ``rows`` rows of each are hashed.
    """

    numbers: I64
    ids: I64
    strips: I64
    step: int
    rows: int

    def slices(self, count: int) -> Iterator[Units]:
        """The same, at most ``count`` units at a time."""
        for at in range(0, len(self.numbers), count):
            cut = slice(at, at + count)
            yield Units(self.numbers[cut], self.ids[cut], self.strips[cut], self.step, self.rows)


def counted(terms: Terms, group: int, block_tokens: int, blocks: I64) -> NDArray[np.bool_]:
    """Whether each logical block of the lender's ``group`` counts under ``terms``."""
    if not terms.sampled:
        return np.ones(len(blocks), dtype=bool)
    name = np.uint64(xxh3_64_intdigest(f"{group}:{terms.request}".encode()))
    chosen: NDArray[np.bool_] = mixed(name ^ mixed(blocks.astype(np.uint64))) % SAMPLED_ONE_IN == 0
    # And always the last block that is read.  A reader computes a prompt's last token itself, so it
    # is the block of one of the last two tokens.
    for token in (terms.num_tokens - 1, terms.num_tokens - 2):
        chosen |= blocks == token // block_tokens
    return chosen


def piece_sums(read: ReadMemory, ref: KVCacheDataReference, cells: Cells, units: Units) -> U64:
    """Sum of every piece, shape (units, heads).

    Args:
        read: reaches the memory.
        ref: names the chunk.
        cells: the heads to sum.
        units: their places.
    """
    per_unit = units.ids.shape[1] * cells.num_heads
    each = max(1, _GATHERED_NBYTES // (per_unit * units.step * cells.row_nbytes))
    made = [np.empty((0, cells.num_heads), dtype=np.uint64)]
    for part in units.slices(each):
        rows = _rows(read, cells, part)
        seeds = seeds_of(ref.layer, ref.chunk, part.numbers, cells)
        made.append(_hashed(rows, seeds))
    return np.concatenate(made)


def total(sums: U64) -> int:
    """All sums, added modulo 2^64."""
    return int(sums.sum(dtype=np.uint64))


def seeds_of(layer: str, chunk: int, units: I64, cells: Cells) -> U64:
    """The name of every piece as a number, shape (units, heads)."""
    name = np.uint64(xxh3_64_intdigest(f"{chunk}:{layer}".encode()))
    heads = np.arange(cells.first_head, cells.first_head + cells.num_heads, dtype=np.uint64)
    return mixed(mixed(name ^ mixed(units.astype(np.uint64)))[:, None] ^ mixed(~heads)[None, :])


def mixed(numbers: U64) -> U64:
    """A bijection in which every bit depends on every bit of the input.

    The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _rows(read: ReadMemory, cells: Cells, units: Units) -> Iterable[U8]:
    """Bytes of each unit, shape (heads, bytes) each, rows in order."""
    count, strips = units.ids.shape
    got = read.gather(cells, units.step, units.ids.ravel(), units.strips.ravel())
    if strips == 1 and units.rows == units.step:
        return got
    whole = np.stack(list(got)).reshape(count, strips, cells.num_heads, -1).swapaxes(1, 2)
    whole = whole.reshape(count, cells.num_heads, -1)[:, :, : units.rows * cells.row_nbytes]
    return np.ascontiguousarray(whole)


def _hashed(rows: Iterable[U8], seeds: U64) -> U64:
    """One C call per piece and nothing else: numpy has no hash of bytes."""
    heads: Iterable[Any] = chain.from_iterable(rows)
    sums = map(xxh3_64_intdigest, heads, seeds.ravel().tolist())
    return np.fromiter(sums, dtype=np.uint64, count=seeds.size).reshape(seeds.shape)
