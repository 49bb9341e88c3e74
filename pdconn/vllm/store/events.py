"""KV events of stored rows, in vLLM's own block hashes, so that routers count stored prefixes.

A row has a key of ours; a router knows prompts by vLLM's block hashes.  Both are known while a
prompt's request is in the engine, so hashes are noted when rows are saved or served, and announced
when the rows are there::

    saving ──► noted ──committed──► announced (BlockStored) ──gone, forgotten, reset──► BlockRemoved
    serving ──────────────────────► announced

There is one BlockStored per row and KV cache group, so that its tokens show at which boundaries a
stored prefix can end.  Of a windowed group it names the blocks of the tail that the row keeps, and
of a compressor's its whole window: the row keeps less of it, and does not need the rest.  Of
states it names the last block.

Used on the engine's thread.  Announcements wait in a queue, of which each step takes a few rows.
Beyond ``MAX_ROWS`` rows the least recently used one is announced as removed and forgotten: a row
that a router still counts after it is gone attracts prompts that are then computed here.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm import envs
from vllm.distributed.kv_events import (
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from pdconn.store.format.row import RowKind, RowName, Section, StoreLayout
from registration.references import AttentionKind

MAX_ROWS = 65_536
"""Rows that are announced and not removed, 0.4 KB each with blocks of 16 tokens."""
MAX_NOTED = 4096
"""Rows that are being saved, with their tokens: up to 10 KB each."""
ROWS_AT_ONCE = 64
"""Rows that one step announces; the rest waits for the next step."""
AGAIN_S = 600.0
"""A row that is served is announced again after so long: a router may have started meanwhile."""

_BITS = {RowKind.FA: 1, RowKind.WA: 2}
_Hash = int | bytes


@dataclass(frozen=True, slots=True)
class EventGroup:
    """A KV cache group whose blocks rows hold.

    Attributes:
        group: vLLM's index.
        kind, window: as vLLM's events name them.
        block_tokens: of one of its blocks.
        row: the kind of rows that hold it.
        kept_tokens: tokens of the row's canonical block that the row stands for, the last ones.
    """

    group: int
    kind: str
    window: int | None
    block_tokens: int
    row: RowKind
    kept_tokens: int

    def num_blocks(self) -> int:
        """Blocks that a row holds, the last one or ones of its canonical block."""
        return -(-self.kept_tokens // self.block_tokens)


def event_groups(
    kv_cache_config: Any, layout: StoreLayout, hash_block_tokens: int
) -> tuple[EventGroup, ...]:
    """The groups of vLLM's ``KVCacheConfig`` that rows hold.

    Left out are groups that are not cached by hash, and those whose blocks do not fit rows.
    """
    found = []
    for number in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[number]
        spec = group.kv_cache_spec
        window = get_kv_cache_spec_sliding_window(spec)
        sections = list(_sections_of(layout, frozenset(group.layer_names)))
        fits = not layout.block_tokens % spec.block_size and not spec.block_size % hash_block_tokens
        if not (sections or window) or not fits:
            continue
        reach = min(layout.block_tokens, window - 1) if window else 0
        kept = min((section.tokens for section in sections), default=0)
        if any(section.kind is AttentionKind.STATE for section in sections):
            kept = spec.block_size
        has_rows = any(section.row_kind is RowKind.WA for section in sections)
        found.append(
            EventGroup(
                number,
                get_kv_cache_spec_kind(spec).value,
                window,
                spec.block_size,
                RowKind.WA if has_rows or (not sections and layout.wa) else RowKind.FA,
                max(reach, kept),
            )
        )
    return tuple(found)


def _sections_of(layout: StoreLayout, layers: frozenset[str]) -> Iterator[Section]:
    for sections in (layout.fa.sections, layout.wa.sections if layout.wa is not None else ()):
        for section in sections:
            if any(layer.name in layers for layer in section.layers):
                yield section


@dataclass(slots=True)
class _Noted:
    """What a row's events say; ``waiting`` are the kinds that are being saved.

    ``extra_keys`` are those of the row's blocks by their size; None: no block has any.
    """

    hashes: Sequence[_Hash]
    parent: _Hash | None
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: dict[int, list[Any]] | None
    waiting: int = 0


@dataclass(slots=True)
class _Announced:
    """A row that was announced; ``kinds`` are bits, ``at`` is when, in the clock's seconds."""

    hashes: Sequence[_Hash]
    kinds: int = 0
    at: float = field(default=0.0)


