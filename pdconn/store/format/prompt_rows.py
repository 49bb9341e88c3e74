"""The rows of a prompt: their keys, where generation can resume, and which rows that takes.

A key is a digest of a canonical block's tokens, of what else its KV depends on (adapter,
media, cache salt), and of the key before it, so equal keys mean equal prefixes::

    key[i] = SHA-256(key[i-1] | tokens of block i | extra of block i)[:16]

With a secret it is an HMAC of these (:mod:`pdconn.store.format.row_names`).

The chain is ours and not vLLM's, which depends on the engine's block size and hash seed.  What
is equal for every prompt of a model (weights, dtype, rotary embedding) is in the *namespace*.

A boundary ``b`` is the end of a canonical block.  To resume there, FA rows of every block
before it are needed, and of each windowed section the tokens that position ``b`` attends to::

    window 600, block_tokens 256, b = 1024: tokens 425 to 1023
    WA rows   [  1  ][  2  ][  3  ]      row 3 is saved last: it implies that the others are there

A boundary at a multiple of a chunk needs no row of chunked sections.  Of states it needs what its
own row holds.  A compressed section (several tokens in a unit) needs ``b`` to be a multiple of its
unit.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pdconn.store.format.footer import row_nbytes
from pdconn.store.format.row import (
    KEY_NBYTES,
    NO_KEY,
    RowKind,
    RowLayout,
    RowName,
    Section,
    StoreLayout,
)
from registration.references import AttentionKind

_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of a prompt's whole canonical blocks, in order.

    Attributes:
        tenant: the label of the prompt's tenant; none for prompts of nobody in particular.
        secret: what keys are made with; none where they are plain digests.
    """

    block_tokens: int
    keys: tuple[bytes, ...] = ()
    tenant: bytes = b""
    secret: bytes = field(default=b"", repr=False)

    def name(self, kind: RowKind, index: int) -> RowName:
        """The row of block ``index``."""
        parent = self.keys[index - 1] if index else NO_KEY
        return RowName(kind, self.keys[index], parent, index, self.tenant)

    def extended(
        self, tokens: Sequence[int], until: int | None = None, extras: Sequence[bytes] = ()
    ) -> Chain:
        """The chain of ``tokens[:until]``, of which this one covers the beginning.

        Args:
            tokens: ids of the whole prompt (and answer) from its first token on.
            until: how many of them; all for None.
            extras: what else block i's KV depends on, at i; b"" where there is nothing more.
        """
        size = self.block_tokens
        made = list(self.keys)
        last = min(len(tokens), len(tokens) if until is None else until) // size
        parent = made[-1] if made else NO_KEY
        # A few thousand ids at a time: converting a long list in one call holds the interpreter's
        # lock for milliseconds, for which the engine's thread would wait.
        while (first := len(made)) < last:
            stop = min(last, first + max(1, _AT_ONCE // size))
            ids = np.asarray(tokens[first * size : stop * size], dtype="<u4").tobytes()
            for index in range(first, stop):
                start = (index - first) * 4 * size
                digest = self._digest_after(parent)
                digest.update(ids[start : start + 4 * size])
                if index < len(extras):
                    digest.update(extras[index])
                parent = digest.digest()[:KEY_NBYTES]
                made.append(parent)
        return replace(self, keys=tuple(made)) if len(made) > len(self.keys) else self

    def _digest_after(self, parent: bytes) -> Any:
        if self.secret:
            return hmac.new(self.secret, parent, "sha256")
        return hashlib.sha256(parent)


IsThere = Callable[[RowKind, int], bool]
"""Whether the row of a block's number is known to be there."""


def reach(section: Section, boundary: int) -> int:
    """The first token that position ``boundary`` attends to in this section."""
    if section.kind is AttentionKind.STATE:
        return boundary
    if section.window is None:
        return 0
    if section.kind is AttentionKind.CHUNKED_LOCAL:
        return boundary // section.window * section.window
    return max(0, boundary - section.window + 1)


def pieces(layout: RowLayout | None, boundary: int) -> range:
    """Numbers of the WA rows that ``boundary`` (tokens, above 0) needs; the last is its own.

    The last one is always among them, also if no section needs it, so that a boundary exists
    only where it was saved.
    """
    if layout is None:
        return range(0)
    last = boundary // layout.block_tokens - 1
    first = min([reach(section, boundary) for section in layout.windows]) // layout.block_tokens
    return range(min(first, last), last + 1)


def can_resume(layout: StoreLayout, boundary: int) -> bool:
    """Whether every section's units end at ``boundary``."""
    if boundary % layout.fa.unit_tokens:
        return False
    return layout.wa is None or boundary % layout.wa.unit_tokens == 0


def find_boundary(layout: StoreLayout, limit: int, has: IsThere) -> int:
    """The largest boundary at or below ``limit`` tokens whose rows are all there, or 0.

    ``limit`` is at most ``num_tokens - 1``: the engine computes the last token itself.
    """
    size = layout.block_tokens
    # 1. FA rows from the first on, until one is missing: no boundary lies behind it.
    full = 0
    while (full + 1) * size <= limit and has(RowKind.FA, full):
        full += 1
    # 2. Of the boundaries before it the last one that can be resumed and has its WA rows.  The
    #    last row is asked first: it is the one that is missing where no window was saved.
    for boundary in range(full * size, 0, -size):
        if can_resume(layout, boundary) and all(
            has(RowKind.WA, index) for index in reversed(pieces(layout.wa, boundary))
        ):
            return boundary
    return 0


def rows_needed(layout: StoreLayout, held: int, boundary: int) -> list[tuple[RowKind, int]]:
    """Rows to fetch for tokens ``[held, boundary)``: FA in order, then WA in order."""
    size = layout.block_tokens
    rows = [(RowKind.FA, index) for index in range(held // size, boundary // size)]
    for index in pieces(layout.wa, boundary):
        if (index + 1) * size > held:
            rows.append((RowKind.WA, index))
    return rows


def rows_at_end(layout: StoreLayout, boundary: int, num_tokens: int) -> list[tuple[RowKind, int]]:
    """Rows at the end of a prompt that a hit at ``boundary`` does not use, and a next turn will.

    There are some if the prompt consists of whole rows and the hit ends at the last one, whose last
    token the engine computes.
    """
    is_last = num_tokens == boundary + layout.block_tokens
    return rows_needed(layout, boundary, num_tokens) if is_last else []


@dataclass(frozen=True, slots=True)
class Spacing:
    """At which boundaries WA rows are saved, besides the last of a prompt and junctions.

    ``every`` is in canonical blocks; None saves at those alone.
    """

    every: int | None

    @classmethod
    def from_setting(cls, layout: StoreLayout, window_every: int | str) -> Spacing:
        """From the setting: ``all``, ``last``, ``auto``, or tokens.

        ``auto`` is ``ceil(WA bytes of a boundary / FA bytes of a block)``, which keeps WA bytes
        at or below FA bytes.
        """
        if layout.wa is None or window_every == "last":
            return cls(None)
        if window_every == "all":
            return cls(1)
        if isinstance(window_every, int):
            return cls(max(1, -(-window_every // layout.block_tokens)))
        # So far from the start every window is whole.
        far = 1 << 20
        tail = len(pieces(layout.wa, far * layout.block_tokens)) * row_nbytes(layout.wa)
        if any(s.kind is AttentionKind.CHUNKED_LOCAL for s in layout.wa.sections):
            chunk = max(s.window or 0 for s in layout.wa.sections)
            tail = max(1, chunk // layout.block_tokens) * row_nbytes(layout.wa)
        return cls(-(-tail // row_nbytes(layout.fa)))

    def boundaries(self, first: int, until: int, always: frozenset[int]) -> Iterator[int]:
        """Blocks in ``[first, until)`` whose ends are to be saved; ``always`` are among them."""
        for index in range(first, until):
            if index in always or (self.every is not None and (index + 1) % self.every == 0):
                yield index
