"""KV events of an engine's prefix cache, and their decoder.  Pure.

A payload is the msgpack array ``[ts, events, rank]``.  An event is a map, or from older vLLM an
array of the same fields in the same order, perhaps truncated::

    {"type": "BlockStored", "block_hashes": [...], ...}     ["BlockStored", [...], ...]

``decode_batch`` leaves a payload to the compiled decoder, if there is one
(:mod:`pdconn.router.prefix.compiled`).  What that doesn't take, as it is not what vLLM writes, is
tried as maps, then as arrays, both typed.  A payload that is neither is decoded event by event, so
that a malformed event costs only itself.

``Stored.token_ids`` and ``Stored.extra_keys`` are neither decoded nor copied: each keeps its
payload alive; ``Raw.copy`` avoids that.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, MsgspecError, Raw, Struct, ValidationError
from msgspec.msgpack import Decoder

from pdconn.router.prefix.compiled import extension
from pdconn.router.prefix.groups import REMOTE
from transport.errors import FieldError

UNNAMED = "unknown"
"""The medium of an event without one."""

MAX_NBYTES = 64 << 20
"""Maximum bytes of a payload.  A batch is one step of an engine: usually some kilobytes."""

MAX_EVENTS = 1_000_000
"""Maximum events of a batch, and blocks of an event."""

MAX_GROUP = 127
"""The highest valid index of a KV cache group."""

MAX_BLOCK_TOKENS = 1 << 24
"""Tokens of the largest valid block."""


class Stored(Struct, frozen=True, gc=False):
    """Blocks that an engine has stored.

    Attributes:
        hashes: the low 64 bits of each block's hash, as unsigned integers.  Decoded ones are an
            array, which the index takes as it is.
        group: index of the KV cache group; None if the engine does not report groups.
        medium: in lower case, such as ``gpu``; ``UNNAMED`` if missing; ``REMOTE`` for that
            locality, since another host's disk is not local storage.
        block_tokens: tokens of one block.
        kind, window: of the group, if reported.
        parent: hash of the block before the first, or None.
        token_ids: msgpack of the tokens from the beginning of the first block to the end of the
            last; a masked store has more than those of ``hashes``.
        lora: name of the adapter, or None.
        extra_keys: msgpack of the other inputs of each hash (LoRA, images, salt), or None.
    """

    hashes: Sequence[int]
    group: int | None
    medium: str
    block_tokens: int
    kind: str | None = None
    window: int | None = None
    parent: int | None = None
    token_ids: Raw | None = None
    lora: str | None = None
    extra_keys: Raw | None = None

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens in ``token_ids``; None without any."""
        return None if self.token_ids is None else _array_length(memoryview(self.token_ids))


class Removed(Struct, frozen=True, gc=False):
    """Blocks that an engine has removed in a row, listed once per removed copy."""

    hashes: Sequence[int]
    group: int | None
    medium: str


class Cleared(Struct, frozen=True, gc=False):
    """An engine's prefix cache was cleared."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one step of an engine.

    Attributes:
        ts: seconds since the epoch, by the engine's clock.
        events: in order.
        rank: data-parallel rank; None if not reported.
        num_undecodable: events that were skipped because they could not be decoded.
    """

    ts: float
    events: list[Event]
    rank: int | None = None
    num_undecodable: int = 0


class BadBatch(FieldError, ValueError):
    """No part of a payload can be decoded."""


def decode_batch(payload: bytes, max_nbytes: int = MAX_NBYTES) -> Batch:
    """Decode a published batch.

    Events that cannot be decoded, by type or by value, are skipped and counted.  A payload that is
    not msgpack, or nested deeper than Python's recursion limit, fails as a whole.

    Raises:
        BadBatch: the payload is not a batch, or too long.
    """
    if len(payload) > max_nbytes:
        raise BadBatch(_FIELD, f"at most {max_nbytes} bytes", len(payload))
    if extension.module is not None:
        decoded = extension.module.decode(payload, Stored, Removed, _CLEARED, Raw)
        if decoded is not None:
            return Batch(*decoded)
    for typed in (_MAPS, _ROWS):
        try:
            sent = typed.decode(payload)
            return Batch(sent.ts, _events(sent.events), sent.rank)
        except ValidationError:
            continue  # the other form, or one event is malformed
        except _UNREADABLE:
            break
    return _one_by_one(payload)


