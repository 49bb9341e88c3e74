"""What lies in the blocks of a :class:`~tests.fakes.simulated.sim_cache.SimCache`, row by row.

vLLM's own manager decides which blocks a request gets and which another one finds again; here
stands what was written to each of their rows last, named by all tokens of the prompt up to
there.  Importing this module imports vLLM (7 s).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from pdconn.planning.plan import window_start
from pdconn.vllm.blocks.partial import partial_blocks
from pdconn.vllm.patches.pool.uncached_blocks import never_cache
from registration.references import AttentionKind, KVCacheGroupReference
from tests.fakes.simulated.sim_cache import GroupShape, SimCache

ZERO = 0
"""The name of a row that was zeroed."""

UNWRITTEN = -1
"""The name of a row that nothing was written to: no hash of Python's is -1."""


@dataclass
class Running:
    """A request that has blocks, and the names of its tokens."""

    request: Any
    names: list[int]


@dataclass
class SimMemory:
    """A cache, what lies in its blocks, and what was counted.

    Attributes:
        their_block: tokens of the lender's blocks.
        rows: of each group, the name of every row, by block and place in it.
        pulling: ids of requests that pull.
        allocations: pulls that got blocks.
        kept: tokens of hits that these did not pull.
    """

    cache: SimCache
    their_block: int = 1 << 30
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    pulling: set[str] = field(default_factory=set)
    allocations: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        self.sizes = [group.block_tokens for group in self.cache.shape.groups]
        self.groups = [_reference(group) for group in self.cache.shape.groups]
        num_blocks = self.cache.shape.num_blocks
        self.rows = [np.full((num_blocks, size), UNWRITTEN) for size in self.sizes]

    # What the engine and the connector do

    def pull(self, tokens: Sequence[int], *, fails: bool = False) -> bool:
        """All but the last token come from elsewhere; False where there was no room."""
        manager = self.cache.manager
        request = self.cache.request(tokens, max_tokens=4)
        one = Running(request, names_of(tokens))
        self.pulling.add(request.request_id)
        until = len(tokens) - 1
        found, local, _, is_diverged = manager.get_computed_blocks_for_connector(request)
        assert until > local or not is_diverged, "a hit that nothing would complete"
        self.cache.begin_step()
        if until <= local or not manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=local,
            new_computed_blocks=found,
            num_external_computed_tokens=until - local,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
        ):
            return False
        self.allocations += 1
        self.kept += local
        if fails:
            manager.free(request)
            return True
        self._received(one, self.held(request, local), until)
        return True

    def held(self, request: Any, local: int) -> tuple[int, ...]:
        """Tokens that each group holds already."""
        del request
        return (local,) * len(self.sizes)

    def _received(self, one: Running, held: Sequence[int], until: int) -> None:
        begins = []
        for group, start in enumerate(held):
            piece = gcd(self.sizes[group], self.their_block) if self.their_block < 1 << 30 else 0
            piece = piece or self.sizes[group]
            first = max(start, window_start(self.groups[group], until)) // piece * piece
            self._write(one, group, range(first, until), is_pull=True)
            self._zero(one, group, start, range(first, -(-until // piece) * piece))
            if self.groups[group].window is not None and first < until:
                begins.append((group, first))
        request, manager = one.request, self.cache.manager
        blocks = partial_blocks(begins, self.sizes)
        never_cache(manager, manager.kv_cache_config, request.request_id, blocks)
        if self.cache.answers is not None:
            self.cache.answers.mark_partial(request.request_id, blocks)
        request.num_computed_tokens = until
        manager.cache_blocks(request, until)
        self.check(one, until)
        self.running.append(one)

    def compute(self, tokens: Sequence[int]) -> None:
        """The engine computes what it does not hold."""
        request = self.cache.request(tokens, max_tokens=4)
        one = Running(request, names_of(tokens))
        done = self.cache.admit(request)
        if done is None:
            return
        if done:
            self.check(one, done)
        while True:
            for group in range(len(self.sizes)):
                self._write(one, group, range(done, request.num_computed_tokens), is_pull=False)
            done = request.num_computed_tokens
            if done == len(tokens):
                break
            if not self.cache.step(request):
                self.cache.finish(request)
                return
        self.check(one, done)
        self.running.append(one)

    def end(self, which: int, answer: Sequence[int] = ()) -> list[int]:
        """A request computes its last token, and those of its answer, and is gone.

        Returns:
            The tokens of prompt and answer that it came to.
        """
        one = self.running.pop(which % len(self.running))
        self.answer(one, answer)
        self.cache.finish(one.request)
        return list(one.request.all_token_ids)

    def answer(self, one: Running, answer: Sequence[int]) -> None:
        """A request computes its last token, and those of its answer."""
        request = one.request
        for token in (None, *answer):
            if token is not None:
                request.append_output_token_ids(token)
                one.names.append(hash((one.names[-1], token)))
            until = len(one.names)
            if request.num_computed_tokens < until:
                if not self.cache.step(request):
                    break
                for group in range(len(self.sizes)):
                    self._write(one, group, range(until - 1, until), is_pull=False)
                self.check(one, until)

    def end_all(self) -> None:
        """All requests are gone, and no block is lost."""
        while self.running:
            self.end(0)
        self.cache.end_copies()
        free = self.cache.manager.block_pool.get_num_free_blocks()
        assert free == self.cache.shape.num_blocks - 1, "blocks are lost"

    # The laws

    def check(self, one: Running, until: int) -> None:
        """Position ``until`` finds every token that it attends to."""
        self.check_blocks(one, until, self.cache.manager.get_block_ids(one.request.request_id))

    def check_blocks(self, one: Running, until: int, blocks: Sequence[Sequence[int]]) -> None:
        """The same in other blocks, by group; 0 is a hole."""
        for group, reference in enumerate(self.groups):
            start = window_start(reference, until)
            at, place = np.divmod(np.arange(start, until), self.sizes[group])
            held = np.array(blocks[group], dtype=np.int64)[at]
            found = np.where(held, self.rows[group][held, place], UNWRITTEN)
            wrong = np.flatnonzero(found != np.array(one.names[start:until], dtype=np.int64))
            if len(wrong):
                token = start + int(wrong[0])
                assert held[wrong[0]], f"group {group}: a hole at token {token} of {until}"
                raise AssertionError(f"group {group}: wrong at {token} of {until}")

    def _zero(self, one: Running, group: int, held: int, pulled: range) -> None:
        """A pull zeroes what it leaves of the blocks that lack tokens, which nobody else reads."""
        size = self.sizes[group]
        blocks = self.cache.manager.get_blocks(one.request.request_id).blocks[group]
        for begin, end in _per_block(range(held, len(blocks) * size), size):
            block = blocks[begin // size]
            left = [token % size for token in range(begin, end) if token not in pulled]
            if block.is_null or not left:
                continue
            assert block.block_hash is None, f"group {group}: a pull zeroes what others read"
            self.rows[group][block.block_id, left] = ZERO

    def _write(self, one: Running, group: int, tokens: range, *, is_pull: bool) -> None:
        """Write rows; a pull needs a block for each, which nobody else reads."""
        blocks = self.cache.manager.get_blocks(one.request.request_id).blocks[group]
        size = self.sizes[group]
        for begin, end in _per_block(tokens, size):
            block = blocks[begin // size]
            if block.is_null:
                assert not is_pull, f"group {group}: token {begin} has no block to be pulled to"
                continue
            is_shared = is_pull and block.block_hash is not None
            assert not is_shared, f"group {group}: a pull writes to a block that others read"
            place = begin % size
            self.rows[group][block.block_id, place : place + end - begin] = one.names[begin:end]


def _per_block(tokens: range, size: int) -> Iterator[tuple[int, int]]:
    """The tokens of each block: from where, and where they end."""
    begin = tokens.start
    while begin < tokens.stop:
        end = min(tokens.stop, begin // size * size + size)
        yield begin, end
        begin = end


def names_of(tokens: Sequence[int]) -> list[int]:
    """A name for each token, by all tokens up to it."""
    return list(accumulate(tokens, lambda name, token: hash((name, token)), initial=0))[1:]


def _reference(group: GroupShape) -> KVCacheGroupReference:
    kind = AttentionKind.FULL
    if group.window is not None:
        kind = AttentionKind.CHUNKED_LOCAL if group.is_chunk else AttentionKind.SLIDING_WINDOW
    return KVCacheGroupReference(kind, group.window, group.block_tokens, ())
