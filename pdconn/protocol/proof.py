"""Checksum queries: what a reader asks of one rank of the lender, and the answer.

Chunks are named by their position in the lender's geometry, which the reader has from the Welcome,
and everything is a range: a query takes some 20 bytes per group of layers, whatever the length of
the prompt.  Both sides compute which blocks of a range are in the sample
(:mod:`pdconn.integrity.sums`).
"""

from __future__ import annotations

import msgspec

from pdconn.protocol.errors import MessageError
from pdconn.protocol.limits import MAX_GROUPS, MAX_LAYER_CHUNKS, MAX_RANKS

MAX_SHARES = 256
"""Of one query.  Usually there is one per KV cache group; a reader with more sends more queries."""

MAX_NUMBER = 2**31 - 1


class PieceRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pieces of one group: a range of chunks, of model-wide heads and of units.

    ``first_chunk`` counts in the lender's ``groups[group].data``; ``first_unit`` counts
    units from the start of the sequence.
    """

    group: int
    first_chunk: int
    num_chunks: int
    first_head: int
    num_heads: int
    first_unit: int
    num_units: int

    def __post_init__(self) -> None:
        _bounded("share.group", self.group, 0, MAX_GROUPS - 1)
        for field in ("first_chunk", "first_head", "first_unit"):
            _bounded(f"share.{field}", getattr(self, field), 0, MAX_NUMBER)
        _bounded("share.num_chunks", self.num_chunks, 1, MAX_LAYER_CHUNKS)
        for field in ("num_heads", "num_units"):
            _bounded(f"share.{field}", getattr(self, field), 1, MAX_NUMBER)


class ChecksumQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sum over ``shares`` of what ``rank`` lends, of the sample only or of all."""

    rank: int
    sampled: bool
    shares: tuple[PieceRange, ...]

    def __post_init__(self) -> None:
        _bounded("ask.rank", self.rank, 0, MAX_RANKS - 1)
        _bounded("shares of an ask", len(self.shares), 1, MAX_SHARES)


class PieceSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sum modulo 2^64, and its number of pieces."""

    total: int
    pieces: int

    def __post_init__(self) -> None:
        _bounded("answer.total", self.total, 0, 2**64 - 1)
        _bounded("answer.pieces", self.pieces, 0, 2**63 - 1)

    def __add__(self, other: PieceSum) -> PieceSum:
        return PieceSum((self.total + other.total) % 2**64, self.pieces + other.pieces)


def _bounded(field: str, number: int, low: int, high: int) -> None:
    if not low <= number <= high:
        raise MessageError(field, f"{low} to {high}", number)


NOTHING = PieceSum(0, 0)
