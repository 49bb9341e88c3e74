"""Names of rows: a chain of keys over tokens, and where in it a row stands.

A key is a digest of a canonical block's tokens, of what else its KV depends on (adapter,
media, cache salt), and of the key before it, so equal keys mean equal prefixes::

    key[i] = SHA-256(key[i-1] | tokens of block i | extra of block i)[:16]

The chain is ours and not vLLM's, which depends on the engine's block size and hash seed.  What
is equal for every prompt of a model (weights, dtype, rotary embedding) is in the *namespace*.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pdconn.store.errors import FormatError

KEY_NBYTES = 16
_AT_ONCE = 4096
NO_KEY = bytes(KEY_NBYTES)
"""The parent of a prompt's first row."""

_FILE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.(\d{1,8})")


class RowKind(StrEnum):
    """Which layers a row holds."""

    FA = "fa"
    WA = "wa"


@dataclass(frozen=True, slots=True, order=True)
class RowName:
    """A row of one namespace: tokens ``[index * block_tokens, (index + 1) * block_tokens)``.

    ``key`` and ``parent`` are 16 bytes; ``parent`` is the key of block ``index - 1``.
    """

    kind: RowKind
    key: bytes
    parent: bytes
    index: int

    def __post_init__(self) -> None:
        for field in ("key", "parent"):
            if len(getattr(self, field)) != KEY_NBYTES:
                raise FormatError(field, f"{KEY_NBYTES} bytes", getattr(self, field))
        if self.index < 0:
            raise FormatError("index", "0 or more", self.index)

    @property
    def file_name(self) -> str:
        """The row's name among files or objects of its kind: a listing alone tells the chain."""
        return f"{self.key.hex()}.{self.parent.hex()}.{self.index}"

    @classmethod
    def parse(cls, kind: RowKind, file_name: str) -> RowName | None:
        """The row of that file name, or None for another file."""
        match = _FILE.fullmatch(file_name)
        if match is None:
            return None
        key, parent, index = match.groups()
        return cls(kind, bytes.fromhex(key), bytes.fromhex(parent), int(index))


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of a prompt's whole canonical blocks, in order."""

    block_tokens: int
    keys: tuple[bytes, ...] = ()

    def name(self, kind: RowKind, index: int) -> RowName:
        """The row of block ``index``."""
        parent = self.keys[index - 1] if index else NO_KEY
        return RowName(kind, self.keys[index], parent, index)

    def extended(
        self, tokens: Sequence[int], until: int | None = None, extras: Sequence[bytes] = ()
    ) -> Chain:
        """The chain of ``tokens[:until]``, of which ours covers the beginning already.

        A list of ids is converted a few thousand at a time: a thread that hashes a long prompt
        must not keep the interpreter from the engine's thread for milliseconds.

        Args:
            tokens: ids of the whole prompt (and answer) from its first token on.
            until: how many of them; all for None.
            extras: what else block i's KV depends on, at i; b"" where there is nothing more.
        """
        size = self.block_tokens
        made = list(self.keys)
        last = min(len(tokens), len(tokens) if until is None else until) // size
        parent = made[-1] if made else NO_KEY
        while (first := len(made)) < last:
            stop = min(last, first + max(1, _AT_ONCE // size))
            ids = np.asarray(tokens[first * size : stop * size], dtype="<u4").tobytes()
            for index in range(first, stop):
                start = (index - first) * 4 * size
                digest = hashlib.sha256(parent)
                digest.update(ids[start : start + 4 * size])
                if index < len(extras):
                    digest.update(extras[index])
                parent = digest.digest()[:KEY_NBYTES]
                made.append(parent)
        return Chain(size, tuple(made)) if len(made) > len(self.keys) else self
