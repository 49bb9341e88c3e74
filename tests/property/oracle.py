"""A naive oracle for plans: it walks memory byte by byte and knows no template.

Memory is an array of *labels*, one number per byte.  A side is walked in its
layout's order, so that every byte gets the label of what it must hold: layer, head
of the model, absolute token, byte.  A plan is then carried out on the arrays, and
each byte of ours is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pdconn.planning.plan import Need, Plan
from pdconn.protocol.ticket import BlockList
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.layouts import layout_memory, layout_nbytes, walked_bytes

UNTOUCHED = -1


@dataclass(frozen=True)
class Group:
    """A KV cache group of the model."""

    layers: tuple[str, ...]
    window: int | None


@dataclass(frozen=True)
class Model:
    """What both engines serve."""

    groups: tuple[Group, ...]
    num_heads: int
    token_nbytes: int

    @property
    def row_layers(self) -> int:
        return max(len(group.layers) for group in self.groups)


@dataclass
class Side:
    """One engine: its ranks' memory as labels, and one request's block tables."""

    model: Model
    layout: str
    block_tokens: int
    tp: int
    num_blocks: int
    tables: tuple[BlockList, ...]
    base: int
    ranks: list[KVCacheReferences] = field(default_factory=list)
    heads: list[range] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(self.tp):
            first, count = head_range(self.model.num_heads, self.tp, rank)
            self.heads.append(range(first, first + count))
            self.ranks.append(self._references(rank))

    def base_of(self, rank: int) -> int:
        return self.base + rank * (1 << 24)

    def nbytes(self) -> int:
        return layout_nbytes(
            num_blocks=self.num_blocks, row_layers=self.model.row_layers, **self._page(0)
        )

    def _page(self, rank: int) -> dict[str, int]:
        return {
            "num_heads": len(self.heads[rank]),
            "block_tokens": self.block_tokens,
            "token_nbytes": self.model.token_nbytes,
        }

    def _references(self, rank: int) -> KVCacheReferences:
        made = []
        for group in self.model.groups:
            kind = AttentionKind.SLIDING_WINDOW if group.window else AttentionKind.FULL
            layers = layout_memory(
                self.layout,
                base=self.base_of(rank),
                num_blocks=self.num_blocks,
                layers=group.layers,
                row_layers=self.model.row_layers,
                first_head=self.heads[rank].start,
                **self._page(rank),
            )
            made.append(GroupMemory(kind, group.window, self.block_tokens, layers))
        return build_kv_cache_references(made)

    def labels(self, rank: int) -> dict[int, int]:
        """Label by address, of every byte that the request's tokens lie in."""
        found = {}
        for group, table in zip(self.model.groups, self.tables, strict=True):
            position = {block: table.first + i for i, block in enumerate(table.ids) if block}
            walked = walked_bytes(
                self.layout,
                base=self.base_of(rank),
                num_blocks=self.num_blocks,
                layers=group.layers,
                row_layers=self.model.row_layers,
                **self._page(rank),
            )
            for address, (layer, _, block, head, token, byte) in walked.items():
                if block in position:
                    absolute = position[block] * self.block_tokens + token
                    found[address] = _label(layer, self.heads[rank][head], absolute, byte)
        return found


def head_range(num_heads: int, tp: int, rank: int) -> tuple[int, int]:
    """First head and number of heads of a rank, replicated when tp exceeds the heads."""
    if num_heads >= tp:
        return rank * num_heads // tp, num_heads // tp
    return num_heads * rank // tp, 1


def _label(layer: str, head: int, token: int, byte: int) -> int:
    return (int(layer[1:]) << 24) | (head << 18) | (token << 6) | byte


def check(plan: Plan, ours: Side, rank: int, theirs: Side, need: Need) -> None:
    """Carry ``plan`` out on labels and look at every byte of our rank's memory.

    Raises:
        AssertionError: a byte that is missing, wrong, written twice or touched.
    """
    start, size = ours.base_of(rank), ours.nbytes()
    got = np.full(size, UNTOUCHED, dtype=np.int64)
    times = np.zeros(size, dtype=np.int64)
    for their_rank, spans in plan.reads:
        source = theirs.labels(their_rank)
        for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
            for byte in range(int(nbytes)):
                at = int(local) + byte - start
                assert 0 <= at < size, "a byte outside our memory was written"
                got[at] = source.get(int(remote) + byte, -2)
                times[at] += 1
    assert times.max(initial=0) <= 1, "a byte was written twice"
    expected = _expected(ours, theirs, rank, need)
    for at in range(size):
        assert got[at] == expected.get(start + at, UNTOUCHED), f"byte {at} is wrong"


def _expected(ours: Side, theirs: Side, rank: int, need: Need) -> dict[int, int]:
    """Labels that we must end up with.

    Tokens that we hold already, and tokens before a group's window, are not moved;
    both bounds, and ``until``, are rounded outwards to what both sides can address.
    """
    step = int(np.gcd(ours.block_tokens, theirs.block_tokens))
    last = -(-need.until // step) * step
    first = {}
    for group in ours.model.groups:
        reach = max(0, need.until - group.window + 1) if group.window else 0
        start = max(need.held, reach) // step * step
        first.update({int(layer[1:]): start for layer in group.layers})
    return {
        address: label
        for address, label in ours.labels(rank).items()
        if first[label >> 24] <= (label >> 6) % 4096 < last
    }
