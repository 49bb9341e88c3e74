"""A plan: every run of one pull, from templates and two block lists.

Blocks are paired by absolute token position, never by list index::

    token        0        64       128      192
    ours   B=64  [  id 5  ][  id 9  ][  id 2  ]     first 0
    theirs B=32  [hole][ 3][ 4][ 8][ 1][ 7]         first 0

Blocks before the window, and blocks that we hold already, never move; a hole (id 0) of
either side in the rest fails the plan, because a byte would be missing.

*Gaps* are what a plan leaves of the blocks that it fills, to be zeroed.  vLLM zeroes new blocks
where stale bytes could be read: beside states, and in caches of several precisions.  It leaves out
the groups that a connector says it loads, whose blocks must then be written whole.  A transfer
moves sub-blocks, and ends with the one that holds the last token::

    our block of 64 tokens       |             4             |             5             |
    their blocks of 16           |  .   | 0    | 1    | 2    | 3    | 4    |             |
    pulled, window 60, up to 100          ############################
    gaps                          ^^^^^^                              ^^^^^^^^^^^^^^^^^^^^

A backend that splits the engine's blocks leaves the same gaps where only some of the parts are
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np

from pdconn.planning.plan_runs import (
    FEW_RUNS,
    AlikeTemplates,
    Located,
    Pairs,
    alike,
    few_spans,
    many_spans,
)
from pdconn.planning.planning_errors import (
    BlockOutOfRange,
    Incompatible,
    PlanningError,
    TooManyRuns,
)
from pdconn.planning.template import I64, Template, build_templates, match_pieces
from pdconn.protocol.ticket import BlockList
from registration.references import AttentionKind, KVCacheGroupReference, KVCacheReferences
from transport import HOST, Device, Spans
from transport.types import U64, merge_runs

Part = TypeVar("Part")
"""Runs as a way to lay them out has them."""

MAX_RUNS = 1 << 22
"""Runs of one pull; planning takes about 80 bytes per run."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one request of ours needs: for each group of ours tokens, and blocks to put them in.

    Attributes:
        tokens: of each group the tokens to pull.  Those before are in our cache already.  A window
            reaches back from the end, a state is the one after it; of an empty range nothing is
            pulled.
        blocks: of each group.
    """

    tokens: tuple[range, ...]
    blocks: tuple[BlockList, ...]

    def __post_init__(self) -> None:
        for tokens in self.tokens:
            if not 0 <= tokens.start <= tokens.stop or tokens.step != 1:
                raise ValueError(f"expected 0 <= start <= stop, got {tokens}")

    @classmethod
    def for_range(cls, held: int, until: int, blocks: tuple[BlockList, ...]) -> Need:
        """Tokens ``[held, until)`` of every group."""
        return cls((range(held, until),) * len(blocks), blocks)


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of a plan, and bytes that it did not have to move.

    ``full``, ``window`` and ``state`` are pulled bytes by attention kind.  ``saved_by_window``
    are bytes of blocks that no window reaches any more, ``saved_by_hits`` bytes of
    blocks that the receiver holds already.
    """

    full: int = 0
    window: int = 0
    saved_by_window: int = 0
    saved_by_hits: int = 0
    state: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes pulled."""
        return self.full + self.window + self.state

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.full + other.full,
            self.window + other.window,
            self.saved_by_window + other.saved_by_window,
            self.saved_by_hits + other.saved_by_hits,
            self.state + other.state,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read.

    Attributes:
        reads: spans per rank of the peer, of ranks with something to read.
        begins: windowed groups of ours that are read, each with the first token from which on all
            of its layers are.
    """

    reads: tuple[tuple[int, Spans], ...]
    moved: Moved
    num_runs: int
    begins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Byte runs of our memory: addresses and sizes, uint64 of shape (n,), ascending."""

    local: U64
    nbytes: U64
    device: Device

    def __len__(self) -> int:
        return len(self.local)

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())


_NONE = np.empty(0, dtype=np.uint64)
NO_GAPS = Gaps(_NONE, _NONE, HOST)


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """Everything about a peer that plans derive from; made once, at the greeting.

    ``ranks`` are those of the peer that we read from; ``lent_num_blocks`` the blocks
    that each of the peer's groups has, in its own order.
    """

    ours: KVCacheReferences
    templates: tuple[Template, ...]
    lent_num_blocks: tuple[int, ...]
    ranks: tuple[int, ...]
    _alike: tuple[AlikeTemplates, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_alike", alike(self.templates))

    @classmethod
    def between(
        cls, ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], spread: int = 0
    ) -> Pairing:
        """Match our rank's memory with all ranks of a peer.

        Raises:
            Incompatible: naming the field and both values.
        """
        lent_num_blocks = _num_blocks(theirs)
        pieces = match_pieces(ours, theirs, spread)
        templates = tuple(build_templates(ours, theirs, pieces))
        ranks = tuple(sorted({template.their_rank for template in templates}))
        return cls(ours, templates, lent_num_blocks, ranks)

    def plan(self, need: Need, lent: Sequence[BlockList]) -> Plan:
        """The reads for one request.

        Args:
            need: our blocks and the tokens wanted.
            lent: the lender's blocks, one list per group of theirs.

        Raises:
            PlanningError: the number of block lists is not the number of groups.
            MissingBlock: a block that we need is not lent.
            BlockOutOfRange: an id beyond either cache.
            TooManyRuns: too scattered for the memory of a plan.
        """
        for whose, lists, groups in (
            ("our", need.blocks, len(self.ours.groups)),
            ("lent", lent, len(self.lent_num_blocks)),
        ):
            if len(lists) != groups:
                raise PlanningError(
                    f"{whose} block lists: expected {groups}, one per group, got {len(lists)}"
                )
        moved, runs = _Tally(), 0
        found: dict[int, Pairs] = {}
        begins: dict[int, int] = {}
        for number, template in enumerate(self.templates):
            group = self.ours.groups[template.our_group]
            pairs = _pairs(template, need, lent[template.their_group], group)
            count = len(pairs)
            moved.add_pairs(template.sub_block_nbytes, count, pairs, group)
            runs += count * len(template.nbytes)
            if runs > MAX_RUNS:
                raise TooManyRuns(f"runs of one pull: expected at most {MAX_RUNS}, got {runs}")
            if count:
                found[number] = pairs
                # Layers that the peer has in larger blocks may begin before.
                if group.window is not None:
                    first = (pairs.holes + pairs.hits) * template.sub_block_tokens
                    begins[template.our_group] = max(first, begins.get(template.our_group, 0))
        if runs <= FEW_RUNS:
            reads = self._reads(lambda some: some.few(found), few_spans)
        else:
            reads = self._reads(lambda some: some.columns(found), many_spans)
        num_runs = sum(len(spans) for _, spans in reads)
        return Plan(reads, moved.moved(), num_runs, tuple(sorted(begins.items())))

    def gaps(self, need: Need) -> Gaps:
        """What the reads for ``need`` leave of the blocks that lack its tokens.

        A block of a state moves whole.  Bytes of a block row that belong to no layer of the group,
        such as padding, are in no gap.

        Raises:
            BlockOutOfRange: an id beyond our cache.
        """
        return self._gaps(need, sub_blocks)

    def whole_blocks(self, need: Need) -> Gaps:
        """As :meth:`gaps`, where nothing is read."""
        return self._gaps(need, lambda group, lacking, tokens: range(0))

    def _gaps(
        self, need: Need, pulled: Callable[[KVCacheGroupReference, range, int], range]
    ) -> Gaps:
        found = []
        for template in self.templates:
            group, lacking = self.ours.groups[template.our_group], need.tokens[template.our_group]
            if group.kind is AttentionKind.STATE or not lacking:
                continue
            read = pulled(group, lacking, template.sub_block_tokens)
            blocks = need.blocks[template.our_group]
            if (left := _sub_block_gaps(template, blocks, lacking, read)) is not None:
                found.append((template, *left))
        return _gaps_at(found, self.ours.tensors[0].device)

    def _reads(
        self,
        lay_out: Callable[[AlikeTemplates], Part | None],
        join: Callable[[list[Part], Device, Device], Spans],
    ) -> tuple[tuple[int, Spans], ...]:
        """The spans of each rank of the peer, in order of the ranks."""
        parts: dict[tuple[int, Device], list[Part]] = {}
        for some in self._alike:
            if (part := lay_out(some)) is not None:
                template = some.template
                parts.setdefault((template.their_rank, template.their_device), []).append(part)
        ours = self.ours.tensors[0].device
        return tuple((rank, join(of, ours, theirs)) for (rank, theirs), of in parts.items())


@dataclass(slots=True)
class _Tally:
    """Adds up what :class:`Moved` says."""

    full: int = 0
    window: int = 0
    saved_by_window: int = 0
    saved_by_hits: int = 0
    state: int = 0

    def add_pairs(self, each: int, count: int, pairs: Pairs, group: KVCacheGroupReference) -> None:
        """``count`` sub-blocks of ``each`` bytes are pulled of ``group``."""
        if group.kind is AttentionKind.STATE:
            self.state += count * each
            return
        if group.window is None:
            self.full += count * each
        else:
            self.window += count * each
            self.saved_by_window += pairs.holes * each
        self.saved_by_hits += pairs.hits * each

    def moved(self) -> Moved:
        """The sum."""
        return Moved(self.full, self.window, self.saved_by_window, self.saved_by_hits, self.state)


def window_start(group: KVCacheGroupReference, until: int) -> int:
    """The first token that position ``until`` attends to in this group.

    A sliding window of W ends at the token itself; a chunk starts at a multiple of
    its size.
    """
    if group.window is None:
        return 0
    if group.kind is AttentionKind.CHUNKED_LOCAL:
        return until // group.window * group.window
    return max(0, until - group.window + 1)


def _num_blocks(theirs: Sequence[KVCacheReferences]) -> tuple[int, ...]:
    """Blocks of each group of a peer; a pipeline stage may hold no layer of some group.

    Raises:
        Incompatible: its ranks do not agree on the number of groups.
    """
    first, *others = (len(references.groups) for references in theirs)
    for count in others:
        if count != first:
            raise Incompatible.in_field(
                "KV cache groups of the ranks", f"{first} and {count}", "as many on each"
            )
    return tuple(
        min((rank.num_blocks(group) for rank in theirs if rank.groups[group].data), default=0)
        for group in range(first)
    )


def sub_blocks(group: KVCacheGroupReference, lacking: range, tokens: int) -> range:
    """The sub-blocks of ``tokens`` tokens each that a later token will read and that we lack."""
    end = -(-lacking.stop // tokens)
    if not lacking:
        return range(end, end)
    return range(max(window_start(group, lacking.stop), lacking.start) // tokens, end)


def _pairs(template: Template, need: Need, lent: BlockList, group: KVCacheGroupReference) -> Pairs:
    """Pair the sub-blocks that a later token will read and that we lack."""
    if group.kind is AttentionKind.STATE:
        return _state_pair(template, need, lent)
    # With unequal block sizes a block of ours can begin before the window.  Its sub-blocks there
    # are not pulled: the lender may have dropped them.  They are gaps, and no other request may use
    # that block, whose rest begins at Plan.begins.
    tokens, lacking = template.sub_block_tokens, need.tokens[template.our_group]
    reach = window_start(group, lacking.stop) // tokens
    pulled = sub_blocks(group, lacking, tokens)
    ours, theirs = need.blocks[template.our_group], lent
    return Pairs(
        Located(pulled, template.ours.block_tokens // tokens, ours),
        Located(pulled, template.theirs.block_tokens // tokens, theirs),
        pulled.start * tokens,
        holes=reach,
        hits=pulled.start - reach,
    )


def _state_pair(template: Template, need: Need, lent: BlockList) -> Pairs:
    """The one block of each side that holds the state after the last token.

    A state has no tokens, so the block sizes of the two sides need not agree.
    """
    last = need.tokens[template.our_group][-1:]

    def at(block_tokens: int) -> range:
        return range(last.start // block_tokens, last.start // block_tokens + len(last))

    return Pairs(
        Located(at(template.ours.block_tokens), 1, need.blocks[template.our_group]),
        Located(at(template.theirs.block_tokens), 1, lent),
        last.start,
        holes=0,
        hits=0,
    )


def _sub_block_gaps(
    template: Template, blocks: BlockList, lacking: range, pulled: range
) -> tuple[I64, I64] | None:
    """Blocks of ours, and the sub-blocks in them, that are listed and not pulled.

    Args:
        template: of the group and a rank of theirs.
        blocks: the group's.
        lacking: tokens that we do not hold; there is one at least.
        pulled: sub-blocks that are moved.

    Raises:
        BlockOutOfRange: an id beyond our cache.
    """
    per_block = template.ours.block_tokens // template.sub_block_tokens
    # Blocks before the first lacking token are held, and may be other requests' as well.
    first = max(blocks.first * per_block, -(-lacking.start // template.sub_block_tokens))
    end = (blocks.first + len(blocks.ids)) * per_block
    before, behind = range(first, min(pulled.start, end)), range(max(first, pulled.stop), end)
    if not (before or behind):  # the usual case
        return None
    numbers = np.fromiter(chain(before, behind), np.int64, len(before) + len(behind))
    ids = blocks.array[numbers // per_block - blocks.first]
    listed = ids != 0
    ids, numbers = ids[listed], numbers[listed]
    if not len(ids):
        return None
    highest = int(ids.max())
    if highest >= template.ours.num_blocks:
        where = f"group {template.our_group}: block id, ours"
        raise BlockOutOfRange(f"{where} {highest} of {template.ours.num_blocks} blocks")
    return ids, numbers % per_block


def _gaps_at(found: Sequence[tuple[Template, I64, I64]], device: Device) -> Gaps:
    """The runs of sub-blocks: templates, and ids and sub-blocks of each."""
    if not found:
        return NO_GAPS
    starts, sizes = [], []
    for template, ids, subs in found:
        side = template.ours
        table = ids[:, None] * side.stride + subs[:, None] * side.step + side.start
        starts.append(table.ravel())
        sizes.append(np.broadcast_to(template.nbytes, table.shape).ravel())
    local, nbytes = np.concatenate(starts), np.concatenate(sizes)
    order = np.argsort(local)
    local, nbytes = local[order], nbytes[order]
    if (merged := merge_runs(nbytes, local)) is not None:
        kept, nbytes = merged
        local = local[kept]
    return Gaps(local.astype(np.uint64), nbytes.astype(np.uint64), device)
