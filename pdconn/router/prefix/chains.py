"""Block hashes of recent prompts, so that only appended blocks are hashed.  Pure.

::

    system prompt ──┬── first question, answer, second question        a Run: blocks in a row
                    └── another first question ──┬── …                 that all prompts below
                                                 └── …                 it have in common

Runs form a tree.  Below a run, at most one child begins with a given label; a label is the input of
a block's hash beside its parent: its tokens and its extra keys.  So prompts share a run exactly as
far as their hashes are equal, whatever adapter, salt or images they have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pdconn.router.prefix.hashing import (
    NOTHING,
    BlockKeys,
    Extras,
    HashScheme,
    Keys,
    Tokens,
    as_array,
    block_keys,
    extend,
)

Label: TypeAlias = "tuple[bytes, Keys]"
T = TypeVar("T")

STEP_TOKENS = 8192
"""Tokens that are hashed without a pause: with blocks of 16 a tenth of a millisecond, or one or
two where nothing is compiled."""


def finish(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end without pausing; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@dataclass(slots=True)
class _Blocks:
    """Consecutive blocks: tokens ``[block, token]``, and extra keys by block number."""

    rows: NDArray[np.int32]
    first: int
    keys: BlockKeys

    @property
    def label(self) -> Label:
        """The label of the first block."""
        return self.rows[0].tobytes(), self.keys.keys_of(self.first)

    def cut(self, begin: int, end: int) -> _Blocks:
        """A copy of the blocks ``begin`` to ``end - 1``."""
        special = {b: keys for b, keys in self.keys.special.items() if begin <= b < end}
        rows = self.rows[begin - self.first : end - self.first].copy()
        return _Blocks(rows, begin, BlockKeys(self.keys.usual, special))

    def num_shared(self, prompt: _Blocks) -> int:
        """How many of these blocks ``prompt`` has; it has the first one and all before it."""
        theirs = prompt.rows[self.first : self.first + len(self.rows)]
        same = (self.rows[: len(theirs)] == theirs).all(axis=1)
        if self.keys.special or prompt.keys.special:
            numbers = range(self.first, self.first + len(theirs))
            same &= np.array(
                [self.keys.keys_of(b) == prompt.keys.keys_of(b) for b in numbers], bool
            )
        return len(same) if same.all() else int(same.argmin())


@dataclass(slots=True, eq=False)
class _Run:
    """A node of the tree; ``digests`` are its blocks' full hashes, concatenated."""

    blocks: _Blocks
    digests: bytes
    parent: _Run | None
    children: dict[Label, _Run] = field(default_factory=dict)


