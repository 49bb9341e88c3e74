"""A naive oracle for plans: it walks memory cell by cell and knows no template.

Memory is an array of *labels*, one number per byte.  A rank's memory is walked in its
layout's order, so that every byte gets the label of what it must hold: layer, head of
the model, absolute position, byte.  A plan is then carried out on the arrays, and each
byte of ours is looked at.

*Position* is the stored row for what divides by token, the block for what is opaque,
and 0 for a state, of which a request has one; with ``keeps_states`` the tokens that it has seen.

Memory of blocks that a backend splits is walked as the backend sees it, kernel block by
kernel block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdconn.planning.plan import Need, Plan
from pdconn.protocol.ticket import BlockList
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    StateChunk,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory, layout_nbytes

UNTOUCHED = -1
NOWHERE = -2
_GROUP_BYTES = 1 << 24
_RANK_BYTES = 1 << 32


@dataclass(frozen=True)
class Layers:
    """Layers of the model that keep the same kind of KV.

    ``ratio`` tokens share one stored row of ``row_nbytes`` bytes per head.  ``opaque``:
    a head's block only moves whole.  One head stands for MLA.  A state's heads are its parts,
    which lie one behind the other; it is of two pieces where ``tail_nbytes`` of each part lie
    behind all parts of the first.
    ``compress_ratio`` above 1: a compressor reads the window, where that divides the next token.
    """

    numbers: tuple[int, ...]
    kind: AttentionKind
    window: int | None
    heads: int
    row_nbytes: int
    ratio: int = 1
    opaque: bool = False
    compress_ratio: int = 1
    tail_nbytes: int = 0

    @property
    def is_state(self) -> bool:
        return self.kind is AttentionKind.STATE

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes of a part in each piece of a state."""
        sizes = (self.row_nbytes - self.tail_nbytes, self.tail_nbytes)
        return tuple(size for size in sizes if size)

    def reach(self, until: int) -> int:
        """The first token that token ``until`` still sees."""
        if self.kind is AttentionKind.SLIDING_WINDOW:
            assert self.window is not None
            return max(0, until - (self.window - 1))
        if self.kind is AttentionKind.CHUNKED_LOCAL:
            assert self.window is not None
            return until - until % self.window
        return 0


@dataclass(frozen=True)
class Group:
    """One KV cache group of one side: some layers of one sort, and their block size.

    ``whole``: this side keeps no window and treats the layers as full attention.  ``split``:
    the backend splits a block into so many kernel blocks, and a block is described as unsplit.
    ``parts``: blocks are kernel blocks, of which so many are a block of the engine.
    """

    sort: Layers
    numbers: tuple[int, ...]
    block_tokens: int
    whole: bool = False
    split: int = 1
    parts: int = 1

    @property
    def kind(self) -> tuple[AttentionKind, int | None]:
        """As this side describes it."""
        return (AttentionKind.FULL, None) if self.whole else (self.sort.kind, self.sort.window)

    def skipped(self, until: int) -> int:
        """Blocks at the start that token ``until`` does not see."""
        return 0 if self.whole else self.sort.reach(until) // self.block_tokens

    @property
    def rows(self) -> int:
        """Stored rows of one block and head; a state is one."""
        return 1 if self.sort.is_state else self.block_tokens // self.sort.ratio