class StoreEvents:
    """KV events of one engine's store.

    Args:
        groups: of :func:`event_groups`.
        row_tokens: tokens of a canonical block.
        hash_block_tokens: vLLM's ``hash_block_size``; it divides ``row_tokens``.
        locality: ``LOCAL`` or ``REMOTE``: where the rows are, as events name it.
        clock: seconds that never go back.
        max_rows: the most rows that are announced and not removed.
    """

    def __init__(
        self,
        groups: Sequence[EventGroup],
        *,
        row_tokens: int,
        hash_block_tokens: int,
        locality: str | None,
        clock: Callable[[], float],
        max_rows: int = MAX_ROWS,
    ) -> None:
        self._groups = {kind: [one for one in groups if one.row is kind] for kind in RowKind}
        self._row_tokens, self._hash_tokens = row_tokens, hash_block_tokens
        self._hashes_in_row = row_tokens // hash_block_tokens
        self._locality, self._clock, self._max_rows = locality, clock, max_rows
        self._as_int = bool(envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)
        self._noted: OrderedDict[bytes, _Noted] = OrderedDict()
        self._announced: OrderedDict[bytes, _Announced] = OrderedDict()
        self._work: deque[Callable[[list[KVCacheEvent]], int]] = deque()

    def __len__(self) -> int:
        """Rows that are announced, each key once."""
        return len(self._announced)

    # On the engine's thread

    def note_saving(self, request: Any, names: Sequence[RowName]) -> None:
        """Announce these rows of vLLM's ``Request`` once they are committed."""
        for name in names:
            noted = self._noted.get(name.key) or self._note(request, name.index)
            if noted is not None:
                noted.waiting |= _BITS[name.kind]
                self._noted[name.key] = noted
                if len(self._noted) > MAX_NOTED:
                    self._noted.popitem(last=False)

    def note_hit(self, request: Any, names: Sequence[RowName]) -> None:
        """Announce these rows, from which a hit of ``request`` is loaded.

        ``names`` should be all rows that the hit depends on: FA rows from the first on, and the
        WA rows of its boundary.
        """
        before = self._clock() - AGAIN_S
        fresh = []
        for name in reversed(names):  # so that the beginning of a prompt is forgotten last
            known = self._announced.get(name.key)
            if known is not None:
                self._announced.move_to_end(name.key)
            if known is None or not known.kinds & _BITS[name.kind] or known.at <= before:
                fresh.append(name)
        fresh.reverse()
        for some in _parts(fresh):
            self._work.append(partial(self._serve, request, some))

    def note_reset(self, *, engine_announces: bool) -> None:
        """Forget all rows after a reset: they are not looked up any more.

        Args:
            engine_announces: vLLM's reset succeeded, so that its block pool publishes
                AllBlocksCleared, which covers every medium.  A reset that fails publishes nothing:
                then all rows are announced as removed.
        """
        self._work.clear()
        self._noted.clear()
        if engine_announces:
            self._announced.clear()
        for some in _parts(list(self._announced)):
            self._work.append(partial(self._forget, some))

    def next_events(self) -> list[KVCacheEvent]:
        """The next events, of about ``ROWS_AT_ONCE`` rows; the rest comes with later calls."""
        events: list[KVCacheEvent] = []
        room = ROWS_AT_ONCE
        while room > 0 and self._work:
            room -= self._work.popleft()(events)
        while len(self._announced) > self._max_rows:
            self._forget([next(iter(self._announced))], events)
        return events

    def note_rows(self, committed: Sequence[RowName], gone: Sequence[RowName]) -> None:
        """Announce rows that are there now, and rows gone: evicted, missing or damaged."""
        for some in _parts(committed):
            self._work.append(partial(self._commit, some))
        for some in _parts(gone):
            self._work.append(partial(self._remove, some))

    # Work of a step, on the engine's thread

    def _commit(self, names: Sequence[RowName], events: list[KVCacheEvent]) -> int:
        now = self._clock()
        for name in names:
            noted = self._noted.get(name.key)
            if noted is None or not noted.waiting & _BITS[name.kind]:
                continue
            noted.waiting ^= _BITS[name.kind]
            if not noted.waiting:
                del self._noted[name.key]
            self._announce(name, noted, now, events)
        return len(names)

    def _serve(self, request: Any, names: Sequence[RowName], events: list[KVCacheEvent]) -> int:
        now = self._clock()
        made: dict[int, _Noted | None] = {}
        for name in names:
            if name.index not in made:
                made[name.index] = self._note(request, name.index)
            noted = made[name.index]
            if noted is not None:
                self._announce(name, noted, now, events)
        return len(names)

    def _remove(self, names: Sequence[RowName], events: list[KVCacheEvent]) -> int:
        gone: dict[int, list[_Hash]] = {}
        for name in names:
            known = self._announced.get(name.key)
            if known is None or not known.kinds & _BITS[name.kind]:
                continue
            known.kinds ^= _BITS[name.kind]
            if not known.kinds:
                del self._announced[name.key]
            for group in self._groups[name.kind]:
                gone.setdefault(group.group, []).extend(self._blocks(group, known.hashes))
        events.extend(self._removed(group, hashes) for group, hashes in gone.items())
        return len(names)

    def _forget(self, keys: Sequence[bytes], events: list[KVCacheEvent]) -> int:
        gone: dict[int, list[_Hash]] = {}
        for key in keys:
            known = self._announced.pop(key, None)
            for kind, bit in _BITS.items():
                if known is not None and known.kinds & bit:
                    for group in self._groups[kind]:
                        gone.setdefault(group.group, []).extend(self._blocks(group, known.hashes))
        events.extend(self._removed(group, hashes) for group, hashes in gone.items())
        return len(keys)

    def _announce(
        self, name: RowName, noted: _Noted, now: float, events: list[KVCacheEvent]
    ) -> None:
        known = self._announced.get(name.key)
        if known is None:
            hashes: Any = noted.hashes
            known = self._announced[name.key] = _Announced(
                array("Q", hashes) if self._as_int else hashes
            )
        known.kinds |= _BITS[name.kind]
        known.at = now
        for group in self._groups[name.kind]:
            events.append(self._stored(group, noted))

    # Events

    def _note(self, request: Any, index: int) -> _Noted | None:
        """What events say of the request's canonical block; None before it has its hashes."""
        first, count = index * self._hashes_in_row, self._hashes_in_row
        hashes = request.block_hashes[first : first + count]
        if len(hashes) < count:
            return None
        parent = self._external(request.block_hashes[first - 1 : first])[0] if index else None
        start = index * self._row_tokens
        tokens = request.all_token_ids[start : start + self._row_tokens]
        lora = request.lora_request
        extra_keys = None
        if lora is not None or request.mm_features or (not index and request.cache_salt):
            extra_keys = self._extra_keys(request, start)
        if lora is None:
            return _Noted(self._external(hashes), parent, tokens, None, None, extra_keys)
        external = self._external(hashes)
        return _Noted(external, parent, tokens, lora.adapter_id, lora.name, extra_keys)

    def _external(self, hashes: Sequence[bytes]) -> Sequence[_Hash]:
        """As vLLM publishes them: the low 64 bits, or the bytes themselves."""
        if not self._as_int:
            return hashes
        words = len(hashes[0]) // 8
        if len(hashes[0]) % 8:
            return [int.from_bytes(one[-8:], "big") for one in hashes]
        return struct.unpack(f">{words * len(hashes)}Q", b"".join(hashes))[words - 1 :: words]

    def _extra_keys(self, request: Any, start: int) -> dict[int, list[Any]]:
        """Other inputs of the hashes of the blocks from token ``start`` on, by block size."""
        found = {}
        sizes = {group.block_tokens for groups in self._groups.values() for group in groups}
        for size in sizes:
            keys, media = [], 0
            for at in range(start, start + self._row_tokens, size):
                key, media = generate_block_hash_extra_keys(request, at, at + size, media)
                keys.append(key)
            found[size] = to_event_extra_keys(keys) or []
        return found

    def _blocks(self, group: EventGroup, hashes: Sequence[_Hash]) -> list[_Hash]:
        """Hashes of the group's blocks that a row holds."""
        every = group.block_tokens // self._hash_tokens
        blocks = hashes[every - 1 :: every]
        return list(blocks[len(blocks) - group.num_blocks() :])

    def _stored(self, group: EventGroup, noted: _Noted) -> BlockStored:
        count, size = group.num_blocks(), group.block_tokens
        skipped = self._row_tokens - count * size
        parent, tokens = noted.parent, noted.tokens
        if skipped:
            parent, tokens = noted.hashes[skipped // self._hash_tokens - 1], tokens[skipped:]
        extra_keys: list[Any] = [None] * count
        if noted.extra_keys is not None:
            extra_keys = noted.extra_keys[size][-count:]
        return BlockStored(
            block_hashes=self._blocks(group, noted.hashes),
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=size,
            lora_id=noted.lora_id,
            medium=MEDIUM_STORAGE,
            lora_name=noted.lora_name,
            extra_keys=extra_keys,
            group_idx=group.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
            locality=self._locality,
        )

    def _removed(self, group: int, hashes: list[_Hash]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=hashes, medium=MEDIUM_STORAGE, group_idx=group, locality=self._locality
        )


def _parts(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """``rows`` in parts that one step can announce."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[first : first + ROWS_AT_ONCE]
