"""Pairs of engines of any topology, and one request between them, drawn at random."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from pdconn.planning.plan import Need, Pairing, Plan
from pdconn.protocol.ticket import BlockList, trimmed
from registration.references import AttentionKind
from tests.fakes.layouts import LAYOUTS
from tests.property.oracle import Group, Layers, Side, check

_PACKED = tuple(layout for layout in LAYOUTS if layout.endswith("NC"))
_DEGREES = range(1, 17)
THEIRS, OURS = 1 << 40, 1 << 50


@dataclass
class Case:
    """One rank of ours pulls one request from all ranks of theirs."""

    ours: Side
    theirs: Side
    need: Need
    rank: int

    def pairing(self) -> Pairing:
        return Pairing.between(self.ours.ranks[self.rank], self.theirs.ranks, self.rank)

    def plan(self) -> Plan:
        return self.pairing().plan(self.need, self.theirs.tables)

    def check(self, plan: Plan) -> None:
        check(plan, self.ours, self.rank, self.theirs, self.need)


@st.composite
def cases(draw: st.DrawFn, splits: bool = False, grows: bool = False) -> Case:
    """Any model of up to three sorts of layers, any two engines that can serve it.

    ``splits``: theirs is one rank that splits whatever blocks it can, into parts of other bytes.
    ``grows``: some layers are of full attention, and most of the prompt is pulled.
    """
    sorts = draw(models(grows=grows))
    heads = [sort.heads for sort in sorts]
    most = 24 if max(heads) <= 8 else 10
    num_tokens = draw(st.integers(most // 2 if grows else 1, most))
    has_state = any(sort.kind is AttentionKind.STATE for sort in sorts)
    until = num_tokens if has_state else draw(st.integers(num_tokens // 2 * grows, num_tokens))
    blocks = [draw(block_sizes(sort)) for sort in sorts]
    theirs = draw(
        sides(sorts, [pair[0] for pair in blocks], (until, num_tokens), THEIRS, splits=splits)
    )
    ours = draw(sides(sorts, [pair[1] for pair in blocks], (until, until), OURS))
    rank = draw(st.integers(0, len(ours.ranks) - 1))
    hits = st.integers(0, until // 4 if grows else until)
    held = draw(st.lists(hits, min_size=1, max_size=len(ours.groups)))
    tokens = tuple(range(held[n % len(held)], until) for n in range(len(ours.groups)))
    return Case(ours, theirs, Need(tokens, ours.tables), rank)


@st.composite
def models(draw: st.DrawFn, grows: bool = False) -> tuple[Layers, ...]:
    """Sorts of layers; most models have one head count, others one for each sort.

    ``grows``: the first is of full attention.
    """
    heads = draw(st.one_of(st.sampled_from([1, 2, 4, 8]), st.integers(1, 64)))
    names = iter(range(16))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        numbers = tuple(next(names) for _ in range(draw(st.integers(1, 3))))
        others = [max(1, heads // 2), max(1, heads // 4), min(64, 2 * heads)]
        of = draw(st.sampled_from([heads, heads, *others]))
        made.append(draw(layers(numbers, of, is_full=grows and not made)))
    return tuple(made)


@st.composite
def layers(
    draw: st.DrawFn, numbers: tuple[int, ...], heads: int, *, is_full: bool = False
) -> Layers:
    """Attention of any window, MLA, compressed rows, packed blocks, or a state."""
    kinds = [*AttentionKind, AttentionKind.FULL, AttentionKind.SLIDING_WINDOW]
    kind = AttentionKind.FULL if is_full else draw(st.sampled_from(kinds))
    window = draw(st.integers(1, 12)) if kind.is_windowed else None
    if kind is AttentionKind.STATE:
        parts, nbytes = draw(st.sampled_from([1, heads])), draw(st.integers(1, 9))
        tail = draw(st.integers(0, nbytes - 1))
        return Layers(numbers, kind, None, parts, nbytes, opaque=True, tail_nbytes=tail)
    if draw(st.booleans()):
        return Layers(numbers, kind, window, heads, draw(st.integers(1, 3)), opaque=draw(_seldom))
    ratio = draw(st.sampled_from([1, 2, 4]))
    return Layers(numbers, kind, window, 1, draw(st.integers(1, 3)), ratio)


_seldom = st.sampled_from([False, False, True])


@st.composite
def block_sizes(draw: st.DrawFn, sort: Layers) -> tuple[int, int]:
    """Tokens per block of both sides."""
    size = st.sampled_from([1, 2, 3, 4, 6, 8]).map(lambda rows: rows * sort.ratio)
    first = draw(size)
    return first, first if sort.opaque and sort.kind is not AttentionKind.STATE else draw(size)


@st.composite
def sides(
    draw: st.DrawFn,
    sorts: Sequence[Layers],
    blocks: Sequence[int],
    span: tuple[int, int],
    base: int,
    *,
    splits: bool = False,
    keeps_states: bool = False,
) -> Side:
    """An engine that serves the model.

    ``span``: the token that decode computes next, and how many this engine has room for.
    The lender may keep whole prompts where the model has windows.  ``keeps_states``: the states
    are those at the ends of their blocks, of which an engine that computes the request keeps all.
    """
    until, tokens = span
    lends = base == THEIRS
    groups: list[Group] = []
    for sort, block in zip(sorts, blocks, strict=True):
        cut = draw(st.integers(0, len(sort.numbers) - 1))
        parts = [part for part in (sort.numbers[:cut], sort.numbers[cut:]) if part]
        whole = sort.kind.is_windowed and lends and draw(_seldom)
        groups += [Group(sort, part, block, whole) for part in parts]
    groups = list(draw(st.permutations(groups)))
    heads = [sort.heads for sort in sorts if sort.heads > 1] or [1]
    degrees = [t for t in _DEGREES if all(_divide(t, h) for h in heads)]
    tp = 1 if splits else draw(st.sampled_from(degrees))
    packed = any(sort.opaque and not sort.is_state and sort.heads > tp for sort in sorts)
    layout = draw(st.sampled_from(_PACKED if packed else LAYOUTS)) if not splits else "LBHNC"
    tables, num_blocks = draw(block_tables(groups, until, tokens, keeps_states and not until))
    # A block id keeps groups apart only where pages are alike: whole, or head by head.
    pages = {_page(group, tp, by_head=layout in ("LHBNC", "BHLNC")) for group in groups}
    paddable = layout[-3:] in ("HNC", "NHC") and layout != "BHLNC"
    padding = draw(st.sampled_from([0, 3])) if paddable and not splits else 0
    if not padding:  # vLLM splits dense blocks only
        groups = [draw(split_blocks(group, layout, tp, always=splits)) for group in groups]
    return Side(
        groups=tuple(groups),
        layout=layout,
        tp=tp,
        stages=draw(stages(sorted(n for group in groups for n in group.numbers))),
        num_blocks=num_blocks,
        tables=tables,
        base=base,
        tokens=tokens,
        padding=padding,
        overlay=len(pages) == 1 and draw(st.booleans()),
        keeps_states=keeps_states,
    )


@st.composite
def split_blocks(draw: st.DrawFn, group: Group, layout: str, tp: int, always: bool) -> Group:
    """The group, whose blocks the backend may split: described as they are, or in parts.

    They can be as they are where tokens are outermost in a block, or there is one head.
    """
    one_head = group.sort.heads <= tp
    compact = layout[:2] == "LB" or (layout == "LHBNC" and one_head)
    sizes = [size for size in (2, 3, 4) if group.rows % size == 0]
    if not sizes or not compact or group.sort.opaque:
        return group
    if not always and not draw(_seldom):
        return group
    size = draw(st.sampled_from(sizes))
    if (layout == "LBNHC" or one_head) and draw(st.booleans()):
        return replace(group, split=size)
    return replace(group, parts=size, block_tokens=group.block_tokens // size)


@st.composite
def block_tables(
    draw: st.DrawFn, groups: Sequence[Group], until: int, tokens: int, all_states: bool = False
) -> tuple[tuple[BlockList, ...], int]:
    """Block lists as an engine keeps them, and how many blocks its cache has.

    Both engines keep the window of token ``until``; one may keep more than that.
    """
    counts = []
    for group in groups:
        skipped = group.skipped(until)
        if group.sort.kind is AttentionKind.STATE:
            skipped = 0 if all_states else max(0, tokens - 1) // group.block_tokens
        else:
            skipped -= draw(st.integers(0, min(2, skipped)))
        counts.append((skipped, max(0, -(-tokens // group.block_tokens) - skipped)))
    num_blocks = sum(count for _, count in counts) + draw(st.integers(1, 4))
    ids = iter(draw(st.permutations(range(1, num_blocks))))
    tables = tuple(
        trimmed([0] * skipped + [next(ids) for _ in range(count)]) for skipped, count in counts
    )
    return tables, num_blocks


@st.composite
def stages(draw: st.DrawFn, numbers: list[int]) -> tuple[tuple[int, ...], ...]:
    """Pipeline stages: one to three, each of some layers that follow each other."""
    cuts = draw(st.lists(st.integers(1, max(1, len(numbers) - 1)), max_size=2, unique=True))
    edges = [0, *sorted(cut for cut in cuts if cut < len(numbers)), len(numbers)]
    return tuple(tuple(numbers[a:b]) for a, b in itertools.pairwise(edges))


def _divide(tp: int, heads: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


def _page(group: Group, tp: int, by_head: bool) -> tuple[int, ...]:
    heads = max(1, group.sort.heads // tp)
    head_nbytes = group.rows * group.sort.row_nbytes
    if group.sort.is_state:  # of one piece, whatever the layout
        heads, head_nbytes = 1, heads * head_nbytes
    return (heads, head_nbytes) if by_head else (heads * head_nbytes,)