@dataclass
class Side:
    """One engine: its ranks' memory, and one request's block tables.

    ``num_blocks`` and ``engine_tables`` are the engine's; ``tables`` list what is described.
    ``stages`` are the layer numbers of each pipeline stage; ``padding`` bytes follow each
    page; ``tokens`` are computed, and a state is that after them; with ``overlay`` all groups
    lie in one allocation from byte 0 on, as vLLM's do; with ``keeps_states`` each block of a state
    group holds the state after its last token.  Rank ``r`` is stage ``r // tp``,
    tensor-parallel rank ``r % tp``.
    """

    groups: tuple[Group, ...]
    layout: str
    tp: int
    stages: tuple[tuple[int, ...], ...]
    num_blocks: int
    tables: tuple[BlockList, ...]
    base: int
    tokens: int
    padding: int = 0
    overlay: bool = False
    keeps_states: bool = False
    ranks: list[KVCacheReferences] = field(default_factory=list)

    engine_tables: tuple[BlockList, ...] = ()

    def __post_init__(self) -> None:
        self.engine_tables = self.tables
        self.tables = tuple(  # none, where only the memory is of interest
            _parts_of(table, group.parts)
            for table, group in zip(self.tables, self.groups, strict=False)
        )
        for rank in range(self.tp * len(self.stages)):
            self.ranks.append(self._references(rank))

    def start(self, rank: int) -> int:
        """First address of a rank's memory."""
        return self.base + rank * _RANK_BYTES

    def labels(self, rank: int, with_table: bool = True) -> dict[int, NDArray[np.int64]]:
        """Labels of every allocation of a rank, by its first address; NOWHERE elsewhere."""
        found: dict[int, NDArray[np.int64]] = {}
        for number, group in enumerate(self.groups):
            if not self._here(rank, group):
                continue
            base = self._group_base(rank, number)
            nbytes = layout_nbytes(**self._page(rank, group))
            memory = found.setdefault(base, np.full(nbytes, NOWHERE, dtype=np.int64))
            if with_table:
                for at, label in self._walk(rank, number):
                    memory[at : at + len(label)] = label
        return found

    def _walk(self, rank: int, number: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Offset and labels of every stored row of the request, walking through memory."""
        group, table = self.groups[number], self.engine_tables[number]
        if group.sort.is_state:
            yield from self._walk_states(rank, group, table)
            return
        sort, here, heads = group.sort, self._here(rank, group), self._heads(rank, group.sort)
        position = {block: table.first + i for i, block in enumerate(table.ids) if block}
        page, kernel = self._page(rank, group), group.parts * group.split
        rows = group.rows // group.split
        sizes = {"L": len(here), "B": self.num_blocks * kernel, "H": len(heads), "N": rows}
        cell = group.sort.row_nbytes
        byte = np.arange(cell, dtype=np.int64)
        free, cursor = self._free(page, len(here), kernel // group.parts), 0
        for indices in product(*(range(sizes[letter]) for letter in self.layout[:-1])):
            at = dict(zip(self.layout, indices, strict=False))
            block, part = divmod(at["B"], kernel)
            cursor += free if at["B"] and not any(indices[1:]) else 0
            if block in position:
                nth = position[block] * kernel + part
                where, offset = (nth, at["N"] * cell) if sort.opaque else (nth * rows + at["N"], 0)
                yield cursor, _label(here[at["L"]], heads[at["H"]], where, offset) + byte
            cursor += cell
            if at["H"] == len(heads) - 1 and at["N"] == rows - 1:
                cursor += self.padding

    def _walk_states(
        self, rank: int, group: Group, table: BlockList
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Offset and labels of every part of the request's state."""
        here, heads = self._here(rank, group), self._heads(rank, group.sort)
        positions = self._states(group, table)
        page = self._page(rank, group)
        cursor = 0
        sizes, free = {"L": len(here), "B": self.num_blocks}, self._free(page, len(here))
        for indices in product(*(range(sizes[letter]) for letter in self.layout if letter in "LB")):
            at = dict(zip((c for c in self.layout if c in "LB"), indices, strict=True))
            cursor += free if at["B"] and not at["L"] else 0
            for piece, nbytes in enumerate(group.sort.pieces):
                for head in heads:
                    if at["B"] in positions:
                        first = _label(here[at["L"]], head, positions[at["B"]], piece << 10)
                        yield cursor, first + np.arange(nbytes, dtype=np.int64)
                    cursor += nbytes
            cursor += self.padding

    def _free(self, page: dict[str, int], num_layers: int, split: int = 1) -> int:
        """Bytes at a block's end that only a group of more layers uses; blocks outermost."""
        one = layout_nbytes(**{**page, "num_blocks": 1, "row_layers": 1}) // split
        return (page["row_layers"] - num_layers) * one if self.layout[0] == "B" else 0

    def _states(self, group: Group, table: BlockList) -> dict[int, int]:
        """Blocks that hold a state, and the position of its labels."""
        if not self.keeps_states:
            last = table.first + len(table.ids) - 1
            return dict.fromkeys(table.ids[-1:], last - (self.tokens - 1) // group.block_tokens)
        numbered = enumerate(table.ids, table.first + 1)
        return {block: number * group.block_tokens for number, block in numbered if block}

    def _here(self, rank: int, group: Group) -> tuple[int, ...]:
        stage = self.stages[rank // self.tp]
        return tuple(number for number in group.numbers if number in stage)

    def _heads(self, rank: int, sort: Layers) -> range:
        first, count = head_range(sort.heads, self.tp, rank % self.tp)
        return range(first, first + count)

    def _group_base(self, rank: int, number: int) -> int:
        return self.start(rank) + (0 if self.overlay else number * _GROUP_BYTES)

    def _page(self, rank: int, group: Group) -> dict[str, int]:
        wide = self.groups if self.overlay else (group,)
        heads, sort = len(self._heads(rank, group.sort)), group.sort
        return {
            "num_blocks": self.num_blocks * group.parts,
            "row_layers": max(len(self._here(rank, one)) for one in wide),
            "num_heads": 1 if sort.is_state else heads,
            "block_tokens": group.rows,
            "token_nbytes": sort.row_nbytes * (heads if sort.is_state else 1),
            "page_padding": self.padding,
        }

    def _references(self, rank: int) -> KVCacheReferences:
        made = []
        for number, group in enumerate(self.groups):
            here = self._here(rank, group)
            layers = layout_memory(
                self.layout,
                base=self._group_base(rank, number),
                layers=[str(number) for number in here],
                first_head=self._heads(rank, group.sort).start,
                opaque=group.sort.opaque,
                **self._page(rank, group),
            ) if here else ()  # fmt: skip
            ratio = 1 if group.whole else group.sort.compress_ratio
            if group.sort.is_state:
                chunks = _state_chunks(group.sort, self._heads(rank, group.sort))
                layers = tuple(replace(layer, chunks=chunks) for layer in layers)
            made.append(GroupMemory(*group.kind, group.block_tokens, layers, ratio))
        return build_kv_cache_references(made)


def _state_chunks(sort: Layers, heads: range) -> tuple[StateChunk, ...]:
    """The pieces of a state on one rank."""
    chunks, at = [], 0
    for nbytes in sort.pieces:
        chunks.append(StateChunk(nbytes * len(heads), at, len(heads), heads.start))
        at += nbytes * len(heads)
    return tuple(chunks)


def _parts_of(table: BlockList, parts: int) -> BlockList:
    """The parts of each block, which follow each other; those of a hole are holes."""
    ids = [block and block * parts + part for block in table.ids for part in range(parts)]
    return BlockList(table.first * parts, tuple(ids))


def head_range(num_heads: int, tp: int, rank: int) -> tuple[int, int]:
    """First head and number of heads of a rank, replicated when tp exceeds the heads."""
    if num_heads >= tp:
        return rank * num_heads // tp, num_heads // tp
    return num_heads * rank // tp, 1


def _label(layer: int, head: int, position: int, byte: int) -> int:
    return (layer << 48) | (head << 40) | (position << 20) | byte


def check(plan: Plan, ours: Side, rank: int, theirs: Side, need: Need) -> None:
    """Carry ``plan`` out on labels and look at every byte of our rank's memory.

    Raises:
        AssertionError: a byte that is missing, wrong, written twice or touched.
    """
    check_plans([(plan, theirs)], ours, rank, theirs, need)


def check_plans(
    plans: Iterable[tuple[Plan, Side]], ours: Side, rank: int, theirs: Side, need: Need
) -> None:
    """As :func:`check`, of plans that together are to read ``need`` from ``theirs``.

    Each comes with the lender as it is when the plan is carried out: what has no label there is not
    written yet.
    """
    got = {at: np.full_like(it, UNTOUCHED) for at, it in ours.labels(rank, False).items()}
    times = {at: np.zeros_like(it) for at, it in got.items()}
    begins: dict[int, int] = {}
    for plan, lender in plans:
        begins.update(plan.begins)
        for their_rank, spans in plan.reads:
            source = lender.labels(their_rank)
            for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
                base, into = _inside(got, int(local), int(nbytes))
                from_base, origin = _inside(source, int(remote), int(nbytes))
                got[base][into] = source[from_base][origin]
                times[base][into] += 1
    assert begins == _window_begins(ours, got)
    for base, wanted in expected(ours, theirs, rank, need).items():
        assert times[base].max(initial=0) <= 1, "a byte was written twice"
        wrong = np.flatnonzero(got[base] != wanted)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"


def _window_begins(ours: Side, got: dict[int, NDArray[np.int64]]) -> dict[int, int]:
    """The first token from which on all layers of a windowed group were written."""
    begins = {}
    written = np.concatenate([labels[labels != UNTOUCHED] for labels in got.values()])
    for number, group in enumerate(ours.groups):
        unit = group.block_tokens if group.sort.opaque else group.sort.ratio
        layers = [written[written >> 48 == layer] for layer in group.numbers]
        firsts = [int(((layer >> 20) & 0xFFFFF).min()) * unit for layer in layers if len(layer)]
        if group.kind[1] is not None and firsts:
            begins[number] = max(firsts)
    return begins


def _inside(memories: dict[int, NDArray[np.int64]], start: int, nbytes: int) -> tuple[int, slice]:
    for base, memory in memories.items():
        if base <= start < base + len(memory):
            assert start + nbytes <= base + len(memory), "a run leaves its allocation"
            return base, slice(start - base, start - base + nbytes)
    raise AssertionError("a run outside all memory")


def expected(ours: Side, theirs: Side, rank: int, need: Need) -> dict[int, NDArray[np.int64]]:
    """Labels that we must end up with.

    Tokens that a group holds already, and tokens before a window, are not moved; both bounds,
    and the end, are rounded outwards to what both sides can address.
    """
    wanted = {number: (first, end) for number, _, first, end in _wanted(ours, theirs, need)}
    return _where(
        ours,
        rank,
        lambda number, at: (at >= wanted[number][0]) & (at < wanted[number][1]),
        lambda labels, found: np.where(found, labels, UNTOUCHED),
    )


def expected_gaps(ours: Side, theirs: Side, rank: int, need: Need) -> dict[int, NDArray[np.bool_]]:
    """Bytes of listed blocks that we must zero: not held, and not moved; none of states."""
    kept = {
        number: (lowest, first, end)
        for number, lowest, first, end in _wanted(ours, theirs, need)
        if lowest is not None
    }

    def is_left(number: int, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        if number not in kept:
            return np.zeros(len(at), dtype=bool)
        lowest, first, end = kept[number]
        return (at >= lowest) & ((at < first) | (at >= end))

    return _where(ours, rank, is_left, lambda _, found: found)


def _wanted(ours: Side, theirs: Side, need: Need) -> Iterator[tuple[int, int | None, int, int]]:
    """Layers, the position from which on we hold nothing, and positions ``[first, end)`` to move.

    None for states, and where nothing lacks: nothing of such a layer's blocks is left out.
    """
    blocks = {n: group.block_tokens for group in theirs.groups for n in group.numbers}
    for group, tokens in zip(ours.groups, need.tokens, strict=True):
        sort, held, until = group.sort, tokens.start, tokens.stop
        for number in group.numbers:
            if sort.kind is AttentionKind.STATE:
                yield number, None, 0, int(until > held)
                continue
            step = int(np.gcd(group.block_tokens, blocks[number]))
            start = max(held, sort.reach(until)) // step * step
            end = -(-until // step) * step if until > held else start
            unit = group.block_tokens if sort.opaque else sort.ratio
            lowest = -(-held // step) * step // unit if until > held else None
            yield number, lowest, start // unit, end // unit


def _where(
    ours: Side,
    rank: int,
    choose: Callable[[int, NDArray[np.int64]], NDArray[np.bool_]],
    make: Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[Any]],
) -> dict[int, NDArray[Any]]:
    """By allocation, ``make`` of its labels and of where ``choose`` takes a layer's positions."""
    made = {}
    for base, labels in ours.labels(rank).items():
        position, layer = (labels >> 20) & 0xFFFFF, labels >> 48
        found = np.zeros(len(labels), dtype=bool)
        for number in {n for group in ours.groups for n in group.numbers}:
            found |= (layer == number) & choose(number, position)
        made[base] = make(labels, found & (labels != NOWHERE))
    return made
