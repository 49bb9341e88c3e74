"""Templates: which rank of a peer serves which heads of ours, and the runs inside a block.

Layers are matched by name and chunk, so a pipeline-parallel peer is only one
whose ranks hold fewer layers each.  Heads carry their model-wide index, so tensor
parallelism of any size on either side is an overlap of ranges, called *pieces*::

    ours   rank 1 of 2   heads      [4 5 6 7]
    theirs rank 2 of 4         [4 5]
           rank 3 of 4              [6 7]       two pieces

Replicated heads (tensor parallelism above the head count, MLA) are held by several
ranks: each head is taken from one of them, a different one for every rank of ours, so
that the load spreads.

A template maps, for the pieces of one rank and group, the bytes of one *sub-block* (the greatest
common divisor of both sides' block sizes) in a block row of theirs to those in a block row of ours.
A run is the largest piece that is contiguous on both sides::

    ours   BLHNC  | L0 h0 h1 | L1 h0 h1 |      block stride 4 pages
    theirs LBHNC  | L0 h0 h1 |...| L1 h0 h1 |  block stride 1 page
    runs            ^^^^^^^^       ^^^^^^^^    two: a page each

With unequal block sizes a block holds several sub-blocks; run i of sub-block s
starts ``s * step[i]`` bytes later on each side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from pdconn.planning.planning_errors import Incompatible
from pdconn.protocol.compat import Difference
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
)
from transport import Device
from transport.types import merge_runs


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads of one chunk, here and at one rank of the peer.

    ``our_head`` and ``their_head`` count from the first head that each side holds.
    """

    our_group: int
    ours: KVCacheDataReference
    their_rank: int
    their_group: int
    theirs: KVCacheDataReference
    our_head: int
    their_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class _Holder:
    rank: int
    group: int
    ref: KVCacheDataReference


def match_pieces(
    ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], spread: int
) -> list[Piece]:
    """Find a source for every head of every chunk of ours, each exactly once.

    Args:
        ours: our rank's memory.
        theirs: the peer's ranks' memory, in any order.
        spread: which replica to prefer, usually our tensor-parallel rank.

    Raises:
        Incompatible: naming every layer that no rank holds, that lacks a head, or whose kind
            or window differs.
    """
    holders = _holders(theirs)
    pieces: list[Piece] = []
    problems: list[Difference] = []
    for number, group in enumerate(ours.groups):
        for ref in group.data:
            found = holders.get((ref.layer, ref.chunk), [])
            try:
                for there in {(holder.rank, holder.group) for holder in found}:
                    _check_group(theirs[there[0]].groups[there[1]], group, ref.layer)
                pieces += _cover(number, ref, found, spread)
            except Incompatible as error:
                problems += error.differences
    if problems:
        raise Incompatible(*problems)
    return pieces


def _holders(theirs: Sequence[KVCacheReferences]) -> dict[tuple[str, int], list[_Holder]]:
    holders: dict[tuple[str, int], list[_Holder]] = defaultdict(list)
    for rank, references in enumerate(theirs):
        for number, group in enumerate(references.groups):
            for ref in group.data:
                holders[ref.layer, ref.chunk].append(_Holder(rank, number, ref))
    return holders


def _check_group(theirs: KVCacheGroupReference, ours: KVCacheGroupReference, layer: str) -> None:
    """Compare kinds and windows; an engine without window groups can serve any window."""
    if theirs.kind is AttentionKind.FULL and ours.window is not None:
        return
    for field in ("kind", "window"):
        their, our = getattr(theirs, field), getattr(ours, field)
        if their != our:
            raise Incompatible.in_field(f"layer {layer}: {field}", their, our)


def _cover(group: int, ref: KVCacheDataReference, found: list[_Holder], spread: int) -> list[Piece]:
    """Take every head of ``ref`` from one holder, in the longest runs that holders allow."""
    if not found:
        raise Incompatible.in_field(f"layer {ref.layer} chunk {ref.chunk}", "not held", "held")
    pieces: list[Piece] = []
    head, end = ref.first_head, ref.first_head + ref.num_heads
    while head < end:
        candidates = [
            holder
            for holder in found
            if holder.ref.first_head <= head < holder.ref.first_head + holder.ref.num_heads
        ]
        if not candidates:
            raise Incompatible.in_field(f"head {head} of layer {ref.layer}", "not held", "needed")
        holder = candidates[spread % len(candidates)]
        stop = min(end, holder.ref.first_head + holder.ref.num_heads)
        pieces.append(
            Piece(
                group,
                ref,
                holder.rank,
                holder.group,
                holder.ref,
                head - ref.first_head,
                head - holder.ref.first_head,
                stop - head,
            )
        )
        head = stop
    return pieces


I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a template; ``start``, ``stride``, ``step``: columns of shape (runs,), in bytes.

    The address of a run in block b, sub-block s is ``start + b * stride + s * step``.  Block ids
    are below ``num_blocks``.
    """

    start: I64
    stride: I64
    step: I64
    block_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The runs of one sub-block of one group from one rank of the peer.

    ``sub_block_tokens`` divides ``block_tokens`` of both sides.  ``nbytes`` are those of each run,
    ``sub_block_nbytes`` those of all.
    """

    our_group: int
    their_rank: int
    their_group: int
    sub_block_tokens: int
    their_device: Device
    ours: Side
    theirs: Side
    nbytes: I64
    sub_block_nbytes: int


