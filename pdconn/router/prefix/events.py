"""What an engine says about its prefix cache: events as they come, and as we use them.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Raw

UNNAMED = "unknown"
"""The medium of an event that names none."""


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
