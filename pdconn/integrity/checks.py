"""The reader's half: which units a pull covers, the queries to each rank, and its own sums.

A pull moves tokens ``[first, stop)``, in sub-blocks of both sides.  A unit that it covers
in part is skipped.  That happens only where a prefix hit or the last token lies inside a
unit, and no unit divides the sub-block::

    pulled                    [first ................ stop)
    units of the lender   |  10  |  11  |  12  |  13  |  14  |
    compared                      [ 11 ......... 13 ]

Only written rows count: the unit of the lender's last token is covered if the pull has
all of its written rows.  Units that are covered are combined with the chunks and heads that were
read from each rank of the lender.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from pdconn.integrity.memory import Cells, ReadMemory
from pdconn.integrity.sums import I64, Grain, Terms, Units, counted, piece_sums, total
from pdconn.planning.plan import Need, sub_blocks
from pdconn.planning.planning_errors import MissingBlock
from pdconn.planning.template import Piece, match_pieces
from pdconn.protocol.proof import MAX_SHARES, NOTHING, ChecksumQuery, PieceRange, PieceSum
from pdconn.protocol.ticket import BlockList
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
)


@dataclass(frozen=True, slots=True)
class Match:
    """A chunk on both sides: groups, and rows per block.

    ``their_ref`` and ``our_ref`` stand for all chunks of as many rows and tokens.
    """

    their_group: int
    our_group: int
    their_block_tokens: int
    group: KVCacheGroupReference
    their_ref: KVCacheDataReference
    our_ref: KVCacheDataReference


@dataclass(frozen=True, slots=True, eq=False)
class Covered:
    """The units to query, and those of them that count, in runs of equally many rows.

    ``runs`` is empty where none counts; else it is whole units, the partly written unit
    at the end, or both.
    """

    asked: range
    runs: tuple[Units, ...]


def covered(match: Match, need: Need, terms: Terms) -> Covered:
    """The units that a pull of ``need`` covers.

    Raises:
        MissingBlock: a block of ours is a hole where the pull wrote.
    """
    if match.group.kind is AttentionKind.STATE:
        return _state(match, need, terms)
    grain = Grain.for_chunk(match.their_ref, match.their_block_tokens, terms.unit_tokens)
    asked = _asked(match, need, grain, terms.num_tokens)
    numbers = np.arange(asked.start, asked.stop, dtype=np.int64)
    numbers = numbers[_counted(match, terms, numbers // grain.units)]
    rows = np.minimum(grain.written(terms.num_tokens) - numbers * grain.rows, grain.rows)
    runs = []
    for count in sorted(set(rows.tolist())):
        alike = numbers[rows == count]
        runs.append(_units(match, grain, alike, count, need.blocks[match.our_group]))
    return Covered(asked, tuple(runs))


def _asked(match: Match, need: Need, grain: Grain, num_tokens: int) -> range:
    """Numbers of the units whose every written row was pulled."""
    sub = gcd(match.their_block_tokens, match.group.block_tokens)
    pulled = sub_blocks(match.group, need.tokens[match.our_group], sub)
    written = grain.written(num_tokens)
    low = -(-(pulled.start * sub // grain.row_tokens) // grain.rows)
    high = pulled.stop * sub // grain.row_tokens
    end = -(-written // grain.rows) if high >= written else high // grain.rows
    return range(low, max(low, end))


def _units(match: Match, grain: Grain, numbers: I64, rows: int, blocks: BlockList) -> Units:
    """The place of units in our memory: our block may hold several of them, or a part of one."""
    our_rows = match.our_ref.num_rows or 1
    step = gcd(grain.rows, our_rows)
    needed = np.arange(-(-rows // step), dtype=np.int64)
    strips = numbers[:, None] * (grain.rows // step) + needed
    ids = _ids(strips * step // our_rows, blocks)
    return Units(numbers, ids, strips % (our_rows // step), step, rows)


def _state(match: Match, need: Need, terms: Terms) -> Covered:
    """The one block that holds the state after the last token, on either side."""
    lasts = need.tokens[match.our_group][-1:]
    numbers = np.array(lasts, dtype=np.int64) // match.their_block_tokens
    numbers = numbers[_counted(match, terms, numbers)]
    if not len(numbers):
        return Covered(range(0), ())
    last, number = lasts[0], int(numbers[0])
    here = np.array([[last // match.group.block_tokens]], dtype=np.int64)
    ids = _ids(here, need.blocks[match.our_group])
    return Covered(range(number, number + 1), (Units(numbers, ids, np.zeros_like(ids), 1, 1),))


def _counted(match: Match, terms: Terms, blocks: I64) -> NDArray[np.bool_]:
    return counted(terms, match.their_group, match.their_block_tokens, blocks)


def _ids(logical: I64, blocks: BlockList) -> I64:
    """Ids of logical blocks of ours.

    Raises:
        MissingBlock: one is a hole, or beyond the list.
    """
    at = logical - blocks.first
    ids = np.append(blocks.array, 0)
    found: I64 = ids[np.where((at >= 0) & (at < len(blocks.ids)), at, len(blocks.ids))]
    if not found.all():
        missing = int(logical[found == 0][0])
        raise MissingBlock(f"logical block {missing} was pulled, but no block of ours holds it")
    return found


class Corrupted(Exception):
    """Our bytes are not those that the lender summed when it lent them."""

    def __init__(self, rank: int, field: str, theirs: int, ours: int) -> None:
        self.rank = rank
        self.field = field
        self.theirs = theirs
        self.ours = ours
        shown = f"{theirs:#018x}, ours {ours:#018x}" if field == "sum" else f"{theirs}, ours {ours}"
        super().__init__(f"{field} of what was read from rank {rank}: theirs {shown}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Chunks from one rank that share a query: same groups, heads and rows.

    ``chunks`` are their positions in the lender's group, ascending, and ``ours`` the same
    chunks here.
    """

    their_rank: int
    match: Match
    first_head: int
    num_heads: int
    chunks: tuple[int, ...]
    ours: tuple[KVCacheDataReference, ...]

    def shares(self, units: range) -> list[PieceRange]:
        """A share for every run of neighbouring chunks."""
        made = []
        start = 0
        for end in range(1, len(self.chunks) + 1):
            if end == len(self.chunks) or self.chunks[end] != self.chunks[end - 1] + 1:
                made.append(
                    PieceRange(
                        self.match.their_group, self.chunks[start], end - start,
                        self.first_head, self.num_heads, units.start, len(units),
                    )
                )  # fmt: skip
                start = end
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The queries to one rank of the lender, and the place of the same bytes here.

    ``asks`` is one query, unless the groups are cut into thousands of shares.
    """

    rank: int
    asks: tuple[ChecksumQuery, ...]
    cells: tuple[tuple[KVCacheDataReference, Cells, Units], ...]

    @property
    def nbytes(self) -> int:
        """Bytes here that the check covers."""
        return sum(
            len(units.numbers) * units.rows * cells.num_heads * cells.row_nbytes
            for _, cells, units in self.cells
        )

    def ours(self, read: ReadMemory) -> PieceSum:
        """The same sum over our memory: compute it after every read has settled."""
        found = NOTHING
        for ref, cells, units in self.cells:
            sums = piece_sums(read, ref, cells, units)
            found += PieceSum(total(sums), sums.size)
        return found

    def compare(self, theirs: PieceSum, ours: PieceSum) -> None:
        """Compare the lender's answer (the sum of its answers to all ``asks``) with ours.

        Raises:
            Corrupted: they differ.
        """
        if theirs.pieces != ours.pieces:
            raise Corrupted(self.rank, "pieces", theirs.pieces, ours.pieces)
        if theirs.total != ours.total:
            raise Corrupted(self.rank, "sum", theirs.total, ours.total)


@dataclass(frozen=True, slots=True)
class Checks:
    """Everything about a peer that checks derive from; made once, at the greeting."""

    references: KVCacheReferences
    bundles: tuple[Bundle, ...]

    @classmethod
    def between(
        cls, ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], spread: int = 0
    ) -> Checks:
        """Match our rank with all ranks of a peer, as ``Pairing.between`` does.

        Raises:
            Incompatible: the two cannot exchange KV.
        """
        return cls(ours, tuple(_bundles(ours, theirs, match_pieces(ours, theirs, spread))))

    def expect(self, need: Need, terms: Terms) -> tuple[Expected, ...]:
        """The checks of each rank that a pull of ``need`` reads from.

        Ranks from which nothing is read are skipped, and in a sample those without a counted
        block.

        Raises:
            MissingBlock: a block of ours is a hole where the pull wrote.
        """
        shares: dict[int, list[PieceRange]] = defaultdict(list)
        cells: dict[int, list[tuple[KVCacheDataReference, Cells, Units]]] = defaultdict(list)
        for bundle in self.bundles:
            found = covered(bundle.match, need, terms)
            if not found.runs:
                continue
            shares[bundle.their_rank] += bundle.shares(found.asked)
            for ref in bundle.ours:
                where = Cells.for_heads(self.references, ref, bundle.first_head, bundle.num_heads)
                cells[bundle.their_rank] += [(ref, where, units) for units in found.runs]
        return tuple(
            Expected(rank, _asks(rank, terms.sampled, shares[rank]), tuple(cells[rank]))
            for rank in sorted(shares)
        )


def _bundles(
    ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], pieces: Sequence[Piece]
) -> list[Bundle]:
    places = {
        (rank, number, ref.layer, ref.chunk): place
        for rank, references in enumerate(theirs)
        for number, group in enumerate(references.groups)
        for place, ref in enumerate(group.data)
    }
    alike: dict[object, dict[int, Piece]] = defaultdict(dict)
    for piece in pieces:
        their = piece.theirs
        key = (
            piece.their_rank, piece.their_group, piece.our_group, their.num_rows,
            piece.ours.num_rows, their.first_head + piece.their_head, piece.num_heads,
        )  # fmt: skip
        place = places[piece.their_rank, piece.their_group, their.layer, their.chunk]
        alike[key][place] = piece
    return [_bundle(ours, theirs, dict(sorted(found.items()))) for found in alike.values()]


def _bundle(
    ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], found: dict[int, Piece]
) -> Bundle:
    one = next(iter(found.values()))
    block_tokens = theirs[one.their_rank].groups[one.their_group].block_tokens
    group = ours.groups[one.our_group]
    return Bundle(
        one.their_rank,
        Match(one.their_group, one.our_group, block_tokens, group, one.theirs, one.ours),
        one.theirs.first_head + one.their_head,
        one.num_heads,
        tuple(found),
        tuple(piece.ours for piece in found.values()),
    )


def _asks(rank: int, sampled: bool, shares: list[PieceRange]) -> tuple[ChecksumQuery, ...]:
    starts = range(0, len(shares), MAX_SHARES)
    return tuple(ChecksumQuery(rank, sampled, tuple(shares[at : at + MAX_SHARES])) for at in starts)
