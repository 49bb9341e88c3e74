"""Engines that store and load, drawn at random, and a naive account of every byte.

Bytes are the labels of :mod:`tests.property.oracle`.  One engine saves rows to a dictionary of
slabs, another loads them by way of host memory; both host memories are poison at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdconn.planning.plan import Gaps, Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.format.prompt_rows import rows_needed
from pdconn.store.format.row import (
    RowKind,
    RowLayout,
    Slab,
    StoreLayout,
    share_layout,
    store_layout,
)
from pdconn.store.rank.row_pairing import Row, RowPairing, unsaved_layers
from registration.references import AttentionKind, KVCacheReferences
from tests.property.cases import sides
from tests.property.oracle import NOWHERE, UNTOUCHED, Group, Layers, Side, _inside
from transport import Spans

POISON = -3
_STAGING = 1 << 59
ZERO = -4
_WRITER, _LENDER, _READER = 1 << 41, 1 << 46, 1 << 51

Labels = NDArray[np.int64]
U64 = NDArray[np.uint64]
SlabKey = tuple[RowKind, int, str, int, int]
"""Kind and number of a row; layer, chunk and head of the slab."""


@dataclass(repr=False)
class StoredCase:
    """One engine saves a request of ``boundary`` tokens and more, another resumes it there."""

    block_tokens: int
    writer: Side
    reader: Side
    held: int
    boundary: int
    order: int

    @property
    def layout(self) -> StoreLayout:
        """Of whole rows, from the engine that loads."""
        return store_layout(self.reader.ranks, self.block_tokens)

    def __repr__(self) -> str:
        sides = (
            f"{side.layout} TP {side.tp}, stages {side.stages}, tables {side.tables}: {side.groups}"
            for side in (self.writer, self.reader)
        )
        return f"{self.held} to {self.boundary} by {self.block_tokens}, {' -> '.join(sides)}"


def stored_cases() -> st.SearchStrategy[StoredCase]:
    """Any two engines of a model with full attention and up to two other sorts of layers.

    States are at the ends of canonical blocks, as if passes had ended there.
    """
    return _cases(lends=False).map(lambda drawn: drawn[0])


def lent_cases() -> st.SearchStrategy[tuple[StoredCase, Side]]:
    """The same, and an engine that lends all of the request."""
    return _cases(lends=True)


@st.composite
def _cases(draw: st.DrawFn, *, lends: bool) -> tuple[StoredCase, Side]:
    size = draw(st.sampled_from([4, 8, 16, 24]))
    rows = draw(st.integers(1, 4))
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    names = iter(range(8))
    sorts, blocks = [], []
    for number in range(draw(st.integers(1, 3))):
        numbers = tuple(next(names) for _ in range(draw(st.integers(1, 2))))
        sort, sizes = draw(_layers(numbers, heads, size, must_be_full=number == 0))
        sorts.append(sort)
        blocks.append(sizes)
    boundary = rows * size
    beyond = boundary + draw(st.integers(0, size))
    writer = draw(
        sides(sorts, [pair[0] for pair in blocks], (0, beyond), _WRITER, keeps_states=True)
    )
    span = boundary, boundary
    reader = draw(sides(sorts, [pair[1] for pair in blocks], span, _READER, keeps_states=True))
    held = draw(st.one_of(st.just(0), st.integers(0, boundary)))
    case = StoredCase(size, writer, reader, held, boundary, draw(st.integers(0, 99)))
    if not lends:
        return case, writer
    lender = sides(sorts, [pair[0] for pair in blocks], (0, boundary), _LENDER, keeps_states=True)
    return case, draw(lender)


@st.composite
def _layers(
    draw: st.DrawFn, numbers: tuple[int, ...], heads: int, size: int, must_be_full: bool
) -> tuple[Layers, tuple[int, int]]:
    """Layers, and the block sizes of both engines, which divide ``size``."""
    kind = AttentionKind.FULL if must_be_full else draw(st.sampled_from(AttentionKind))
    if kind is AttentionKind.STATE:
        return draw(_states(numbers, heads, size))
    opaque = draw(st.sampled_from([False, False, True]))
    ratio = draw(st.sampled_from([1, 1, 2, 4])) if not opaque else 1
    units = [n for n in range(1, size + 1) if size % n == 0 and n % ratio == 0]
    first = draw(st.sampled_from(units))
    second = first if opaque else draw(st.sampled_from(units))
    window = draw(st.integers(1, 3 * size)) if kind.is_windowed else None
    if window is not None and opaque and kind is AttentionKind.CHUNKED_LOCAL:
        window = -(-window // first) * first
    count = 1 if ratio > 1 else draw(st.sampled_from([heads, heads, max(1, heads // 2)]))
    nbytes = draw(st.integers(1, 3))
    compress = 1
    if kind is AttentionKind.SLIDING_WINDOW:
        compress = draw(st.sampled_from([1, 1, 2, 3, 4, 6, size]))
    return Layers(numbers, kind, window, count, nbytes, ratio, opaque, compress), (first, second)


@st.composite
def _states(
    draw: st.DrawFn, numbers: tuple[int, ...], heads: int, size: int
) -> tuple[Layers, tuple[int, int]]:
    """State layers of one or two pieces, and the block sizes of both engines."""
    nbytes = draw(st.integers(1, 5))
    tail = draw(st.integers(0, nbytes - 1))
    parts = draw(st.sampled_from([1, heads, heads]))
    sizes = st.sampled_from([n for n in range(1, size + 1) if size % n == 0])
    sort = Layers(numbers, AttentionKind.STATE, None, parts, nbytes, opaque=True, tail_nbytes=tail)
    return sort, (draw(sizes), draw(sizes))


def first_read(sort: Layers, boundary: int, block_tokens: int) -> int:
    """The first token that any token from ``boundary`` on reads; ``boundary`` if none is.

    Compressors read where an output ends, and each one reads later tokens than the one before.
    Windows past the boundary before are taken for plain ones.
    """
    if sort.kind is not AttentionKind.SLIDING_WINDOW or (sort.window or 0) > block_tokens + 1:
        return sort.reach(boundary)
    reads = [
        token - back
        for token in range(boundary, boundary + sort.compress_ratio)
        if (token + 1) % sort.compress_ratio == 0
        for back in range(sort.window or 0)
    ]
    return max(0, min(boundary, *reads))


@dataclass
class Store:
    """Slabs by name, and how they are saved and loaded; mutants change one method."""

    case: StoredCase
    slabs: dict[SlabKey, Labels] = field(default_factory=dict)

    # What mutants change

    def share(self, references: KVCacheReferences) -> StoreLayout:
        return share_layout([references], self.case.block_tokens)

    def key(self, share: RowLayout, index: int, slab: Slab) -> SlabKey:
        return share.kind, index, slab.layer, slab.chunk, slab.head

    def pairing(self, references: KVCacheReferences, share: RowLayout, saves: bool) -> RowPairing:
        del saves
        return RowPairing(references, share)

    def spans_to_save(self, pairing: RowPairing, index: int, blocks: Sequence[BlockList]) -> Spans:
        return _joined(pairing.spans_to_save(index, tuple(blocks), _STAGING))

    def spans_to_load(self, pairing: RowPairing, need: Need, rows: Sequence[Row]) -> Spans:
        return _joined(list(pairing.spans_to_load(need, rows)))

    def gaps(self, pairing: RowPairing, need: Need) -> Iterator[Gaps]:
        return pairing.gaps_of_load(need)

    # The two ways of a byte

    def save(self) -> None:
        """Save the rows that the boundary needs, each rank its share."""
        case = self.case
        for rank, references in enumerate(case.writer.ranks):
            labels: dict[int, Labels] | None = None
            for kind, index in rows_needed(case.layout, 0, case.boundary):
                share = _of(self.share(references), kind)
                keys = [self.key(share, index, slab) for slab in share.slabs]
                if all(key in self.slabs for key in keys):
                    continue
                labels = labels or case.writer.labels(rank)
                host = self._saved(references, share, index, labels)
                for key, slab in zip(keys, share.slabs, strict=True):
                    self.slabs[key] = host[slab.offset : slab.offset + slab.nbytes].copy()

    def _saved(
        self, references: KVCacheReferences, share: RowLayout, index: int, labels: dict[int, Labels]
    ) -> Labels:
        """One row's share in host memory."""
        blocks = list(_kept(self.case.writer, (index + 1) * self.case.block_tokens))
        pairing = self.pairing(references, share, saves=True)
        host = {_STAGING: np.full(pairing.stride, POISON, dtype=np.int64)}
        spans = self.spans_to_save(pairing, index, blocks)
        _copy(labels, host, spans.local, spans.remote, spans.nbytes)
        return host[_STAGING]

    def load(self, rank: int) -> tuple[dict[int, Labels], dict[int, Labels]]:
        """Labels that the rank's memory has after it, and how often each byte was written."""
        case = self.case
        references = case.reader.ranks[rank]
        got = {
            at: np.full_like(it, UNTOUCHED) for at, it in case.reader.labels(rank, False).items()
        }
        times = {at: np.zeros_like(it) for at, it in got.items()}
        need = Need.for_range(case.held, case.boundary, case.reader.tables)
        needed = rows_needed(case.layout, case.held, case.boundary)
        own = self.share(references)
        left = unsaved_layers(references, [_of(own, kind) for kind in RowKind])
        found = [] if left is None else [left.whole_blocks(need)]
        for kind in RowKind:
            share = _of(self.share(references), kind)
            if not share.slabs:
                continue
            pairing = self.pairing(references, share, saves=False)
            host, rows = self._fetched(
                share, pairing.stride, [index for one, index in needed if one is kind]
            )
            found += self.gaps(pairing, need)
            spans = self.spans_to_load(pairing, need, rows)
            _copy(host, got, spans.remote, spans.local, spans.nbytes)
            for local, nbytes in zip(spans.local.tolist(), spans.nbytes.tolist(), strict=True):
                base, written = _inside(times, local, nbytes)
                times[base][written] += 1
        for gaps in found:
            for local, nbytes in zip(gaps.local.tolist(), gaps.nbytes.tolist(), strict=True):
                base, written = _inside(times, local, nbytes)
                got[base][written] = ZERO
                times[base][written] += 1
        return got, times

    def _fetched(
        self, share: RowLayout, stride: int, numbers: list[int]
    ) -> tuple[dict[int, Labels], list[Row]]:
        """Rows in host memory, in some order, here and there with a gap between."""
        order = np.random.default_rng(self.case.order)
        host, rows, at = {}, [], _STAGING
        for index in order.permutation(numbers).tolist():
            memory = np.full(stride, POISON, dtype=np.int64)
            for slab in share.slabs:
                found = self.slabs[self.key(share, index, slab)]
                memory[slab.offset : slab.offset + slab.nbytes] = found
            host[at] = memory
            rows.append((index, at))
            at += stride + 4096 * int(order.integers(0, 2))
        return host, rows


