"""Which units a pull covers wholly, and the place of their rows in our memory.

A pull moves tokens ``[first, stop)``, in sub-blocks of both sides.  A unit that it covers
in part is left out.  That happens only where a prefix hit or the last token lies inside a
unit, and no unit divides the sub-block::

    pulled                    [first ................ stop)
    units of the lender   |  10  |  11  |  12  |  13  |  14  |
    asked for                     [ 11 ......... 13 ]

Only written rows count: the unit of the lender's last token is covered if the pull has
all of its written rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from pdconn.integrity.sums import I64, Grain, Terms, Units, counted
from pdconn.planning.errors import MissingBlock
from pdconn.planning.plan import Need, sub_blocks
from pdconn.protocol.ticket import BlockList
from registration.references import AttentionKind, KVCacheDataReference, KVCacheGroupReference


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
    """The units to ask for, and those of them that count, in runs of equally many rows.

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
    grain = Grain.of(match.their_ref, match.their_block_tokens, terms.unit_tokens)
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
