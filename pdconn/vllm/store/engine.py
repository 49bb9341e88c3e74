"""The scheduler's part of a store in vLLM's terms: requests, blocks that are pinned, resets.

Blocks of which rows are being saved are pinned by references of our own in the engine's block
pool until every rank has read them, since vLLM frees window blocks while a request runs, and
all blocks when it ends.  A reset of the prefix cache, after which weights may be others, unpins
them at once and gives later rows another namespace; what was being saved is not committed.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from pdconn.protocol.ticket import trimmed
from pdconn.store.commands import StoreCommand, StoreResult
from pdconn.store.engine.build import build_scheduler
from pdconn.store.engine.requests import Save
from pdconn.store.engine.scheduler import StoreScheduler
from pdconn.store.errors import FormatError
from pdconn.store.format.layout import StoreLayout, store_layout
from pdconn.store.settings import StoreSettings
from pdconn.vllm.blocks.partial import PartialBlocks
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.patches.cache_resets import watch_resets
from pdconn.vllm.patches.pool.pinned_blocks import pin_blocks, unpin_blocks
from pdconn.vllm.patches.pool.state_blocks import end_pass_at
from pdconn.vllm.store.events import StoreEvents, event_groups
from pdconn.vllm.store.extras import extras_of, has_keys
from pdconn.vllm.store.identity import namespace_of, salted
from pdconn.vllm.store.states import StateGroups
from registration.references import KVCacheReferences
from transport.errors import shown

log = logging.getLogger(__name__)

_PINNED_SHARE = 4
"""At most one block of so many is pinned for saves; rows beyond that are not saved."""


class EngineStore:
    """The store of one engine, in its scheduler's process.

    Args:
        settings: checked settings.
        config: vLLM's configuration.
        writer: this boot's name.
        kv_cache_config: vLLM's KV cache configuration.
    """

    def __init__(
        self, settings: StoreSettings, config: Any, writer: str, kv_cache_config: Any
    ) -> None:
        self._settings, self._config, self._writer = settings, config, writer
        self._kv_cache_config = kv_cache_config
        self._events: StoreEvents | None = None
        self._store: StoreScheduler | None = None
        self._namespace = ""
        self._pool: Any = None
        self._splits = UNSPLIT
        self._states = StateGroups()
        self._requests: dict[str, Any] = {}
        self._begun_before: set[str] = set()
        self._partial: dict[str, PartialBlocks] = {}
        self._pinned: dict[int, list[Any]] = {}
        self._num_pinned = 0
        self._gauges: dict[str, int] = {}

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in, and see when it is reset."""
        self._pool = block_pool
        watch_resets(block_pool, before=self.cleared, after=self._was_reset)

    def open(
        self,
        ranks: Sequence[KVCacheReferences],
        traits: dict[str, str],
        splits: Splits = UNSPLIT,
    ) -> None:
        """Every worker is registered: rows can be described now.

        ``splits`` says which blocks ``ranks`` describe, of which rows are made.

        Raises:
            FormatError: KV memory that rows cannot hold.
            StoreError: the root cannot be opened.
        """
        self._splits = splits
        self._check_groups()
        layout = store_layout(ranks, self._settings.block_tokens)
        if self._pool.enable_kv_cache_events:
            self._events = StoreEvents(
                event_groups(self._kv_cache_config, layout, self._pool.hash_block_size),
                row_tokens=layout.block_tokens,
                hash_block_tokens=self._pool.hash_block_size,
                locality="LOCAL",
                clock=time.monotonic,
            )
        self._namespace = self._name(traits, layout)
        self._store = build_scheduler(
            self._settings,
            layout,
            ranks,
            namespace=self._namespace,
            writer=self._writer,
            clock=time.monotonic,
            told=None if self._events is None else self._events.told,
        )

    def arrived(self, request: Any) -> None:
        """A request entered the engine."""
        if self._store is None or not has_keys(request):
            return
        self._requests[request.request_id] = request
        self._store.arrived(
            request.request_id,
            request.all_token_ids,
            request.num_prompt_tokens,
            partial(extras_of, request, self._settings.block_tokens),
            may_load=not request.skip_reading_prefix_cache,
            reads_files=request.lora_request is not None,
        )

    def matched(self, request: Any, num_local: int) -> int | None:
        """See :meth:`StoreScheduler.matched`.

        Where the prompt parts from those saved, a pass is to end, for its state to be saved.
        """
        if self._store is None:
            return 0
        found = self._store.matched(request.request_id, request.num_tokens, num_local)
        if self._states and found is not None:
            end_pass_at(request, self._store.junction(request.request_id))
        return found

    def allocated(self, request: Any, ids: tuple[list[int], ...], num_external: int) -> bool:
        """The request has blocks, of which the store has promised to fill ``num_external`` tokens.

        Returns:
            Whether it will report them, loaded or failed: an offer may be gone by now.
        """
        if self._store is None:
            return False
        blocks = tuple(trimmed(group) for group in self._splits.described(ids))
        if not self._store.allocated(request.request_id, blocks, num_external):
            if num_external:
                self._store.fail(request.request_id)
            return num_external > 0
        if self._events is not None:
            self._events.serving(request, self._store.served(request.request_id))
        return True

    def scheduled(self, output: Any, select: Any) -> list[StoreCommand]:
        """What the ranks are to do in this step.

        Args:
            output: vLLM's ``SchedulerOutput``.
            select: picks the groups that take part in transfers from all groups' block ids.
        """
        if self._store is None:
            return []
        state = output.kv_connector_block_state
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or state is None or request_id in self._begun_before:
                continue
            if self._num_pinned * _PINNED_SHARE > self._pool.num_gpu_blocks:
                break
            before = request.num_computed_tokens
            passed = range(before, before + count)
            ids = partial(self._ids_of, state, request, passed, select)
            saved = self._store.computed(request_id, passed.start, passed.stop, ids)
            if saved is None:
                continue
            self._pin(saved)
            if self._events is not None:
                self._events.saving(request, saved.rows)
        return self._store.take_commands()

    def note(self, results: Sequence[StoreResult]) -> None:
        """Ranks have answered."""
        if self._store is not None:
            for number in self._store.note(results):
                self._unpin(number)

    def loaded(self, request_id: str) -> None:
        """All ranks reported the request received, or failed."""
        if self._store is not None:
            self._store.loaded(request_id)

    def pulled(self, request_id: str, blocks: PartialBlocks) -> None:
        """A pull wrote only the end of some blocks, which are not saved."""
        if request_id in self._requests:
            self._partial[request_id] = blocks

    def finished(self, request: Any) -> None:
        """The request left the engine."""
        self._partial.pop(request.request_id, None)
        self._begun_before.discard(request.request_id)
        if self._requests.pop(request.request_id, None) is not None and self._store is not None:
            self._store.finished(request.request_id)

    def cleared(self) -> None:
        """The prefix cache is being reset."""
        for number in list(self._pinned):
            self._unpin(number)
        if self._store is not None:
            self._store.cleared(salted(self._namespace, secrets.token_hex(8)))

    def _was_reset(self, is_reset: bool) -> None:
        if self._events is not None:
            self._events.cleared(engine_told=is_reset)

    def weights_changed(self) -> None:
        """The engine's weights may be others from now on: so are the rows of what it computes.

        Requests that have begun are of both, and are not saved.  What the engine's own prefix
        cache keeps of the old weights goes on to be of use to it, as its user asked: so these
        rows, too, are for this boot alone.
        """
        self.cleared()
        self._begun_before.update(self._requests)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        return {} if self._store is None else self._store.take_counts()

    def take_gauges(self) -> dict[str, int]:
        """Bytes of the budget, if they have changed since the last call."""
        usage = {} if self._store is None else self._store.usage()
        if usage == self._gauges:
            return {}
        self._gauges = usage
        return usage

    def take_events(self) -> list[Any]:
        """Stored rows that are there, and that are gone, since the last call."""
        return [] if self._events is None else self._events.take()

    def close(self) -> None:
        """Stop the threads."""
        if self._store is not None:
            self._store.close()

    def _name(self, traits: dict[str, str], layout: StoreLayout) -> str:
        """Of the namespace; a random one where nothing proves which weights these are."""
        found = namespace_of(self._config, traits, layout, salt=secrets.token_hex(8))
        if found.doubt:
            log.warning(
                "pdconn: store: rows are kept for this boot of this engine alone, since nothing "
                "proves its weights (see weights_id in docs/stores.md): %s",
                shown(found.doubt, 300),
            )
        return found.name

    def _ids_of(
        self, state: Any, request: Any, passed: range, select: Any
    ) -> tuple[list[int], ...]:
        """The request's blocks by group, as they are described; states at boundaries alone."""
        request_id = request.request_id
        ids = [list(group) for group in select(state.get_block_ids(request_id))]
        if self._states:
            offers = state.boundary_state_offloads.get(request_id, ())
            self._states.keep(ids, passed, offers, request.num_prompt_tokens)
        for group, block in self._partial.get(request_id, {}).items():
            ids[group][: block + 1] = [0] * (block + 1)
        return tuple(list(group) for group in self._splits.described(ids))

    def _check_groups(self) -> None:
        """Refuse groups whose blocks belong to one request, as scratch memory does.

        States are refused where boundaries cannot be told.
        """
        config = self._kv_cache_config
        others = set(config.transfer_group_ids) - set(config.prefix_cacheable_group_ids)
        if others:
            raise FormatError("KV cache groups", "all of them cacheable by prefix", sorted(others))
        self._states = StateGroups.of(config)

    def _pin(self, saved: Save) -> None:
        blocks = pin_blocks(self._pool, self._splits.of_engine(saved.blocks))
        self._pinned[saved.number] = blocks
        self._num_pinned += len(blocks)

    def _unpin(self, number: int) -> None:
        blocks = self._pinned.pop(number, None)
        if blocks is not None:
            self._num_pinned -= len(blocks)
            unpin_blocks(self._pool, blocks)
