"""The lender's half: sums of what one rank lends, and answers from them.

A rank computes its sums once, in the step after the request finished, while its blocks are
lent; a later change of its memory then shows as a difference.  Any number of readers may query
them; an answer reads the sums alone, never the KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdconn.integrity.memory import Cells, ReadMemory
from pdconn.integrity.sums import I64, U64, Grain, Terms, Units, counted, piece_sums, total
from pdconn.protocol.errors import MessageError, ProtocolError
from pdconn.protocol.proof import NOTHING, ChecksumQuery, PieceRange, PieceSum
from pdconn.protocol.ticket import BlockList
from registration.references import (
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
)


class NotSummed(ProtocolError):
    """A checksum request for pieces that the lender has no sums of."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSums:
    """Sums of one chunk's pieces, shape (blocks, units of a block, heads).

    ``first_head`` is model-wide.  A unit without a written row has sum 0, and no answer
    includes it.
    """

    first_head: int
    sums: U64
    written_units: int

    def __post_init__(self) -> None:
        if self.sums.dtype != np.uint64 or self.sums.ndim != 3:
            seen = f"{self.sums.dtype} {self.sums.shape}"
            raise ValueError(f"sums: expected uint64 (blocks, units, heads), got {seen}")


@dataclass(frozen=True, slots=True, eq=False)
class GroupSums:
    """Sums of one group: ``blocks`` are its summed logical blocks, ascending, shape (n,)."""

    block_tokens: int
    blocks: I64
    chunks: tuple[ChunkSums, ...]

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if len(chunk.sums) != len(self.blocks):
                seen = len(chunk.sums)
                raise ValueError(f"blocks of a chunk: expected {len(self.blocks)}, got {seen}")


