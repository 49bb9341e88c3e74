"""What an engine says about its prefix cache: events as they come, and as we use them.  Pure.

A payload is the msgpack array ``[ts, events, rank]``.  An event is a map, or from older
vLLM an array of the same fields in the same order, as many as there were in its time::

    {"type": "BlockStored", "block_hashes": [...], ...}     ["BlockStored", [...], ...]

``decode_batch`` tries the whole payload as maps, then as arrays, both typed and in C.  Only
what is neither is read event by event, so that one that nobody can read costs itself alone.

``Stored.token_ids`` and ``Stored.extra_keys`` are not decoded and not copied: each keeps the
payload that it is a part of alive.  Whoever keeps one for long calls ``Raw.copy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, MsgspecError, Raw, Struct, ValidationError
from msgspec.msgpack import Decoder

UNNAMED = "unknown"
"""The medium of an event that names none."""

MAX_NBYTES = 64 << 20
"""Of a payload.  A batch is one step of an engine, in fact some kilobytes."""

MAX_EVENTS = 1_000_000
"""Of a batch; blocks of an event are not more either."""

MAX_GROUP = 127
"""The highest index of a KV cache group that is believed."""

MAX_BLOCK_TOKENS = 1 << 24
"""Tokens of the largest block that is believed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that an engine can serve from now on.

    Attributes:
        hashes: the low 64 bits of each block's hash, as unsigned integers.
        group: index of the KV cache group; None where the engine does not speak of groups.
        medium: lower case, as ``gpu``; ``UNNAMED`` where the event names none.
        block_tokens: tokens of one block.
        kind, window: of the group, where the event tells.
        parent: hash of the block before the first, or None.
        token_ids: msgpack of the tokens from the first block's beginning to the last
            block's end; of a masked store more than those of ``hashes``.
        lora: name of the adapter, or None.
        extra_keys: msgpack of what else went into each hash (LoRA, images, salt), or None.
    """

    hashes: list[int]
    group: int | None
    medium: str
    block_tokens: int
    kind: str | None = None
    window: int | None = None
    parent: int | None = None
    token_ids: Raw | None = None
    lora: str | None = None
    extra_keys: Raw | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that an engine has given up, each as often as it is listed."""

    hashes: list[int]
    group: int | None
    medium: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """An engine's prefix cache is empty."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step of an engine changed.

    Attributes:
        ts: seconds since the epoch, by the engine's clock.
        events: in order.
        rank: data-parallel rank, None where the engine does not say.
        num_undecodable: events that were skipped because they could not be read.
    """

    ts: float
    events: list[Event]
    rank: int | None = None
    num_undecodable: int = 0


class BadBatch(ValueError):
    """Nothing of a payload can be read: says what was expected, and what came."""

    def __init__(self, expected: str, seen: object) -> None:
        super().__init__(f"batch of KV events: expected {expected}, saw {seen}")


def decode_batch(payload: bytes) -> Batch:
    """The batch that a publisher sent.

    Events that cannot be read, be it by type or by value, are left out and counted.  What is
    not msgpack, or nested deeper than Python recurses, costs the whole batch.

    Raises:
        BadBatch: the payload is no batch at all, or larger than any engine's.
    """
    if len(payload) > MAX_NBYTES:
        raise BadBatch(f"at most {MAX_NBYTES} bytes", len(payload))
    for typed in (_MAPS, _ROWS):
        try:
            sent = typed.decode(payload)
            return Batch(sent.ts, [_event(one) for one in sent.events], sent.rank)
        except ValidationError:
            continue  # of the other form, or one of its events is bad
        except _UNREADABLE:
            break
    return _one_by_one(payload)


def _one_by_one(payload: bytes) -> Batch:
    try:
        sent = _ANY.decode(payload)
    except _UNREADABLE as error:
        raise BadBatch("msgpack of [ts, events, rank]", error) from error
    events = [event for raw in sent.events if (event := _event_of(raw)) is not None]
    return Batch(sent.ts, events, sent.rank, len(sent.events) - len(events))


def _event_of(raw: Raw) -> Event | None:
    for typed in (_MAP, _ROW):
        try:
            return _event(typed.decode(raw))
        except _UNREADABLE:
            continue
    return None


# --- the wire's forms ---------------------------------------------------------------------

_Hash = int | Annotated[bytes, Meta(min_length=8)]
_Hashes = Annotated[list[_Hash], Meta(max_length=MAX_EVENTS)]
_Group = Annotated[int, Meta(ge=0, le=MAX_GROUP)] | None
_ABSENT = Raw(b"\xc0")
_LOW = (1 << 64) - 1
_UNREADABLE = (MsgspecError, UnicodeDecodeError, RecursionError)


class _Stored(Struct, gc=False):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: Raw
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
    lora_id: Raw = _ABSENT
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = _ABSENT
    group_idx: _Group = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Annotated[int, Meta(ge=0)] | None = None


class _Removed(Struct, gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: _Group = None


class _Cleared(Struct, gc=False):
    pass


class _StoredMap(_Stored, tag="BlockStored"): ...


class _RemovedMap(_Removed, tag="BlockRemoved"): ...


class _ClearedMap(_Cleared, tag="AllBlocksCleared"): ...


class _StoredRow(_Stored, tag="BlockStored", array_like=True): ...


class _RemovedRow(_Removed, tag="BlockRemoved", array_like=True): ...


class _ClearedRow(_Cleared, tag="AllBlocksCleared", array_like=True): ...


_Map = _StoredMap | _RemovedMap | _ClearedMap
_Row = _StoredRow | _RemovedRow | _ClearedRow


class _Maps(Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[_Map], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class _Rows(Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[_Row], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class _Raws(Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


_MAPS, _ROWS, _ANY = Decoder(_Maps), Decoder(_Rows), Decoder(_Raws)
_MAP: Decoder[_Map] = Decoder(_Map)
_ROW: Decoder[_Row] = Decoder(_Row)
_CLEARED = Cleared()


def _event(sent: _Stored | _Removed | _Cleared) -> Event:
    if isinstance(sent, _Removed):
        return Removed(_all_low(sent.block_hashes), sent.group_idx, _medium(sent.medium))
    if isinstance(sent, _Cleared):
        return _CLEARED
    parent = sent.parent_block_hash
    return Stored(
        _all_low(sent.block_hashes),
        sent.group_idx,
        _medium(sent.medium),
        sent.block_size,
        sent.kv_cache_spec_kind,
        sent.kv_cache_spec_sliding_window,
        None if parent is None else _low(parent),
        _array(sent.token_ids, "token_ids"),
        sent.lora_name,
        _array(sent.extra_keys, "extra_keys"),
    )


def _medium(name: str | None) -> str:
    return UNNAMED if name is None else name.lower()


def _low(block_hash: int | bytes) -> int:
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & _LOW


def _all_low(hashes: Sequence[int | bytes]) -> list[int]:
    try:
        if min(hashes, default=0) >= 0:  # type: ignore[operator]
            return hashes  # type: ignore[return-value]
    except TypeError:
        pass  # bytes among them
    return [_low(one) for one in hashes]


def _array(raw: Raw, field: str) -> Raw | None:
    """What is msgpack of an array; its elements are not looked at."""
    first = memoryview(raw)[0]
    if first == 0xC0:
        return None
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        return raw
    raise ValidationError(f"{field}: expected an array, saw msgpack that begins {first:#x}")
