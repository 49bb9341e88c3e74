"""One rank's KV memory matched with its share of rows: what is copied where.

The planner decides what goes where between a share in host memory and KV blocks.  A share is
described to it as an engine whose heads and layers are exactly ours: a KV cache group per section,
and a block per row::

    row of block 3      | section 0: h0 (L0 L1) h1 (L0 L1) | section 1 ... |
    as references       tensor: block_stride = a row, block id = slot + 1 (0 is a hole)
                        L1: offset = section + first slab, head_stride = a head's slabs
    block list of FA    first 3, ids (1, 2, 3, ...)        a row is a block of 256 tokens
    of WA, 64 tokens    first 15, ids (1,)                 a row is the last block in 256

A save is the spans of a load copied backwards.

Blocks that are opaque in tokens move whole.  Their groups are described with one "token" for each
engine block, tokens and windows divided alike.  A state stays as it is: the planner takes the one
block that holds it at the end, and the row is such a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdconn.planning.plan import Gaps, Need, Pairing
from pdconn.protocol.ticket import BlockList
from pdconn.store.format.row import (
    ALIGNMENT,
    RowKind,
    RowLayout,
    Section,
    aligned,
    as_kept,
    row_kind,
)
from pdconn.store.store_errors import FormatError
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
    KVCacheTensorReference,
)
from transport import Spans

MAX_ROWS = 1 << 20
"""Rows of one load: 268 million tokens."""

I64 = NDArray[np.int64]

_BATCH_RUNS = 1 << 19
"""Runs planned at a time, at 80 bytes each."""

Row = tuple[int, int]
"""The number of a row's block, and the address of its share in host memory."""


class RowPairing:
    """One rank's KV memory and its share of rows of one kind, matched once.

    ``stride`` is how far apart the shares of a fetch lie: their bytes, in whole pages.  It is
    0 where the rank has no layer of the kind, and then there is nothing to copy.
    """

    def __init__(self, ours: KVCacheReferences, share: RowLayout) -> None:
        """Match ``ours`` with ``share``, which was made of the same references.

        Raises:
            FormatError: opaque blocks that do not divide the chunk of their attention.
            Incompatible: the share is of other memory.
        """
        self.share = share
        self.stride = aligned(share.data_nbytes)
        # Plans are made for rows at made-up addresses, so many bytes apart: the gap after each
        # keeps runs from joining across rows.  Then each run moves to the address of its row.
        self._slot_nbytes = self.stride + ALIGNMENT
        self._scaled = tuple(_scaled_pairings(ours, share, self._slot_nbytes))

    def spans_to_load(self, need: Need, rows: Sequence[Row]) -> Iterator[Spans]:
        """The copies for the tokens of ``need`` that later tokens will read.

        Args:
            need: it ends at a boundary.
            rows: those that :func:`~pdconn.store.format.prompt_rows.rows_needed` names for this
                kind, anywhere in host memory.

        Yields:
            A part of them at a time, planned when it is asked for.  ``local`` are addresses of
            KV memory, ``remote`` of host memory.

        Raises:
            MissingBlock: a row that is needed is not among ``rows``, or a block is a hole.
            BlockOutOfRange: a block id beyond the cache.
        """
        addresses = np.array([address for _, address in rows], dtype=np.int64)
        for scaled in self._scaled:
            lent = scaled.lent([index for index, _ in rows], self.share.block_tokens)
            for part in scaled.batches(need, self.share):
                plan = scaled.pairing.plan(scaled.need(part), lent)
                for _, spans in plan.reads:
                    yield self._moved(spans, addresses)

    def gaps_of_load(self, need: Need) -> Iterator[Gaps]:
        """What :meth:`spans_to_load` leaves of the blocks that lack tokens, to be zeroed.

        Raises:
            BlockOutOfRange: a block id beyond the cache.
        """
        for scaled in self._scaled:
            yield scaled.pairing.gaps(scaled.lacking(need))

    def spans_to_save(self, index: int, blocks: tuple[BlockList, ...], address: int) -> list[Spans]:
        """The copies, from ``local`` to ``remote``, that fill row ``index`` at ``address``.

        An FA row takes all tokens of its block.  A WA row takes the states at its end, and of
        the tokens what the boundary there reaches, which is all that later boundaries reach, too.
        Other bytes of the share stay as they were: tokens that no boundary reaches, and what
        aligns slabs.

        Raises:
            MissingBlock: a block that the row needs is a hole.
            BlockOutOfRange: a block id beyond the cache.
        """
        size = self.share.block_tokens
        need = Need.for_range(index * size, (index + 1) * size, blocks)
        return list(self.spans_to_load(need, [(index, address)]))

    def _moved(self, spans: Spans, addresses: I64) -> Spans:
        """The same runs, with each row at its address in host memory."""
        remote = spans.remote.view(np.int64)
        slots = remote // self._slot_nbytes - _FIRST_SLOT
        remote = remote % self._slot_nbytes + addresses[slots]
        return replace(spans, remote=remote.view(np.uint64))


