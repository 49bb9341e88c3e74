"""Heads and layers: which rank of a peer serves each chunk of ours.

Layers are matched by name and chunk, so a pipeline-parallel peer is only one
whose ranks hold fewer layers each.  Heads carry their model-wide index, so tensor
parallelism of any size on either side is an overlap of ranges::

    ours   rank 1 of 2   heads      [4 5 6 7]
    theirs rank 2 of 4         [4 5]
           rank 3 of 4              [6 7]       two pieces

Replicated heads (tensor parallelism above the head count, MLA) are held by several
ranks: each head is taken from one of them, a different one for every rank of ours, so
that the load spreads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.planning.errors import Incompatible
from pdconn.protocol.compat import Difference
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
)


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
