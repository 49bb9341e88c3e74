"""The needs of sources that fill one request's blocks together.

A request's need is cut at tokens, group by group, so that no byte is two sources'::

    full attention   │ loaded by a store │ of which it has lost: left │ pulled: rest │
    window, state    │                                              pulled: rest    │
                   held                 └─ ends of rows ──────────────┘            until

Full attention is cut where rows of the store end, and so at whole blocks of ours: what one source
writes of a block, and what it zeroes, is that source's alone.  Windows and states are of use only
as they are at the end, and are of the source that ends there.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from registration.references import AttentionKind, KVCacheGroupReference

NOTHING = Need((), ())
"""What a source has filled that has filled nothing."""


def first_part(need: Need, groups: Sequence[KVCacheGroupReference], tokens: range) -> Need:
    """The part of ``need`` that a source of full attention of ``tokens`` can fill.

    Args:
        need: of a request.
        groups: its groups.
        tokens: that the source has; they end with a block of every group.

    Returns:
        The beginnings of groups of full attention that begin among ``tokens``; of other groups an
        empty range from 0.
    """
    found = tuple(
        range(wanted.start, min(tokens.stop, wanted.stop))
        if group.kind is AttentionKind.FULL and wanted.start in tokens and wanted
        else range(0)
        for group, wanted in zip(groups, need.tokens, strict=True)
    )
    return Need(found, need.blocks)


def rest_of(need: Need, first: Need) -> Need:
    """What is left of ``need`` behind ``first``, a part of it by :func:`first_part`."""
    tokens = tuple(
        range(done.stop, wanted.stop) if done else wanted
        for done, wanted in zip(first.tokens, need.tokens, strict=True)
    )
    return Need(tokens, need.blocks)


def until(part: Need, groups: Sequence[KVCacheGroupReference], end: int | None) -> Need:
    """What a source fills of ``part`` that has lost tokens from ``end`` on.

    Returns:
        Whole blocks before ``end``, and in the block lists none behind those; all for None.
    """
    tokens, blocks = [], []
    for group, wanted, listed in zip(groups, part.tokens, part.blocks, strict=True):
        size = group.block_tokens
        stop = wanted.stop if end is None else min(wanted.stop, end // size * size)
        filled = range(wanted.start, stop) if wanted.start < stop else range(0)
        count = max(0, -(-filled.stop // size) - listed.first)
        tokens.append(filled)
        blocks.append(BlockList(listed.first, listed.ids[:count]))
    return Need(tuple(tokens), tuple(blocks))


def left_of(part: Need, filled: Need) -> Need:
    """What a source has left of ``part``: it has ``filled`` the beginning of it, or nothing."""
    stops = [tokens.stop for tokens in filled.tokens] or [0] * len(part.tokens)
    tokens = tuple(
        range(max(wanted.start, stop), wanted.stop) if wanted else wanted
        for wanted, stop in zip(part.tokens, stops, strict=True)
    )
    return Need(tokens, part.blocks)


def with_left(left: Need, rest: Need) -> Need:
    """``left`` and ``rest``, which follow each other, as one need."""
    tokens = tuple(
        range(before.start, wanted.stop) if before else wanted
        for before, wanted in zip(left.tokens, rest.tokens, strict=True)
    )
    return Need(tokens, rest.blocks)
