"""Boundaries against an oracle that knows sets of tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from pdconn.store.format import prompt_rows as prompt_module
from pdconn.store.format.prompt_rows import Spacing, can_resume, find_boundary, pieces, rows_needed
from pdconn.store.format.row import Layer, RowKind, RowLayout, Section, StoreLayout
from registration.references import AttentionKind
from tests.property.scale import drawn

SIZE = 8
MIB = 1 << 20


def section(
    kind: AttentionKind = AttentionKind.FULL,
    window: int | None = None,
    unit: int = 1,
    kept: int = SIZE,
    *,
    nbytes: int = 1,
    heads: int = 1,
    layers: int = 1,
) -> Section:
    """Of ``layers`` layers, keeping ``kept`` tokens of each block."""
    made = tuple(Layer(f"{kind}{window}.{number}", 0, nbytes) for number in range(layers))
    return Section(kind, window, unit, kept // unit, False, 0, heads, made)


def layout(*sections: Section, size: int = SIZE) -> StoreLayout:
    full = tuple(s for s in sections if s.kind is AttentionKind.FULL)
    windowed = tuple(s for s in sections if s.kind is not AttentionKind.FULL)
    wa = RowLayout(RowKind.WA, size, windowed) if windowed else None
    return StoreLayout(RowLayout(RowKind.FA, size, full), wa)


def tail(kind: AttentionKind, window: int, size: int = SIZE) -> int:
    """Tokens that a section keeps: the fewest that divide the block and hold what is reached."""
    reach = window if kind is AttentionKind.CHUNKED_LOCAL else window - 1
    return next(n for n in range(1, size + 1) if size % n == 0 and n >= min(size, max(1, reach)))


windowed = st.builds(
    lambda kind, window: section(kind, window, kept=tail(kind, window)),
    st.sampled_from([AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL]),
    st.integers(1, 4 * SIZE),
)
states = st.just(section(AttentionKind.STATE, unit=SIZE))
layouts = st.lists(windowed | states, max_size=3).map(lambda found: layout(section(), *found))


@dataclass(frozen=True)
class World:
    """Rows that are there, and how many tokens of a prompt may be hit."""

    layout: StoreLayout
    rows: frozenset[tuple[RowKind, int]]
    limit: int

    def has(self, kind: RowKind, index: int) -> bool:
        return (kind, index) in self.rows

    def found(self) -> int:
        return find_boundary(self.layout, self.limit, self.has)

    def largest(self) -> int:
        """Every boundary in turn, by sets of tokens."""
        return max((b for b in range(self.limit + 1) if self.serves(b)), default=0)

    def serves(self, boundary: int) -> bool:
        if boundary == 0:
            return True
        size = self.layout.block_tokens
        wa = self.layout.wa
        if boundary % size or (wa and not self.has(RowKind.WA, boundary // size - 1)):
            return False
        return all(
            needed(section, boundary) <= self._kept(kind, section)
            for kind, row in ((RowKind.FA, self.layout.fa), (RowKind.WA, wa))
            if row is not None
            for section in row.sections
        )

    def _kept(self, kind: RowKind, section: Section) -> set[int]:
        size = self.layout.block_tokens
        kept: set[int] = set()
        for one, index in self.rows:
            if one is kind:
                end = (index + 1) * size
                kept |= set(range(end - section.tokens, end))
        return kept


def needed(section: Section, boundary: int) -> set[int]:
    """Tokens before ``boundary`` that it attends to, one by one."""
    if section.kind is AttentionKind.STATE:
        return {boundary - 1}  # it comes with its row, whatever else the row keeps
    if section.window is None:
        return set(range(boundary))
    if section.kind is AttentionKind.CHUNKED_LOCAL:
        return {t for t in range(boundary) if t // section.window == boundary // section.window}
    return {t for t in range(boundary) if boundary - t < section.window}


rows = st.sets(st.tuples(st.sampled_from(RowKind), st.integers(0, 5)))
prefixes = st.builds(
    lambda full, some: frozenset({(RowKind.FA, i) for i in range(full)} | some),
    st.integers(0, 6),
    rows,
)
worlds = st.builds(World, layouts, prefixes, st.integers(0, 7 * SIZE))


@drawn(300)
@given(worlds)
def test_the_boundary_found_is_the_largest_that_tokens_allow(world: World) -> None:
    assert world.found() == world.largest()


def _own_row_only(layout: RowLayout | None, boundary: int) -> range:
    last = boundary // SIZE - 1
    return range(last, last + 1) if layout else range(0)


def _without_its_own(layout: RowLayout | None, boundary: int) -> range:
    found = pieces(layout, boundary)
    return range(found.start, found.stop - 1)


def _one_more(layout: RowLayout | None, boundary: int) -> range:
    found = pieces(layout, boundary)
    return range(max(0, found.start - 1), found.stop) if layout else found


@pytest.mark.parametrize("wrong", [_own_row_only, _without_its_own, _one_more])
def test_other_pieces_are_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., range]
) -> None:
    monkeypatch.setattr(prompt_module, "pieces", wrong)
    find(
        worlds,
        lambda world: world.found() != world.largest(),
        settings=settings(
            max_examples=2000,
            database=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@drawn(200)
@given(layouts, st.integers(0, 6 * SIZE), st.integers(1, 6))
def test_the_rows_needed_hold_what_is_not_held_and_none_is_in_vain(
    layout: StoreLayout, held: int, blocks: int
) -> None:
    boundary = blocks * SIZE
    held = min(held, boundary)
    found = rows_needed(layout, held, boundary)
    assert len(set(found)) == len(found)
    for kind, row in ((RowKind.FA, layout.fa), (RowKind.WA, layout.wa)):
        tokens = {t for s in (row.sections if row else ()) for t in needed(s, boundary)}
        lacking = {t // SIZE for t in tokens if t >= held}
        own = {blocks - 1} if kind is RowKind.WA and layout.wa and held < boundary else set()
        assert {index for one, index in found if one is kind} == lacking | own


def test_the_rows_are_asked_for_in_an_order_that_stops_early() -> None:
    asked = []

    def has(kind: RowKind, index: int) -> bool:
        asked.append((kind, index))
        return kind is RowKind.FA and index < 2

    one = section(AttentionKind.SLIDING_WINDOW, 2 * SIZE + 1)
    assert find_boundary(layout(section(), one), 5 * SIZE, has) == 0
    full, wa = RowKind.FA, RowKind.WA
    assert asked == [(full, 0), (full, 1), (full, 2), (wa, 1), (wa, 0)]


def test_a_unit_must_end_at_the_boundary() -> None:
    compressed = layout(section(), section(unit=2 * SIZE, kept=2 * SIZE))
    assert [can_resume(compressed, n * SIZE) for n in range(1, 5)] == [False, True, False, True]
    assert find_boundary(compressed, 5 * SIZE, lambda kind, index: True) == 4 * SIZE


def test_a_chunks_end_needs_nothing_but_its_own_row() -> None:
    chunks = layout(section(), section(AttentionKind.CHUNKED_LOCAL, 2 * SIZE))
    assert [pieces(chunks.wa, n * SIZE) for n in (1, 2, 3, 4)] == [
        range(0, 1),
        range(1, 2),
        range(2, 3),
        range(3, 4),
    ]
    wide = layout(section(), section(AttentionKind.CHUNKED_LOCAL, 4 * SIZE))
    assert [len(pieces(wide.wa, n * SIZE)) for n in (1, 2, 3, 4)] == [1, 2, 3, 1]


def test_a_state_needs_nothing_but_its_own_row() -> None:
    state = section(AttentionKind.STATE, unit=SIZE)
    alone = layout(section(), state)
    assert [pieces(alone.wa, n * SIZE) for n in (1, 2)] == [range(0, 1), range(1, 2)]
    beside = layout(section(), state, section(AttentionKind.SLIDING_WINDOW, 2 * SIZE + 1))
    assert pieces(beside.wa, 5 * SIZE) == range(3, 5)


# Spacing


def hybrid(full: int, windowed: int, window: int, heads: int, nbytes: int) -> StoreLayout:
    """Layers of both kinds; ``nbytes`` of a token and head; canonical blocks of 256."""
    kept = tail(AttentionKind.SLIDING_WINDOW, window, 256)
    return layout(
        section(kept=256, layers=full, heads=heads, nbytes=nbytes),
        section(
            AttentionKind.SLIDING_WINDOW,
            window,
            kept=kept,
            layers=windowed,
            heads=heads,
            nbytes=nbytes,
        ),
        size=256,
    )


GPT_OSS = hybrid(18, 18, 128, 8, 256)
GEMMA = hybrid(10, 52, 1024, 16, 512)


def test_rows_have_the_sizes_of_the_models() -> None:
    assert (GPT_OSS.fa.data_nbytes, GPT_OSS.for_kind(RowKind.WA).data_nbytes) == (
        9 * MIB,
        4.5 * MIB,
    )
    assert (GEMMA.fa.data_nbytes, GEMMA.for_kind(RowKind.WA).data_nbytes) == (20 * MIB, 104 * MIB)
    assert len(pieces(GEMMA.wa, 1 << 20)) == 4


@pytest.mark.parametrize(
    ("layout", "setting", "every"),
    [
        (GPT_OSS, "auto", 1),
        (GEMMA, "auto", 21),
        (GEMMA, "all", 1),
        (GEMMA, "last", None),
        (GEMMA, 1000, 4),
        (GEMMA, 1, 1),
        (layout(section()), "all", None),
    ],
)
def test_spacing_follows_the_setting(
    layout: StoreLayout, setting: int | str, every: int | None
) -> None:
    assert Spacing.from_setting(layout, setting).every == every


def test_auto_keeps_bytes_of_windows_at_or_below_those_of_full_attention() -> None:
    for one in (GPT_OSS, GEMMA):
        every = Spacing.from_setting(one, "auto").every
        assert every is not None
        wa, blocks = one.for_kind(RowKind.WA), every * 40
        saved = set()
        for index in Spacing(every).boundaries(0, blocks, frozenset()):
            saved |= set(pieces(one.wa, (index + 1) * 256))
        assert len(saved) * wa.data_nbytes <= blocks * one.fa.data_nbytes


def test_boundaries_are_counted_from_the_prompts_beginning() -> None:
    assert list(Spacing(3).boundaries(4, 10, frozenset({4, 20}))) == [4, 5, 8]
    assert list(Spacing(None).boundaries(0, 10, frozenset({9}))) == [9]
