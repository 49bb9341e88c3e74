"""Stores that are slightly wrong, each in its own way: the check of right ones must catch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd

import numpy as np
import pytest

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.format import row as row_module
from pdconn.store.format.row import RowKind, RowLayout, Section, Slab, StoreLayout
from pdconn.store.rank import row_pairing as pairing_module
from pdconn.store.rank.row_pairing import Row, RowPairing
from registration.references import AttentionKind, KVCacheGroupReference, KVCacheReferences
from tests.property.stores.stored import SlabKey, Store, StoredCase
from transport import Spans


class WrongRowSaved(Store):
    def spans_to_save(self, pairing: RowPairing, index: int, blocks: Sequence[BlockList]) -> Spans:
        return super().spans_to_save(pairing, max(0, index - 1), blocks)


class WrongRowLoaded(Store):
    """Rows counted from the first that was fetched, not from the prompt's first."""

    def spans_to_load(self, pairing: RowPairing, need: Need, rows: Sequence[Row]) -> Spans:
        first = min((index for index, _ in rows), default=0)
        size = pairing.share.block_tokens
        less = first * size
        tokens = tuple(range(max(0, t.start - less), t.stop - less) for t in need.tokens)
        need = replace(need, tokens=tokens)
        return super().spans_to_load(pairing, need, [(index - first, at) for index, at in rows])


class WrongSlot(Store):
    """Rows taken as if they lay in the order of their blocks."""

    def spans_to_load(self, pairing: RowPairing, need: Need, rows: Sequence[Row]) -> Spans:
        places = sorted(at for _, at in rows)
        rows = [(index, at) for (index, _), at in zip(sorted(rows), places, strict=True)]
        return super().spans_to_load(pairing, need, rows)


class HeldIgnored(Store):
    def spans_to_load(self, pairing: RowPairing, need: Need, rows: Sequence[Row]) -> Spans:
        tokens = tuple(range(each.stop) for each in need.tokens)
        return super().spans_to_load(pairing, replace(need, tokens=tokens), self._all(rows))

    def _all(self, rows: Sequence[Row]) -> list[Row]:
        known = dict(rows)
        last = self.case.boundary // self.case.block_tokens
        return [(i, known.get(i, rows[0][1] if rows else 0)) for i in range(last)]


