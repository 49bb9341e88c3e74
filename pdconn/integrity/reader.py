"""The reader's half: what to ask of each rank that it read from, and its own sums.

:mod:`pdconn.integrity.covered` says which units a pull covers; here they are combined with
the chunks and heads that were read from each rank of the lender.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.integrity.covered import Match, covered
from pdconn.integrity.memory import Cells, ReadMemory
from pdconn.integrity.sums import Terms, Units, piece_sums, total
from pdconn.planning.plan import Need
from pdconn.planning.template import Piece, match_pieces
from pdconn.protocol.proof import MAX_SHARES, NOTHING, ChecksumQuery, PieceRange, PieceSum
from registration.references import KVCacheDataReference, KVCacheReferences


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
    """Everything about a peer that checks derive from: made once, at the greeting."""

    references: KVCacheReferences
    bundles: tuple[Bundle, ...]

    @classmethod
    def of(
        cls, ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], spread: int = 0
    ) -> Checks:
        """Match our rank with all ranks of a peer, as ``Pairing.of`` does.

        Raises:
            Incompatible: the two cannot exchange KV.
        """
        return cls(ours, tuple(_bundles(ours, theirs, match_pieces(ours, theirs, spread))))

    def expect(self, need: Need, terms: Terms) -> tuple[Expected, ...]:
        """What to ask of each rank that a pull of ``need`` reads from.

        Ranks from which nothing is read are left out, and in a sample those without a
        counted block.

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
                where = Cells.of(self.references, ref, bundle.first_head, bundle.num_heads)
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