def _one_by_one(payload: bytes) -> Batch:
    try:
        sent = _ANY.decode(payload)
    except _UNREADABLE as error:
        raise BadBatch(_FIELD, "msgpack of [ts, events, rank]", error) from error
    events = [event for raw in sent.events if (event := _event_of(raw)) is not None]
    return Batch(sent.ts, events, sent.rank, len(sent.events) - len(events))


def _event_of(raw: Raw) -> Event | None:
    for typed in (_MAP, _ROW):
        try:
            return _event(typed.decode(raw))
        except _UNREADABLE:
            continue
    return None


# --- as encoded       ---------------------------------------------------------------------

_Hash = int | Annotated[bytes, Meta(min_length=8)]
_Hashes = Annotated[list[_Hash], Meta(max_length=MAX_EVENTS)]
_Group = Annotated[int, Meta(ge=0, le=MAX_GROUP)] | None
_FIELD = "batch of KV events"
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
    locality: str | None = None


class _Removed(Struct, gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: _Group = None
    locality: str | None = None


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


def _events(sent: Sequence[_Stored | _Removed | _Cleared]) -> list[Event]:
    """The events in order; removals in a row from one group and medium are one event.

    vLLM reports each evicted block by itself, which is most of the events of a full cache.
    """
    events: list[Event] = []
    first: _Removed | None = None
    hashes: list[int | bytes] = []
    for one in sent:
        if isinstance(one, _Removed):
            if (
                first is not None
                and one.group_idx == first.group_idx
                and one.medium == first.medium
                and one.locality == first.locality
            ):
                hashes += one.block_hashes
                continue
            if first is not None:
                events.append(Removed(_all_low(hashes), first.group_idx, _medium(first)))
            first, hashes = one, one.block_hashes
            continue
        if first is not None:
            events.append(Removed(_all_low(hashes), first.group_idx, _medium(first)))
            first = None
        events.append(_event(one))
    if first is not None:
        events.append(Removed(_all_low(hashes), first.group_idx, _medium(first)))
    return events


def _event(sent: _Stored | _Removed | _Cleared) -> Event:
    if isinstance(sent, _Removed):
        return Removed(_all_low(sent.block_hashes), sent.group_idx, _medium(sent))
    if isinstance(sent, _Cleared):
        return _CLEARED
    parent = sent.parent_block_hash
    return Stored(
        _all_low(sent.block_hashes),
        sent.group_idx,
        _medium(sent),
        sent.block_size,
        sent.kv_cache_spec_kind,
        sent.kv_cache_spec_sliding_window,
        None if parent is None else _low(parent),
        _array(sent.token_ids, "token_ids"),
        sent.lora_name,
        _array(sent.extra_keys, "extra_keys"),
    )


def _medium(sent: _Stored | _Removed) -> str:
    if sent.locality is not None and sent.locality.lower() == REMOTE:
        return REMOTE
    return UNNAMED if sent.medium is None else sent.medium.lower()


def _low(block_hash: int | bytes) -> int:
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & _LOW


def _all_low(hashes: Sequence[int | bytes]) -> Sequence[int]:
    try:
        return array("Q", hashes)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return array("Q", map(_low, hashes))  # some are bytes, or negative


def _array(raw: Raw, field: str) -> Raw | None:
    """Msgpack of an array, whose elements are not decoded; None for nil."""
    first = memoryview(raw)[0]
    if first == 0xC0:
        return None
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        return raw
    raise ValidationError(f"{field}: expected an array, got msgpack that begins {first:#x}")


def _array_length(encoded: memoryview) -> int:
    """The length of a msgpack array, from its first bytes."""
    first = encoded[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    return int.from_bytes(encoded[1:3] if first == 0xDC else encoded[1:5], "big")