class HeldRoundedUp(Store):
    def spans_to_load(self, pairing: RowPairing, need: Need, rows: Sequence[Row]) -> Spans:
        size = pairing.share.block_tokens
        tokens = tuple(
            range(min(each.stop, -(-each.start // size) * size), each.stop) for each in need.tokens
        )
        return super().spans_to_load(pairing, replace(need, tokens=tokens), rows)


class HeadsFromTheRanksFirst(Store):
    """A slab's head numbered from the first that the rank holds."""

    def key(self, share: RowLayout, index: int, slab: Slab) -> SlabKey:
        kind, index, layer, chunk, head = super().key(share, index, slab)
        return kind, index, layer, chunk, head - share.sections[slab.section].first_head


class SlabsNotAligned(Store):
    """Slabs of a head packed when saved, and aligned when loaded."""

    def pairing(self, references: KVCacheReferences, share: RowLayout, saves: bool) -> RowPairing:
        made = super().pairing(references, share, saves)
        if not saves:
            return made
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairing_module, "aligned", lambda nbytes: nbytes)
            packed = RowPairing(references, share)
        packed.stride = made.stride
        return packed


class WindowTooShort(Store):
    """A window of fewer tokens, on one side or the other."""

    def __init__(self, case: StoredCase, saves: bool, less: Callable[[int], int]) -> None:
        super().__init__(case)
        self._saves, self._less = saves, less

    def pairing(self, references: KVCacheReferences, share: RowLayout, saves: bool) -> RowPairing:
        if saves is not self._saves:
            return super().pairing(references, share, saves)
        groups = tuple(
            replace(group, window=self._shorter(group.kind, group.window))
            for group in references.groups
        )
        sections = tuple(self._section(section) for section in share.sections)
        share = RowLayout(share.kind, share.block_tokens, sections)
        return super().pairing(replace(references, groups=groups), share, saves)

    def _shorter(self, kind: AttentionKind, window: int | None) -> int | None:
        is_sliding = window and kind is AttentionKind.SLIDING_WINDOW
        return max(1, self._less(window)) if window and is_sliding else window

    def _section(self, s: Section) -> Section:
        rest = s.unit_tokens, s.units, s.is_opaque, s.first_head, s.num_heads, s.layers
        return Section(s.kind, self._shorter(s.kind, s.window), *rest)


class WrongScale(Store):
    """The window of opaque blocks divided and rounded down."""

    def pairing(self, references: KVCacheReferences, share: RowLayout, saves: bool) -> RowPairing:
        def divided(kind: AttentionKind, window: int | None, scale: int) -> int | None:
            return window and (window if scale == 1 else max(1, window // scale))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairing_module, "_scaled_window", divided)
            return super().pairing(references, share, saves)


class OtherTail(Store):
    """A compressor's tail reckoned by another rule: ``kept`` are tokens from window, ratio, rows.

    Layout and pairing share the rule, so a wrong one is seen by what it loads alone.
    """

    def __init__(self, case: StoredCase, kept: Callable[[int, int, int], int]) -> None:
        super().__init__(case)
        self._kept = kept

    def share(self, references: KVCacheReferences) -> StoreLayout:
        return super().share(self._wrong(references))

    def pairing(self, references: KVCacheReferences, share: RowLayout, saves: bool) -> RowPairing:
        return super().pairing(self._wrong(references), share, saves)

    def _wrong(self, references: KVCacheReferences) -> KVCacheReferences:
        groups = tuple(
            replace(
                group, window=self._window(group.window, group.compress_ratio), compress_ratio=1
            )
            for group in references.groups
        )
        return replace(references, groups=groups)

    def _window(self, window: int | None, ratio: int) -> int | None:
        if window is None or ratio == 1:
            return window
        return max(0, self._kept(window, ratio, self.case.block_tokens)) + 1


class StateOfTheRowBefore(Store):
    def spans_to_save(self, pairing: RowPairing, index: int, blocks: Sequence[BlockList]) -> Spans:
        side = self.case.writer
        blocks = [
            replace(table, first=table.first + self.case.block_tokens // group.block_tokens)
            if group.sort.is_state
            else kept
            for group, table, kept in zip(side.groups, side.tables, blocks, strict=True)
        ]
        return super().spans_to_save(pairing, index, blocks)


class NoState(Store):
    """States are saved, and not loaded."""

    def pairing(self, references: KVCacheReferences, share: RowLayout, saves: bool) -> RowPairing:
        groups = [
            replace(group, data=() if group.kind is AttentionKind.STATE else group.data)
            for group in references.groups
        ]
        references = references if saves else replace(references, groups=tuple(groups))
        return super().pairing(references, share, saves)


class PiecesOfAStateSwapped(Store):
    """Where two pieces of a state are of one size, each is loaded for the other."""

    def load(self, rank: int):  # type: ignore[no-untyped-def]  # as the one that it overrides
        right = dict(self.slabs)
        for (kind, index, layer, chunk, head), slab in right.items():
            other = kind, index, layer, 1 - chunk, head
            if other in right and len(right[other]) == len(slab):
                self.slabs[other] = slab
        try:
            return super().load(rank)
        finally:
            self.slabs = right


class OneBlockOff(Store):
    """The engine's block list taken as if it began a block earlier."""

    def spans_to_save(self, pairing: RowPairing, index: int, blocks: Sequence[BlockList]) -> Spans:
        early = [BlockList(table.first - 1, table.ids) for table in blocks]
        return super().spans_to_save(pairing, index, early)


class LastPieceOnly(Store):
    """A boundary taken for resumable when its last WA row is there."""

    def load(self, rank: int):  # type: ignore[no-untyped-def]  # as the one that it overrides
        for key in list(self.slabs):
            if key[0] is RowKind.WA and key[1] != self.case.boundary // self.case.block_tokens - 1:
                self.slabs[key] = np.full_like(self.slabs[key], -7)
        return super().load(rank)


class Edited(Store):
    """Spans edited after planning, on one side or the other."""

    def __init__(self, case: StoredCase, saves: bool, edit: Callable[[Spans], Spans]) -> None:
        super().__init__(case)
        self._saves, self._edit = saves, edit

    def spans_to_save(self, pairing: RowPairing, index: int, blocks: Sequence[BlockList]) -> Spans:
        spans = super().spans_to_save(pairing, index, blocks)
        return self._edit(spans) if self._saves and len(spans) else spans

    def spans_to_load(self, pairing: RowPairing, need: Need, rows: Sequence[Row]) -> Spans:
        spans = super().spans_to_load(pairing, need, rows)
        return spans if self._saves or not len(spans) else self._edit(spans)


def _one_off(column: str) -> Callable[[Spans], Spans]:
    return lambda spans: replace(spans, **{column: getattr(spans, column) + np.uint64(1)})


def _lost(s: Spans) -> Spans:
    return replace(s, local=s.local[1:], remote=s.remote[1:], nbytes=s.nbytes[1:])


def _shrunk(s: Spans) -> Spans:
    keep = s.nbytes > 1
    return replace(
        s, local=s.local[keep], remote=s.remote[keep], nbytes=s.nbytes[keep] - np.uint64(1)
    )


MUTANTS: dict[str, Callable[[StoredCase], Store]] = {
    "the row before is saved": WrongRowSaved,
    "rows counted from the first fetched": WrongRowLoaded,
    "slots in the order of blocks": WrongSlot,
    "held ignored": HeldIgnored,
    "held rounded up": HeldRoundedUp,
    "heads counted from the rank's first": HeadsFromTheRanksFirst,
    "slabs packed when saved": SlabsNotAligned,
    "half of the window saved": partial(WindowTooShort, saves=True, less=lambda w: w // 2),
    "window a token short when loaded": partial(WindowTooShort, saves=False, less=lambda w: w - 1),
    "window of opaque blocks rounded down": WrongScale,
    "a compressor's tail a token short": partial(
        OtherTail, kept=lambda window, ratio, rows: window - gcd(ratio, rows) - 1
    ),
    "a compressor's tail an output short": partial(
        OtherTail, kept=lambda window, ratio, rows: window - 2 * gcd(ratio, rows)
    ),
    "a compressor's tail a token long": partial(
        OtherTail, kept=lambda window, ratio, rows: window - gcd(ratio, rows) + 1
    ),
    "a compressor's window kept whole": partial(
        OtherTail, kept=lambda window, ratio, rows: window - 1
    ),
    "a compressor's tail left out": partial(OtherTail, kept=lambda window, ratio, rows: 0),
    "a compressor trimmed out of step with rows": partial(
        OtherTail, kept=lambda window, ratio, rows: window - ratio
    ),
    "the state of the row before": StateOfTheRowBefore,
    "a state not loaded": NoState,
    "pieces of a state swapped": PiecesOfAStateSwapped,
    "one block off": OneBlockOff,
    "the last piece alone": LastPieceOnly,
    "one byte off in KV memory, saved": partial(Edited, saves=True, edit=_one_off("local")),
    "one byte off in host memory, saved": partial(Edited, saves=True, edit=_one_off("remote")),
    "one byte off in KV memory, loaded": partial(Edited, saves=False, edit=_one_off("local")),
    "one byte off in host memory, loaded": partial(Edited, saves=False, edit=_one_off("remote")),
    "a run lost, saved": partial(Edited, saves=True, edit=_lost),
    "a run lost, loaded": partial(Edited, saves=False, edit=_lost),
    "runs one byte short": partial(Edited, saves=False, edit=_shrunk),
}


class RowUnitShort(Store):
    """Rows of a unit too few for what is read of them."""

    def share(self, references: KVCacheReferences) -> StoreLayout:
        def short(group: KVCacheGroupReference, unit_tokens: int, all_units: int) -> int:
            right = tail_units(group, unit_tokens, all_units)
            return max((n for n in range(1, right) if all_units % n == 0), default=right)

        tail_units = row_module._tail_units
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_module, "_tail_units", short)
            return super().share(references)
