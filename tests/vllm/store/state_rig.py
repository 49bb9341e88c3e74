"""An engine of attention and states without a model: vLLM's own block manager, and our store.

A token's KV is made of the whole prefix up to it, and a state of all tokens that it has seen.
States go where vLLM's runner puts them: a pass reads the one of its first token's block before,
writes that of its end into the block of its end, and exports one at a checkpoint where the
manager has reserved a block for it.  Rows are copied only when a request is over, long after the
pass that completed them: so what changes under a save is seen.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdconn.store.engine.build import build_scheduler
from pdconn.store.format.row import store_layout
from pdconn.store.rank.store import RankStore
from pdconn.store.settings import StoreSettings
from registration.references import (
    AttentionChunk,
    AttentionKind,
    GroupMemory,
    LayerMemory,
    StateChunk,
    build_kv_cache_references,
)
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.budgets import EndlessBudget
from transport import Memory

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdconn.vllm.blocks.transferred import TransferBlocks
    from pdconn.vllm.metadata import PdMetadata
    from pdconn.vllm.store.storing import Storing
    from tests.fakes.simulated.hooks import finished, matched
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape, SimCache

BLOCK = 16
TOKEN_NBYTES, STATE_NBYTES = 8, 32
POISON = 0xEE
PATIENCE_S = 60.0


@dataclass(frozen=True)
class StateShape(CacheShape):
    """``exports``: a pass that ends a prompt exports the state at the last boundary before.

    ``is_async``: a pass over a generated token is scheduled before that token is known.
    """

    groups: tuple[GroupShape, ...] = (GroupShape(BLOCK), GroupShape(BLOCK, is_state=True))
    num_blocks: int = 96
    chunk_tokens: int = 4 * BLOCK
    exports: bool = False
    is_async: bool = False

    def config(self) -> KVCacheConfig:
        made = super().config()
        if self.exports:
            group = made.kv_cache_groups[1]
            group.kv_cache_spec = replace(
                group.kv_cache_spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1
            )
        return made


@dataclass
class Ran:
    """The result of one request; ``wrong`` counts states and tokens that were not the prompt's."""

    loaded: int = 0
    wrong: int = 0
    passes: list[tuple[int, int]] = field(default_factory=list)