class Chains:
    """A bounded tree of block hashes.  The least recently used prompts are dropped first.

    A kept token costs 4 bytes, a block ``hash_nbytes``, a block that contains an item 0.2 KB more,
    and a run 0.8 KB: for prompts of 8192 tokens with nothing in common, 6.1 bytes per token with
    blocks of 16 tokens and 4.3 with 256 (tracemalloc, ``sha256_cbor``).

    Attributes:
        scheme: the hash scheme.
        max_tokens: limit of the kept tokens; tokens that prompts share count once.
        num_tokens: tokens kept now.
        blocks_reused, blocks_computed: totals over all prompts.
    """

    def __init__(self, scheme: HashScheme, *, max_tokens: int) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens: expected at least 0, got {max_tokens}")
        self.scheme = scheme
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.blocks_reused = 0
        self.blocks_computed = 0
        self._nbytes = scheme.hash_nbytes
        nothing = _Blocks(np.empty((0, scheme.block_tokens), np.int32), 0, BlockKeys(None, {}))
        self._root = _Run(nothing, b"", None)
        self._recent: OrderedDict[_Run, None] = OrderedDict()  # parents come after their children

    @property
    def num_runs(self) -> int:
        """Runs in the tree: one per prompt, and one per point where prompts diverge."""
        return len(self._recent)

    def hashes_of(self, tokens: Tokens, extras: Extras = NOTHING) -> list[int]:
        """External hashes of all full blocks of a prompt.

        Raises:
            BadPrompt: a token is out of range.
        """
        return finish(self.hash_in_steps(tokens, extras))

    def hash_in_steps(
        self, tokens: Tokens, extras: Extras = NOTHING
    ) -> Generator[None, None, list[int]]:
        """:meth:`hashes_of` as a generator that pauses after each ``STEP_TOKENS`` hashed tokens.

        Other prompts may be hashed during a pause.
        """
        size = self.scheme.block_tokens
        vector = as_array(tokens)
        num_blocks = len(vector) // size
        keys = block_keys(extras, size, num_blocks)
        prompt = _Blocks(vector[: num_blocks * size].reshape(-1, size), 0, keys)

        path, known = self._walk(prompt)
        num_known = len(known) // self._nbytes
        self.blocks_reused += num_known
        self.blocks_computed += num_blocks - num_known
        step = max(1, STEP_TOKENS // size)
        digests = bytearray(known)
        for first in range(num_known, num_blocks, step):
            if first > num_known:
                yield
            parent = bytes(digests[-self._nbytes :]) or self.scheme.root
            upto = vector[: (first + step) * size]
            digests += extend(self.scheme, parent, upto, keys, first)
        if num_blocks > num_known + step:  # the tree may have changed during a pause
            path, known = self._walk(prompt)
            num_known = len(known) // self._nbytes
        fresh = bytes(digests[len(known) :])
        if fresh and prompt.rows.size <= self.max_tokens:
            self._add(path, prompt, num_known, fresh)
        for run in reversed(path):
            self._recent.move_to_end(run)
        self._evict()
        words = np.frombuffer(bytes(digests), ">u8")
        hashes: list[int] = words[self._nbytes // 8 - 1 :: self._nbytes // 8].tolist()
        return hashes

    def _walk(self, prompt: _Blocks) -> tuple[list[_Run], bytes]:
        """The runs along the prompt (the last perhaps in part), and their hashes."""
        path: list[_Run] = []
        known: list[bytes] = []
        run, done = self._root, 0
        while done < len(prompt.rows):
            child = run.children.get((prompt.rows[done].tobytes(), prompt.keys.keys_of(done)))
            if child is None:
                break
            shared = child.blocks.num_shared(prompt)
            path.append(child)
            known.append(child.digests[: shared * self._nbytes])
            done += shared
            if shared < len(child.blocks.rows):
                break
            run = child
        return path, b"".join(known)

    def _add(self, path: list[_Run], prompt: _Blocks, done: int, digests: bytes) -> None:
        """Add the prompt's blocks from ``done`` on, below its path; splits the path's last run."""
        last = path[-1] if path else self._root
        if done < last.blocks.first + len(last.blocks.rows):
            last = path[-1] = self._split(last, done)
        fresh = prompt.cut(done, len(prompt.rows))
        self.num_tokens += fresh.rows.size
        if path and not last.children:  # a conversation stays one run, however often it grows
            last.blocks.rows = np.concatenate((last.blocks.rows, fresh.rows))
            last.blocks.keys.special.update(fresh.keys.special)
            last.digests += digests
            return
        run = last.children[fresh.label] = _Run(fresh, digests, last)
        self._recent[run] = None
        path.append(run)

    def _split(self, run: _Run, at: int) -> _Run:
        """Split a run before block ``at``; returns the upper one."""
        blocks, parent = run.blocks, run.parent
        assert parent is not None, "the root has no block to be cut before"
        cut = (at - blocks.first) * self._nbytes
        upper = _Run(blocks.cut(blocks.first, at), run.digests[:cut], parent)
        run.blocks, run.digests = blocks.cut(at, blocks.first + len(blocks.rows)), run.digests[cut:]
        run.parent = parent.children[upper.blocks.label] = upper
        upper.children[run.blocks.label] = run
        self._recent[upper] = None
        return upper

    def _evict(self) -> None:
        while self.num_tokens > self.max_tokens:
            run, _ = self._recent.popitem(last=False)
            assert run.parent is not None, "only the root has no parent"
            assert not run.children, "a parent is used whenever a child is"
            del run.parent.children[run.blocks.label]
            self.num_tokens -= run.blocks.rows.size
