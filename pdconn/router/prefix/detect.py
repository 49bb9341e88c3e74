"""Detects an engine's hash scheme from the first blocks that it stores.  Pure.

An event carries tokens and their hashes, so schemes can be tried.  Only blocks at the beginning of
a plain-text prompt are usable: for others, the preceding tokens or the extra keys are unknown.

A group's blocks may be coarser than the hashed ones, as ``hash_block_size`` divides the blocks of
every group; the hash of a coarse block is the last fine one in it (vLLM's
``BlockHashListWithBlockSize``)::

    hashed blocks   a   b   c   d         block_tokens / 2
    the group's     └── b   └── d         block_tokens
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from pdconn.router.prefix.hashing import (
    ALGORITHMS,
    BadPrompt,
    HashScheme,
    as_array,
    chain,
    external,
)
from pdconn.router.prefix.kv_events import Stored

MOST_PARTS = 1024
"""Maximum hashed blocks per group block: bounds the work that an event can cause."""

MOST_BLOCK_TOKENS = 8192
MOST_NBYTES = 1 << 20
"""Limits of a block, and of the tokens of an event that is tried: both bound the time."""

_TOKENS = msgspec.msgpack.Decoder(list[int])
_NO_KEYS = msgspec.msgpack.Decoder(list[None] | None)


def detect(stored: Stored, seed: str | None) -> HashScheme | None:
    """The scheme by which every block of an event has the hash in the event.

    Args:
        stored: blocks at the beginning of a prompt, without adapter or extra keys.
        seed: ``PYTHONHASHSEED`` of the engine; None if unset: then non-cryptographic algorithms are
            not tried, since their root is random.

    Returns:
        None where no scheme agrees, and for unusable events: other blocks, masked events (with
            fewer hashes than blocks), or events without tokens.
    """
    tokens = _plain_tokens(stored)
    if tokens is None:
        return None
    schemes = _candidates(stored.block_tokens, seed)
    return next((scheme for scheme in schemes if _agrees(scheme, tokens, stored)), None)


def can_tell(stored: Stored) -> bool:
    """Whether an event's hashes depend only on the tokens that it carries."""
    return _plain_tokens(stored) is not None


def _plain_tokens(stored: Stored) -> NDArray[np.int32] | None:
    """The tokens of a usable event, else None."""
    if stored.parent is not None or stored.lora is not None or stored.token_ids is None:
        return None
    if stored.block_tokens > MOST_BLOCK_TOKENS or len(memoryview(stored.token_ids)) > MOST_NBYTES:
        return None
    try:
        _NO_KEYS.decode(stored.extra_keys or Raw(b"\xc0"))
        tokens = as_array(_TOKENS.decode(stored.token_ids))
    except (msgspec.DecodeError, BadPrompt):
        return None
    whole = stored.block_tokens > 0 and len(tokens) == len(stored.hashes) * stored.block_tokens
    return tokens if whole and len(stored.hashes) else None


def _candidates(block_tokens: int, seed: str | None) -> Iterator[HashScheme]:
    """Coarsest first: an engine with one group, or equal ones, hashes whole blocks."""
    sizes = [block_tokens // n for n in range(1, MOST_PARTS + 1) if block_tokens % n == 0]
    names = [name for name, row in ALGORITHMS.items() if seed is not None or not row.secret_root]
    return (HashScheme(name, size, seed) for size in sizes for name in names)


def _agrees(scheme: HashScheme, tokens: NDArray[np.int32], stored: Stored) -> bool:
    """Whether all hashes match the scheme.  Most schemes fail at the first block."""
    per_block = stored.block_tokens // scheme.block_tokens
    begun = chain(scheme, tokens[: stored.block_tokens])
    if external(begun[-1]) != stored.hashes[0]:
        return False
    hashes = chain(scheme, tokens, known=begun)[per_block - 1 :: per_block]
    return [external(full) for full in hashes] == list(stored.hashes)