def unsaved_layers(ours: KVCacheReferences, shares: Sequence[RowLayout]) -> Pairing | None:
    """The layers of which no row keeps anything, paired with themselves; None if there are none.

    Such are compressors that keep nothing between their outputs.  A load leaves the whole of their
    blocks: :meth:`Pairing.whole_blocks`.
    """
    saved = {
        (layer.name, layer.chunk) for share in shares for s in share.sections for layer in s.layers
    }
    groups = tuple(
        replace(group, data=tuple(ref for ref in group.data if (ref.layer, ref.chunk) not in saved))
        for group in ours.groups
    )
    left = replace(ours, groups=groups)
    return Pairing.between(left, [left]) if any(group.data for group in groups) else None


_FIRST_SLOT = 2
"""Slot 0 begins so many slots after address 0: the base is not 0, and block 0 is a hole."""


@dataclass(frozen=True, slots=True)
class _ScaledPairing:
    """Groups and sections whose tokens count ``scale`` at a time.

    ``groups`` are those groups' numbers in our memory, ``tokens`` how many unscaled tokens a
    row holds of each section.
    """

    scale: int
    groups: tuple[int, ...]
    tokens: tuple[int, ...]
    pairing: Pairing

    def need(self, need: Need) -> Need:
        """``need`` in scaled tokens."""
        tokens = [need.tokens[group] for group in self.groups]
        for one in tokens:
            if one.stop % self.scale:
                raise FormatError("until", f"a multiple of {self.scale} tokens", one.stop)
        scaled = tuple(range(one.start // self.scale, one.stop // self.scale) for one in tokens)
        return Need(scaled, tuple(need.blocks[group] for group in self.groups))

    def lacking(self, need: Need) -> Need:
        """The same, without opaque blocks of which some tokens are held."""
        whole = self.need(need)
        starts = (-(-need.tokens[group].start // self.scale) for group in self.groups)
        tokens = (range(start, one.stop) for start, one in zip(starts, whole.tokens, strict=True))
        return Need(tuple(tokens), whole.blocks)

    def lent(self, rows: Sequence[int], block_tokens: int) -> list[BlockList]:
        """One block list per section: a row is the last of the blocks in its canonical block."""
        lists = []
        for tokens in self.tokens:
            per_row = block_tokens // tokens
            numbers = [(row + 1) * per_row - 1 for row in rows]
            first, end = min(numbers, default=0), max(numbers, default=-1) + 1
            ids = [0] * (end - first)
            for slot, number in enumerate(numbers):
                ids[number - first] = slot + 1
            lists.append(BlockList(first, tuple(ids)))
        return lists

    def batches(self, need: Need, share: RowLayout) -> Iterator[Need]:
        """``need`` in parts of few runs.  Windows bound a plan themselves, and need the end."""
        size = share.block_tokens
        if share.kind is RowKind.WA:
            yield need
            return
        tokens = size // self.scale
        runs = sum(len(t.nbytes) * (tokens // t.sub_block_tokens) for t in self.pairing.templates)
        step = max(1, _BATCH_RUNS // max(1, runs)) * size
        wanted = [tokens for tokens in need.tokens if tokens]
        held = min((tokens.start for tokens in wanted), default=0)
        end = max((tokens.stop for tokens in wanted), default=0)
        while held < end:
            until = (held // size) * size + step
            yield Need(tuple(_within(tokens, held, until) for tokens in need.tokens), need.blocks)
            held = until


def _within(tokens: range, start: int, stop: int) -> range:
    """Those of ``tokens`` that lie in ``[start, stop)``."""
    start, stop = max(tokens.start, start), min(tokens.stop, stop)
    return range(start, max(start, stop))


def _scaled_pairings(
    ours: KVCacheReferences, share: RowLayout, slot_nbytes: int
) -> Iterator[_ScaledPairing]:
    held = {(layer.name, layer.chunk) for s in share.sections for layer in s.layers}
    kept_groups = [as_kept(group, share.block_tokens) for group in ours.groups]
    for scale in sorted({_section_scale(section) for section in share.sections}):
        numbers, groups = [], []
        for number, group in enumerate(kept_groups):
            data = tuple(
                _by_unit(group, ref)
                for ref in group.data
                if _scale(group, ref) == scale and (ref.layer, ref.chunk) in held
            )
            if data and row_kind(group.kind) is share.kind:
                numbers.append(number)
                groups.append(
                    KVCacheGroupReference(
                        group.kind,
                        _scaled_window(group.kind, group.window, scale),
                        group.block_tokens // scale,
                        data,
                    )
                )
        kept = [n for n, s in enumerate(share.sections) if _section_scale(s) == scale]
        yield _ScaledPairing(
            scale,
            tuple(numbers),
            tuple(share.sections[number].tokens for number in kept),
            Pairing.between(
                KVCacheReferences(ours.tensors, tuple(groups)),
                [_rows_as_references(share, kept, scale, slot_nbytes)],
            ),
        )


def _scale(group: KVCacheGroupReference, ref: KVCacheDataReference) -> int:
    by_block = ref.num_rows is None and group.kind is not AttentionKind.STATE
    return group.block_tokens if by_block else 1


def _section_scale(section: Section) -> int:
    by_block = section.is_opaque and section.kind is not AttentionKind.STATE
    return section.unit_tokens if by_block else 1


def _by_unit(group: KVCacheGroupReference, ref: KVCacheDataReference) -> KVCacheDataReference:
    """An opaque block as one token; others, and states, as they are."""
    if ref.token_nbytes is not None or group.kind is AttentionKind.STATE:
        return ref
    return replace(ref, token_stride=ref.head_nbytes, token_nbytes=ref.head_nbytes)


def _scaled_window(kind: AttentionKind, window: int | None, scale: int) -> int | None:
    """The window, in blocks of ``scale`` tokens, that begins in the same block.

    A position at the start of a block attends to ``window - 1`` tokens before it.

    Raises:
        FormatError: a chunk that begins inside of a block.
    """
    if window is None or scale == 1:
        return window
    if kind is AttentionKind.SLIDING_WINDOW:
        return -(-(window - 1) // scale) + 1
    if window % scale:
        raise FormatError("attention chunk", f"a multiple of the block's {scale} tokens", window)
    return window // scale


def _rows_as_references(
    share: RowLayout, sections: Sequence[int], scale: int, slot_nbytes: int
) -> KVCacheReferences:
    """Rows in slots ``slot_nbytes`` apart; the first is block 1 and begins at two slots' bytes."""
    num_blocks = MAX_ROWS + 1
    tensor = KVCacheTensorReference(slot_nbytes, num_blocks * slot_nbytes, num_blocks, slot_nbytes)
    groups = []
    for number in sections:
        section = share.sections[number]
        data, offset = [], share.starts[number]
        for layer in section.layers:
            nbytes = section.slab_nbytes(layer)
            token_nbytes = None if section.kind is AttentionKind.STATE else layer.unit_nbytes
            data.append(
                KVCacheDataReference(
                    layer.name,
                    layer.chunk,
                    0,
                    offset,
                    section.num_heads * nbytes,
                    section.num_heads,
                    section.first_head,
                    section.head_nbytes,
                    token_nbytes,
                    token_nbytes,
                )
            )
            offset += aligned(nbytes)
        window = _scaled_window(section.kind, section.window, scale)
        tokens = section.tokens // scale
        groups.append(KVCacheGroupReference(section.kind, window, tokens, tuple(data)))
    return KVCacheReferences((tensor,), tuple(groups))