def build_templates(
    ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], pieces: Sequence[Piece]
) -> list[Template]:
    """One template per group of ours, rank of theirs and group there.

    Raises:
        Incompatible: bytes per token or head differ, or an opaque block meets one
            of another size or kind; with the first difference of every group.
    """
    bundles: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        bundles[piece.our_group, piece.their_rank, piece.their_group].append(piece)
    made: list[Template] = []
    problems: list[Difference] = []
    for key, bundle in bundles.items():
        try:
            made.append(_template(ours, theirs[key[1]], key, bundle))
        except Incompatible as error:
            problems += error.differences
    if problems:
        raise Incompatible(*dict.fromkeys(problems))
    return made


def _template(
    ours: KVCacheReferences,
    theirs: KVCacheReferences,
    key: tuple[int, int, int],
    pieces: list[Piece],
) -> Template:
    our_group, their_rank, their_group = key
    our_tokens = ours.groups[our_group].block_tokens
    their_tokens = theirs.groups[their_group].block_tokens
    whole = ours.groups[our_group].kind is AttentionKind.STATE
    sizes = _Sizes(gcd(our_tokens, their_tokens), our_tokens, their_tokens, whole)
    columns = [_runs(ours, theirs, piece, sizes) for piece in pieces]
    table = _merged(np.concatenate(columns, axis=1))
    return Template(
        our_group,
        their_rank,
        their_group,
        sizes.sub,
        theirs.tensors[pieces[0].theirs.tensor].device,
        Side(table[0], table[1], table[2], our_tokens, ours.num_blocks(our_group)),
        Side(table[3], table[4], table[5], their_tokens, theirs.num_blocks(their_group)),
        table[6],
        int(table[6].sum()),
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Tokens of the sub-block and of both sides' blocks; ``whole``: a state, which has none."""

    sub: int
    ours: int
    theirs: int
    whole: bool


def _runs(ours: KVCacheReferences, theirs: KVCacheReferences, piece: Piece, sizes: _Sizes) -> I64:
    """Rows: our start, stride, step, their start, stride, step, bytes; a column a run."""
    rows, runs, run_nbytes = _rows(piece, sizes)
    heads = np.arange(piece.num_heads, dtype=np.int64)[:, None]
    tokens = np.arange(runs, dtype=np.int64)[None, :]
    table = np.empty((7, piece.num_heads * runs), dtype=np.int64)
    for first, references, ref, head in (
        (0, ours, piece.ours, piece.our_head),
        (3, theirs, piece.theirs, piece.their_head),
    ):
        tensor = references.tensors[ref.tensor]
        start = tensor.base + ref.offset + (head + heads) * ref.head_stride
        table[first] = (start + tokens * (ref.token_stride or 0)).ravel()
        table[first + 1] = tensor.block_stride
        table[first + 2] = rows * (ref.token_stride or 0)
    table[6] = run_nbytes
    return table


def _rows(piece: Piece, sizes: _Sizes) -> tuple[int, int, int]:
    """Stored rows of one head of one sub-block, how many runs they are, and each one's bytes.

    What is opaque in tokens has no rows, and moves as one run.
    """
    ours, theirs = piece.ours, piece.theirs
    where = f"layer {ours.layer}"
    if ours.token_nbytes is None or theirs.token_nbytes is None:
        if ours.token_nbytes is not None or theirs.token_nbytes is not None:
            raise Incompatible.in_field(f"{where}: blocks opaque in tokens", *_opaque(theirs, ours))
        if sizes.ours != sizes.theirs and not sizes.whole:
            raise Incompatible.in_field(
                f"{where}: block_tokens of blocks that only move whole", sizes.theirs, sizes.ours
            )
        if ours.head_nbytes != theirs.head_nbytes:
            raise Incompatible.in_field(
                f"{where}: bytes per head", theirs.head_nbytes, ours.head_nbytes
            )
        return 0, 1, ours.head_nbytes
    if ours.token_nbytes != theirs.token_nbytes:
        raise Incompatible.in_field(
            f"{where}: bytes per token and head", theirs.token_nbytes, ours.token_nbytes
        )
    stored, their_stored = ours.num_rows or 0, theirs.num_rows or 0
    if sizes.ours * their_stored != sizes.theirs * stored:
        raise Incompatible.in_field(
            f"{where}: tokens per stored row", sizes.theirs / their_stored, sizes.ours / stored
        )
    # Rows divide both blocks, hence their common divisor too.
    rows = sizes.sub * stored // sizes.ours
    dense = ours.token_stride == theirs.token_stride == ours.token_nbytes
    if dense:
        return rows, 1, rows * ours.token_nbytes
    return rows, rows, ours.token_nbytes


def _opaque(theirs: KVCacheDataReference, ours: KVCacheDataReference) -> tuple[str, str]:
    return (
        "opaque" if theirs.token_nbytes is None else "by token",
        "opaque" if ours.token_nbytes is None else "by token",
    )


def _merged(table: I64) -> I64:
    """Join runs that continue each other on both sides, in the order of our addresses."""
    table = table[:, np.argsort(table[0], kind="stable")]
    steps = table[[1, 2, 4, 5]]
    alike = (steps[:, :-1] == steps[:, 1:]).all(axis=0)
    runs = merge_runs(table[6], table[0], table[3], alike=alike)
    if runs is None:
        return table
    first, nbytes = runs
    merged = table[:, first]
    merged[6] = nbytes
    return merged