class StateEngine:
    """One rank over ``rows``; prompts run one after another."""

    def __init__(
        self,
        rows: MemoryRows,
        shape: StateShape | None = None,
        row_tokens: int = BLOCK,
        **settings: Any,
    ) -> None:
        self.shape = shape or StateShape()
        self.cache = SimCache(self.shape)
        self.manager = self.cache.manager
        self.config = self.shape.config()
        self._splitting: Any = self.cache._splitting
        if self.shape.exports:
            self._splitting.mamba_has_prefill_checkpoint_blocks = True
            self._splitting.mamba_prefill_checkpoint_alignment = 1
        blocks = self.shape.num_blocks
        self.tokens = np.full((blocks, BLOCK, TOKEN_NBYTES), POISON, dtype=np.uint8)
        self.states = np.full((blocks, STATE_NBYTES), POISON, dtype=np.uint8)
        made = StoreSettings(
            root="", capacity=1 << 30, staging=1 << 22, block_tokens=row_tokens, min_tokens=1,
            window_every="all", **settings,
        )  # fmt: skip
        references = build_kv_cache_references(self._groups())
        shelf = partial(MemoryShelf, rows)
        self.store = Storing(made, None, "writer", self.config)
        self.store.bind_gpu_block_pool(self.manager.block_pool)
        self.store._check_groups()
        self.store._store = self.scheduler = build_scheduler(
            made, store_layout([references], row_tokens), [references], namespace="ns",
            writer=f"writer-{id(self)}", clock=time.monotonic, shelf=shelf, budget=EndlessBudget(),
        )  # fmt: skip
        self.rank = RankStore(made, references, 0, shelf)
        self._loaded: set[str] = set()
        self._held: list[Any] = []

    def _groups(self) -> list[GroupMemory]:
        def layer(name: str, array: np.ndarray, *chunks: Any) -> LayerMemory:
            memory = Memory(array.ctypes.data, array.nbytes)
            return LayerMemory(name, memory, 0, array[0].nbytes, len(array), chunks)

        page = BLOCK * TOKEN_NBYTES
        attention = AttentionChunk(1, page, page, TOKEN_NBYTES, TOKEN_NBYTES)
        half = STATE_NBYTES // 2
        pieces = StateChunk(half, 0, 4), StateChunk(half, half, 2)
        return [
            GroupMemory(AttentionKind.FULL, None, BLOCK, (layer("attn", self.tokens, attention),)),
            GroupMemory(AttentionKind.STATE, None, BLOCK, (layer("mixer", self.states, *pieces),)),
        ]

    # A request

    def run(self, prompt: Sequence[int], num_answers: int = 0) -> Ran:
        """Load what can be loaded, compute the rest and ``num_answers`` tokens, save."""
        request = self.cache.request(list(prompt), max_tokens=num_answers + 1)
        ran = Ran()
        self.store.on_new_request(request)
        found, blocks = self._admit(request, ran)
        while request.num_computed_tokens < len(prompt) + num_answers:
            is_known = not self.shape.is_async
            if is_known and request.num_computed_tokens + found >= request.num_tokens:
                request.append_output_token_ids(7 + request.num_tokens)
            self._pass(request, ran, found, blocks)
            found, blocks = 0, None
        finished(self.store, request)
        self.manager.free(request)
        self._until(self.scheduler.is_settled, passed=True)
        return ran

    def close(self) -> None:
        self.store.shutdown()
        self.rank.close()

    def _admit(self, request: Any, ran: Ran) -> tuple[int, Any]:
        found, blocks, beyond = 0, None, None

        def is_known() -> bool:
            nonlocal found, blocks, beyond
            self.manager.new_step_starts()
            look = self.manager.get_computed_blocks_for_connector
            blocks, found, request.shared_prefix_boundary, diverged = look(request)
            beyond, _ = matched(self.store, request, found - found % BLOCK)
            if beyond and found % BLOCK:
                if beyond > found % BLOCK:
                    blocks = self.manager.truncate_computed_blocks(blocks, found - found % BLOCK)
                    found -= found % BLOCK
                else:
                    beyond = 0
            if beyond == 0 and diverged:
                blocks, found, request.shared_prefix_boundary = self.manager.get_computed_blocks(
                    request
                )
            return beyond is not None

        self._until(is_known)
        if not beyond:
            return found, blocks
        assert self.manager.allocate_slots(
            request, 0, num_new_computed_tokens=found, new_computed_blocks=blocks,
            num_external_computed_tokens=beyond, delay_cache_blocks=True,
        ) is not None  # fmt: skip
        ids = self.manager.get_block_ids(request.request_id)
        given = TransferBlocks(self.config, ids)
        self.store.update_state_after_alloc(request, given, beyond, is_promised=True)
        assert self.store.is_load_optional(request.request_id), "it is loading"
        self._until(lambda: request.request_id in self._loaded)
        self.store.end_load(request.request_id)
        ran.loaded = beyond
        request.num_computed_tokens = found + beyond
        self.manager.cache_blocks(request, request.num_computed_tokens)
        return 0, None

    def _pass(self, request: Any, ran: Ran, found: int, blocks: Any) -> None:
        """Schedule one pass, say so to the store, compute it."""
        self.manager.new_step_starts()
        self.manager.block_pool.free_blocks(self._held)
        before = request.num_computed_tokens + found
        fresh = min(self.shape.chunk_tokens, max(1, request.num_tokens - before))
        fresh = Scheduler._mamba_block_aligned_split(self._splitting, request, fresh, found)
        assert fresh > 0
        more = {"num_new_computed_tokens": found, "new_computed_blocks": blocks} if found else {}
        assert self.manager.allocate_slots(request, fresh, **more) is not None
        request.num_computed_tokens = before
        offers = self.manager.take_boundary_state_offloads()
        copies, self._held = self.manager.take_kv_cache_block_copies()
        state = SimpleNamespace(
            get_block_ids=self.manager.get_block_ids, boundary_state_offloads=offers
        )
        output = SimpleNamespace(
            kv_connector_block_state=state, num_scheduled_tokens={request.request_id: fresh}
        )
        metadata = PdMetadata()
        self.store.build_connector_meta(output, metadata)
        for command in metadata.store:
            self.rank.post_command(command)
        if before == request.num_tokens:
            request.append_output_token_ids(7 + request.num_tokens)
        for copy in copies:
            for memory in (self.tokens, self.states):
                memory[copy.dst_block_id] = memory[copy.src_block_id]
        self._compute(request, before, before + fresh, ran)
        request.num_computed_tokens = before + fresh

    def _compute(self, request: Any, before: int, after: int, ran: Ran) -> None:
        ids = request.all_token_ids
        attention, states = self.manager.get_block_ids(request.request_id)
        ran.passes.append((before, after))
        if before:
            seen = self.states[states[-(-before // BLOCK) - 1]]
            ran.wrong += bool((seen != state_of(ids[:before])).any())
        for at in range(before):
            seen = self.tokens[attention[at // BLOCK], at % BLOCK]
            ran.wrong += bool((seen != kv_of(ids[: at + 1])).any())
        for at in range(before, after):
            self.tokens[attention[at // BLOCK], at % BLOCK] = kv_of(ids[: at + 1])
        exported = self.manager.coordinator.single_type_managers[1]._checkpoints
        if checkpoint := exported.get(request.request_id):
            position, column = checkpoint
            if before < position < after:
                self.states[states[column]] = state_of(ids[:position])
        self.states[states[-(-after // BLOCK) - 1]] = state_of(ids[:after])

    def _step(self, passed: bool) -> None:
        for command in self.scheduler.take_commands():
            self.rank.post_command(command)
        if passed:
            self.rank.after_pass()
        self._loaded.update(self.rank.take_loaded())
        assert not self.rank.take_load_failures()
        self.store.note_results(self.rank.take_results())

    def _until(self, is_so: Callable[[], bool], passed: bool = False) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            self._step(passed)
            if is_so():
                return
            assert time.monotonic() < until, "nothing came"
            time.sleep(0.001)


def state_of(tokens: Sequence[int]) -> np.ndarray:
    """The state after ``tokens``."""
    return _digest(tokens, STATE_NBYTES)


def kv_of(tokens: Sequence[int]) -> np.ndarray:
    """KV of the last of ``tokens``."""
    return _digest(tokens, TOKEN_NBYTES)


def _digest(tokens: Sequence[int], nbytes: int) -> np.ndarray:
    data = np.asarray(list(tokens), dtype="<u4").tobytes()
    return np.frombuffer(blake2b(data, digest_size=nbytes).digest(), dtype=np.uint8)
