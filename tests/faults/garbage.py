"""Bytes that no lender or reader should be sent, drawn from a seed.

Each kind is a function of a generator and of a valid frame body; ``KINDS`` is all of them::

    stream    anything on the wire: noise, false lengths, flipped bits, half and repeated frames
    body      whole frames with a right CRC, whose bodies are wrong in any way
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from pdconn.protocol.messages import frame

Spoil = Callable[[Random, bytes], bytes]

ODD: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, -(2**63), 1e308, math.nan, math.inf, True,
    None, "", "x" * 600, "x" * 70_000, "\0", "\ud7ff\U0010ffff", b"", b"\xff" * 16, b"x" * 70_000,
    [], [[]], {}, {"type": "hello"}, {"": None}, [None] * 5000, {str(n): n for n in range(2000)},
)  # fmt: skip
"""What a field can be replaced by."""


def noise(rng: Random, body: bytes) -> bytes:
    del body
    return rng.randbytes(rng.choice((1, 3, 4, 8, 100, 5000)))


def false_length(rng: Random, body: bytes) -> bytes:
    length = rng.choice((0, 1, 3, 4, 5, 1 << 20, (1 << 20) + 5, 1 << 24, 2**31, 2**32 - 1))
    return length.to_bytes(4, "big") + body[: rng.randrange(len(body) + 1)]


def flipped(rng: Random, body: bytes) -> bytes:
    return _flip(rng, frame(body))


def truncated(rng: Random, body: bytes) -> bytes:
    whole = frame(body)
    return whole[: rng.randrange(len(whole))]


def repeated(rng: Random, body: bytes) -> bytes:
    return frame(body) * rng.choice((2, 3, 50))


def framed_noise(rng: Random, body: bytes) -> bytes:
    del body
    return frame(rng.randbytes(rng.choice((0, 1, 10, 1000))))


def flipped_body(rng: Random, body: bytes) -> bytes:
    return frame(_flip(rng, body))


def truncated_body(rng: Random, body: bytes) -> bytes:
    return frame(body[: rng.randrange(len(body))])


def nested(rng: Random, body: bytes) -> bytes:
    del body
    opening = rng.choice((b"\x91", b"\x81\xa1a", b"\x91\x81\xa4type", b"\xdd\0\0\0\x01"))
    return frame(opening * rng.choice((100, 5000, 100_000)) + b"\xc0")


def crowded(rng: Random, body: bytes) -> bytes:
    """Thousands of messages, or none where billions are promised."""
    message = body[1:] if body[:1] == b"\x91" else body
    count = rng.choice((100, 2000, 4096, 4097, 50_000))
    count = min(count, (1 << 20) // len(message) - 1)
    promised = rng.choice((count, count, 2**32 - 1))
    return frame(b"\xdd" + promised.to_bytes(4, "big") + message * count)


def promising(rng: Random, body: bytes) -> bytes:
    """Text, bytes, a map or an extension of 4 GiB that does not follow."""
    del body
    return frame(b"\x91" + rng.choice((b"\xdb", b"\xc6", b"\xdf", b"\xc9")) + b"\xff\xff\xff\xff")


def altered(rng: Random, body: bytes) -> bytes:
    """A valid message with one or two parts replaced, removed, added or renamed."""
    tree = msgspec.msgpack.decode(body)
    for _ in range(rng.choice((1, 1, 2))):
        tree = alter(rng, tree)
    return frame(msgspec.msgpack.encode(tree))


STREAM: tuple[Spoil, ...] = (noise, false_length, flipped, truncated, repeated)
BODY: tuple[Spoil, ...] = (
    framed_noise, flipped_body, truncated_body, nested, crowded, promising,
    altered, altered, altered, altered,
)  # fmt: skip
KINDS = STREAM + BODY


def _flip(rng: Random, data: bytes) -> bytes:
    corrupted = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8))):
        corrupted[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(corrupted)


def alter(rng: Random, tree: Any) -> Any:
    """Go down at random, and do something there."""
    if isinstance(tree, dict) and tree:
        return _alter_one(rng, tree, rng.choice(list(tree)))
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        at = rng.randrange(len(tree))
        return [*tree[:at], alter(rng, tree[at]), *tree[at + 1 :]]
    if isinstance(tree, int) and rng.random() < 0.5:
        near = rng.choice((tree + 1, tree - 1, tree * 2, tree // 2, -tree, tree ^ 64))
        return max(-(2**63), min(near, 2**64 - 1))
    return rng.choice(ODD)


def _alter_one(rng: Random, tree: dict[Any, Any], key: Any) -> dict[Any, Any]:
    """Remove, rename or replace a field, or add one."""
    what = rng.random()
    if what < 0.1:
        return {name: value for name, value in tree.items() if name != key}
    if what < 0.15:
        return {**tree, "more": rng.choice(ODD)}
    if what < 0.2:
        return {(f"{name}_" if name == key else name): value for name, value in tree.items()}
    return {**tree, key: alter(rng, tree[key])}