@dataclass(frozen=True, slots=True, eq=False)
class LentSums:
    """Everything that one rank can answer about one lease."""

    terms: Terms
    groups: tuple[GroupSums, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the sums take."""
        return sum(chunk.sums.nbytes for group in self.groups for chunk in group.chunks)

    def answer(self, ask: ChecksumQuery) -> PieceSum:
        """The sum over the pieces of a query.

        Raises:
            MessageError: a group, chunk, head or unit that we do not have, or overlapping shares.
            NotSummed: units that were not lent, or not summed.
        """
        if self.terms.sampled and not ask.sampled:
            raise NotSummed("blocks asked for", "those of the sample", "all")
        # Bounds the work: a reader takes one range of heads from a rank, so that no honest query
        # names a chunk twice.
        room = sum(len(group.chunks) for group in self.groups)
        asked = sum(share.num_chunks for share in ask.shares)
        if asked > room:
            raise MessageError("chunks of an ask", f"at most {room}", asked)
        terms = replace(self.terms, sampled=ask.sampled)
        return sum((self._share(terms, share) for share in ask.shares), NOTHING)

    def _share(self, terms: Terms, share: PieceRange) -> PieceSum:
        if share.group >= len(self.groups):
            raise MessageError("share.group", f"below {len(self.groups)}", share.group)
        group = self.groups[share.group]
        stop = share.first_chunk + share.num_chunks
        if stop > len(group.chunks):
            raise MessageError("chunks of a share", f"at most {len(group.chunks)}", stop)
        chunks = group.chunks[share.first_chunk : stop]
        return sum((_of_chunk(terms, share, group, chunk) for chunk in chunks), NOTHING)


def lent_sums(
    read: ReadMemory, references: KVCacheReferences, blocks: Sequence[BlockList], terms: Terms
) -> LentSums:
    """Sum what one rank lends.

    Args:
        read: reaches the rank's memory.
        references: the rank's memory, as in the Welcome.
        blocks: the lent blocks, one list per group, as in the ticket.
        terms: the request, its tokens, and whether all blocks or a sample are summed.

    Raises:
        ValueError: another number of block lists than groups.
        IndexError: a block id beyond the cache.
    """
    if len(blocks) != len(references.groups):
        raise ValueError(f"block lists: expected {len(references.groups)}, got {len(blocks)}")
    groups = []
    for number, (group, listed) in enumerate(zip(references.groups, blocks, strict=True)):
        chosen = _chosen(terms, number, group, listed)
        chunks = tuple(_chunk_sums(read, references, ref, chosen, terms) for ref in group.data)
        groups.append(GroupSums(group.block_tokens, chosen.logical, chunks))
    return LentSums(terms, tuple(groups))


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """Blocks of a group to sum: their numbers and ids, shape (n,)."""

    logical: I64
    ids: I64
    block_tokens: int


def _chosen(terms: Terms, number: int, group: KVCacheGroupReference, listed: BlockList) -> _Chosen:
    """Skip holes, blocks behind the last token, and blocks outside of the sample."""
    ids = listed.array
    logical = listed.first + np.arange(len(ids), dtype=np.int64)
    keep = (ids != 0) & (logical * group.block_tokens < terms.num_tokens)
    keep &= counted(terms, number, group.block_tokens, logical)
    return _Chosen(logical[keep], ids[keep], group.block_tokens)


def _chunk_sums(
    read: ReadMemory,
    references: KVCacheReferences,
    ref: KVCacheDataReference,
    blocks: _Chosen,
    terms: Terms,
) -> ChunkSums:
    grain = Grain.for_chunk(ref, blocks.block_tokens, terms.unit_tokens)
    cells = Cells.for_heads(references, ref, ref.first_head, ref.num_heads)
    strips = np.tile(np.arange(grain.units, dtype=np.int64), len(blocks.ids))
    numbers = np.repeat(blocks.logical, grain.units) * grain.units + strips
    ids = np.repeat(blocks.ids, grain.units)
    written = grain.written(terms.num_tokens)
    rows = np.clip(written - numbers * grain.rows, 0, grain.rows)
    sums = np.zeros((len(numbers), ref.num_heads), dtype=np.uint64)
    for count in {grain.rows, written % grain.rows} - {0}:
        alike = rows == count
        units = Units(
            numbers[alike], ids[alike, None], strips[alike, None], grain.rows, rows=count
        )  # fmt: skip
        sums[alike] = piece_sums(read, ref, cells, units)
    shaped = sums.reshape(len(blocks.ids), grain.units, ref.num_heads)
    return ChunkSums(ref.first_head, shaped, -(-written // grain.rows))


def _of_chunk(terms: Terms, share: PieceRange, group: GroupSums, chunk: ChunkSums) -> PieceSum:
    """The share of one chunk.

    Raises:
        MessageError: heads or units that the chunk does not have.
        NotSummed: a unit in the range without a sum.
    """
    _, units, heads = chunk.sums.shape
    skipped, stop = share.first_head - chunk.first_head, share.first_unit + share.num_units
    if skipped < 0 or skipped + share.num_heads > heads:
        held = f"{chunk.first_head} to {chunk.first_head + heads - 1}"
        last = share.first_head + share.num_heads - 1
        raise MessageError("heads of a share", held, f"{share.first_head} to {last}")
    if stop > chunk.written_units:
        raise MessageError("units of a share", f"below {chunk.written_units}", stop - 1)
    low, high = share.first_unit // units, -(-stop // units)
    asked = np.arange(low, high, dtype=np.int64)
    asked = asked[counted(terms, share.group, group.block_tokens, asked)]
    at = np.searchsorted(group.blocks, asked)
    if len(asked) and (at[-1] == len(group.blocks) or (group.blocks[at] != asked).any()):
        raise NotSummed("blocks of a share", "lent ones", f"some of {low} to {high - 1} are not")
    numbers = asked[:, None] * units + np.arange(units)
    inside = (numbers >= share.first_unit) & (numbers < stop)
    found = chunk.sums[at][inside][:, skipped : skipped + share.num_heads]
    return PieceSum(total(found), found.size)
