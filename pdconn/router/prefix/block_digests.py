"""Blocks of a prompt in the access log: the router writes, ``pdconn plan --trace`` reads.  Pure.

Each digest is the end of an engine's block hash, and so depends on all tokens before it::

    256:5d0f3a91c2e4b70a96d1ff02    tokens between two digests, and the digests, of 12 digits each

Of 48 bits two different blocks among a million are taken for equal once in 500 traces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

BLOCK_TOKENS = 256
"""The least tokens between two digests: a row of a store."""
_DIGITS = 12
_BLOCKS = re.compile(rf"([1-9]\d{{0,7}}):((?:[0-9a-f]{{{_DIGITS}}})*)")


def encode_blocks(hashes: Sequence[int], block_tokens: int) -> str:
    """The text for block hashes of a prompt, in order, of ``block_tokens`` tokens each.

    >>> encode_blocks([1, 2, 3], 128)
    '256:000000000002'
    """
    every = -(-BLOCK_TOKENS // block_tokens)
    low = (1 << (4 * _DIGITS)) - 1
    digits = "".join(f"{one & low:0{_DIGITS}x}" for one in hashes[every - 1 :: every])
    return f"{every * block_tokens}:{digits}"


def decode_blocks(text: str) -> tuple[int, list[int]]:
    """Tokens between two digests, and the digests.

    Raises:
        ValueError: with what was expected.

    >>> decode_blocks("256:000000000002")
    (256, [2])
    """
    found = _BLOCKS.fullmatch(text)
    if found is None:
        raise ValueError(f"TOKENS:DIGESTS of {_DIGITS} hexadecimal digits each")
    digits = found[2]
    ids = [int(digits[at : at + _DIGITS], 16) for at in range(0, len(digits), _DIGITS)]
    return int(found[1]), ids