def longest_way_back(sort: Layers, block_tokens: int) -> int:
    """The most tokens before a boundary that are read after it.  Rows are as long for all.

    Boundaries repeat after as many as the ratio; the first ones, near the beginning, do not count.
    """
    first = -(-(sort.window or 0) // block_tokens)
    boundaries = [n * block_tokens for n in range(first, first + sort.compress_ratio)]
    return max(boundary - first_read(sort, boundary, block_tokens) for boundary in boundaries)


def check(store: Store, rank: int) -> None:
    """Save, load, and look at every byte of the rank's memory.

    Raises:
        AssertionError: a byte that is missing, wrong, written twice or outside of what was needed.
    """
    case = store.case
    if not store.slabs:
        store.save()
    got, times = store.load(rank)
    groups = {number: group for group in case.reader.groups for number in group.numbers}
    for base, wanted in case.reader.labels(rank).items():
        assert times[base].max(initial=0) <= 1, "a byte was written twice"
        must, may, loose, loaded, whole = _allowed(case, wanted, groups)
        right, untouched = got[base] == wanted, got[base] == UNTOUCHED
        zeroed = got[base] == ZERO
        for name, wrong in (
            ("needed", must & ~right),
            ("held already", may & ~right & ~untouched),
            ("that nothing needs", ~must & ~may & ~loose & ~untouched & ~zeroed),
            ("of a loaded block, and stale", whole & untouched),
            ("zeroed that are held", zeroed & ~loaded),
        ):
            assert not wrong.any(), f"bytes {name}: {wrong.sum()}, the first {np.argmax(wrong)}"


def _allowed(
    case: StoredCase, wanted: Labels, groups: dict[int, Group]
) -> tuple[NDArray[np.bool_], ...]:
    """Bytes that must be right, may be left out, may be anything, lack, and are of whole blocks.

    A token before ``held`` is in the cache already, and must not be spoilt.  One before a
    window that shares a block with one in it is never read, and may be anything but stale: of
    a block that lacks all its tokens every byte is loaded, or zeroed.
    """
    must, may, loose, loaded, whole = (np.zeros(len(wanted), dtype=bool) for _ in range(5))
    layer, position = wanted >> 48, (wanted >> 20) & 0xFFFFF
    for number, group in groups.items():
        here = (wanted != NOWHERE) & (layer == number)
        if group.sort.is_state:
            must |= here & (case.held < case.boundary)
            continue
        unit = group.block_tokens if group.sort.opaque else group.sort.ratio
        reach = first_read(group.sort, case.boundary, case.block_tokens)
        first, end = position * unit, (position + 1) * unit
        begin = max(reach, case.held)
        loaded |= here & (first >= case.held) & (case.held < case.boundary)
        whole |= loaded & here & (first - first % group.block_tokens >= case.held)
        inside = here & (first < case.boundary)
        must |= inside & (end > begin)
        may |= inside & (end > reach) & (end <= begin)
        if case.block_tokens % group.sort.compress_ratio:
            reach = max(0, case.boundary - longest_way_back(group.sort, case.block_tokens))
            may |= inside & (end > reach) & (end <= begin)
            begin = max(reach, case.held)
        loose |= (
            inside & (end <= reach) & (first >= begin // group.block_tokens * group.block_tokens)
        )
    return must, may, loose, loaded, whole


def _kept(side: Side, boundary: int) -> Iterator[BlockList]:
    """Block tables at ``boundary``: without blocks that windows and states have left."""
    for group, table in zip(side.groups, side.tables, strict=True):
        if group.sort.is_state:
            at = boundary // group.block_tokens - 1
            yield BlockList(at, table.ids[at - table.first : at - table.first + 1])
            continue
        gone = max(0, group.skipped(boundary) - table.first)
        yield replace(table, ids=(0,) * gone + table.ids[gone:])


def _of(layout: StoreLayout, kind: RowKind) -> RowLayout:
    if kind is RowKind.WA:
        return layout.wa or RowLayout(kind, layout.block_tokens, ())
    return layout.fa


def _joined(parts: Sequence[Spans]) -> Spans:
    empty = [np.empty(0, dtype=np.uint64)]
    return Spans(
        np.concatenate(empty + [part.local for part in parts]),
        np.concatenate(empty + [part.remote for part in parts]),
        np.concatenate(empty + [part.nbytes for part in parts]),
    )


def _copy(
    source: dict[int, Labels], target: dict[int, Labels], start: U64, into: U64, nbytes: U64
) -> None:
    for origin, place, count in zip(start.tolist(), into.tolist(), nbytes.tolist(), strict=True):
        base, taken = _inside(source, origin, count)
        other, written = _inside(target, place, count)
        target[other][written] = source[base][taken]
