"""One request between two engines, with memory content that both processes can compute.

The oracle of ``tests/property`` says what every byte of a rank's memory is: layer, head,
position, byte.  That label decides the byte's value, so the lender's process writes it and
the reader's knows what must arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList, trimmed
from registration.allocation import GroupPages, LayerPages, allocate_in, attention_in
from registration.references import AttentionKind, KVCacheReferences
from tests.gpu.bytes_on import BytesOn
from tests.property.oracle import NOWHERE, UNTOUCHED, Group, Layers, Side, expected, head_range
from transport import Memory

BLANK = 0xEE
ELSEWHERE = 0xDD
"""A lender's bytes outside the request; no label has this value, nor ``BLANK``."""

BLOCK_TOKENS = 16
TOKENS = 150
WINDOW = 40
NUM_BLOCKS = 40
FULL = Layers((0, 1, 2), AttentionKind.FULL, None, heads=4, row_nbytes=64)
SLIDING = Layers((3, 4), AttentionKind.SLIDING_WINDOW, WINDOW, heads=4, row_nbytes=64)
_THEIRS, _OURS = 1 << 40, 1 << 50
U8 = NDArray[np.uint8]


class Case(msgspec.Struct, frozen=True):
    """What both processes must agree on.

    ``held`` tokens are in our cache already; ``theirs`` and ``ours`` are layouts.
    """

    theirs: str
    ours: str
    their_tp: int
    our_tp: int
    held: int = 0

    def __str__(self) -> str:
        held = f", {self.held} held" if self.held else ""
        return f"{self.theirs} TP{self.their_tp} to {self.ours} TP{self.our_tp}{held}"


@dataclass(frozen=True)
class Request:
    """A case, spelled out: both sides as the oracle has them, at addresses that are made up."""

    theirs: Side
    ours: Side
    need: Need

    @classmethod
    @cache
    def of(cls, case: Case) -> Request:
        """The same for the same case, in any process."""
        theirs = _side(case.theirs, case.their_tp, _THEIRS, seed=1)
        ours = _side(case.ours, case.our_tp, _OURS, seed=2)
        return cls(theirs, ours, Need.for_range(case.held, TOKENS, ours.tables))

    def lent(self, rank: int) -> U8:
        """What a rank of the lender holds."""
        [labels] = self.theirs.labels(rank).values()
        return as_bytes(labels, NOWHERE, ELSEWHERE)

    def expected(self, rank: int) -> U8:
        """What a rank of ours, blank before, must hold afterwards: every byte of it."""
        [labels] = expected(self.ours, self.theirs, rank, self.need).values()
        return as_bytes(labels, UNTOUCHED, BLANK)

    def blank(self, rank: int) -> U8:
        """What a rank of ours holds before."""
        return np.full(self.expected(rank).size, BLANK, dtype=np.uint8)


def as_bytes(labels: NDArray[np.int64], none: int, instead: int) -> U8:
    """A byte below 200 for every label: SplitMix64, as of ``pdconn.tools.bench.transfer.arena``."""
    words = labels.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    return np.where(labels == none, instead, words % np.uint64(200)).astype(np.uint8)


def allocated(side: Side, rank: int, held: BytesOn) -> KVCacheReferences:
    """A rank's memory as an engine allocates it, in the bytes that ``held`` has.

    The oracle walks the same bytes by the layout's name, and knows nothing of this.
    """
    groups = []
    for group in side.groups:
        sort = group.sort
        first_head, heads = head_range(sort.heads, side.tp, rank)
        shape = (side.num_blocks, heads, group.block_tokens, sort.row_nbytes)
        content = attention_in(side.layout, shape, torch.int8, first_head=first_head)
        layers = tuple(
            LayerPages(str(number), content, content.page_nbytes) for number in group.numbers
        )
        groups.append(GroupPages(*group.kind, group.block_tokens, layers))
    made = allocate_in(side.layout, groups, side.num_blocks, overlay=True, empty=held.allocator())
    assert sum(one.memory.nbytes for one in made.allocations) == held.memory.nbytes
    return made.references


def placed(references: KVCacheReferences, memory: Memory) -> KVCacheReferences:
    """The same description of the one allocation at ``memory``, on its device."""
    [made_up] = references.memories()
    assert made_up.nbytes == memory.nbytes
    tensors = tuple(
        replace(tensor, base=memory.base, device=memory.device) for tensor in references.tensors
    )
    return replace(references, tensors=tensors)


def _side(layout: str, tp: int, base: int, seed: int) -> Side:
    groups = tuple(Group(sort, sort.numbers, BLOCK_TOKENS) for sort in (FULL, SLIDING))
    return Side(
        groups, layout, tp, ((*FULL.numbers, *SLIDING.numbers),), NUM_BLOCKS,
        _tables(groups, seed), base, TOKENS, overlay=True,
    )  # fmt: skip


def _tables(groups: Sequence[Group], seed: int) -> tuple[BlockList, ...]:
    """Scattered ids; of windows only those blocks that the next token still sees."""
    ids = iter(Random(seed).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1))
    num_blocks = -(-TOKENS // BLOCK_TOKENS)
    return tuple(
        trimmed([0 if i < group.skipped(TOKENS) else next(ids) for i in range(num_blocks)])
        for group in groups
    )
