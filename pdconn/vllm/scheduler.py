"""The connector's half in the scheduler's process: who answers what vLLM asks.

Three parts may be there: the *producer* lends what this engine computed, the *consumer* decides
what it pulls, the *store* what it saves and loads.  The engine's thread calls everything here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from pdconn.protocol.messages import Described
from pdconn.sidechannel.clock import steady
from pdconn.vllm.blocks.kinds import keeps_states, may_lag
from pdconn.vllm.blocks.partial import PartialBlocks
from pdconn.vllm.blocks.splits import Splits
from pdconn.vllm.blocks.states import without_scratch
from pdconn.vllm.config import Settings
from pdconn.vllm.consumer import ConsumerScheduler
from pdconn.vllm.identity.adapters import AdapterReader
from pdconn.vllm.identity.changes import WeightChanges
from pdconn.vllm.identity.greeting import Greeting
from pdconn.vllm.lends.lendable import answer_of
from pdconn.vllm.lends.patience import PrefixPatience
from pdconn.vllm.lends.waits import BlockWaits
from pdconn.vllm.memory.quarantine import Quarantine
from pdconn.vllm.metadata import PdHandshake, PdMetadata, PdWorkerReport
from pdconn.vllm.patches.deferred_frees import defer_frees
from pdconn.vllm.patches.failed_loads import recompute_failed_loads
from pdconn.vllm.patches.pool.answer_windows import AnswerWindows
from pdconn.vllm.patches.pool.kept_windows import keep_window_of_last_token
from pdconn.vllm.patches.pool.local_hits import agreed_tokens, complete_windows, held_tokens
from pdconn.vllm.patches.pool.uncached_blocks import never_cache
from pdconn.vllm.patches.request_writes import drop_wrong_params, num_computed
from pdconn.vllm.patches.self_test import SelfTest
from pdconn.vllm.patches.stop_signal import ShutdownSignal, drain_s
from pdconn.vllm.producer import ProducerScheduler
from pdconn.vllm.speculation import num_lookahead
from pdconn.vllm.stats import PdStats
from pdconn.vllm.store.engine import EngineStore
from pdconn.vllm.tracing.pulls import PullSpans

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_PREFILLED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class PdScheduler:
    """What :class:`~pdconn.vllm.connector.PdconnConnector` does in the scheduler's process.

    Attributes:
        completes_hits: whether a pull completes a local hit of which some groups have less
            than others.  It brings the states whatever is held; windows it brings from what
            they hold on.
        weights: hears of calls that may change them.
    """

    _waits: BlockWaits | None = None  # where it lends
    _patience = cached_property(lambda self: PrefixPatience(steady))

    def __init__(
        self, settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._settings = settings
        self._config = kv_cache_config
        incarnation = secrets.token_hex(8)
        self._greeting = Greeting(vllm_config, incarnation)
        self._producer: ProducerScheduler | None = None
        self._consumer: ConsumerScheduler | None = None
        self._store: EngineStore | None = None
        self._promised_by_store: set[str] = set()
        self._loading_from_store: set[str] = set()
        self._quarantine = Quarantine()
        self._shutdown = ShutdownSignal()
        self._spans = PullSpans.of(vllm_config)
        self._manager: KVCacheManager | None = None
        self._self_test = SelfTest(None)
        self._answers: AnswerWindows | None = None
        self.completes_hits = may_lag(kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._block_tokens = max(group.kv_cache_spec.block_size for group in groups)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if settings.store is not None:
            self._store = EngineStore(settings.store, vllm_config, incarnation, kv_cache_config)
        self._adapters = AdapterReader() if settings.enforce_handshake_compat else None
        has_states = any(keeps_states(kv_cache_config))
        self._num_lookahead = num_lookahead(vllm_config, has_states)
        sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        if transfer.is_kv_producer:
            self._shutdown.watch()
            self._producer = ProducerScheduler(
                settings,
                transfer.engine_id,
                incarnation,
                sizes,
                has_states=has_states,
                has_drafts=vllm_config.speculative_config is not None,
                block_tokens=self._block_tokens,
            )
            if self._adapters is not None:
                self._producer.proof_of_adapter = self._adapters.proof_of
            self._drain_s = drain_s(vllm_config)
        if transfer.is_kv_consumer:
            self._consumer = ConsumerScheduler.of(
                vllm_config,
                incarnation,
                has_states=has_states,
                num_lookahead=self._num_lookahead,
                has_store=self._store is not None,
            )
            self._consumer.adapters = self._adapters
            if self._producer is not None:
                self._consumer.take_back_own = self._producer.take_back_own
        if self._producer is not None:
            self._waits = BlockWaits(self._producer, self._consumer, steady)
        if self._consumer is None and settings.debug_faults:
            log.warning("pdconn: debug_faults has an effect on decode only; this engine only lends")
        parts = self._producer, self._consumer, self._store
        self.weights = WeightChanges(self._greeting, *parts, self._serve)

    def bind_manager(self, manager: KVCacheManager) -> None:
        """Let prefill keep what decode's last token attends to, and decode hits of its own.

        Raises:
            ConfigError: this vLLM would let us fill blocks that a step still writes.
        """
        self._manager = manager
        self._self_test = SelfTest(manager)
        if self._consumer is not None or self._store is not None:
            defer_frees()
            recompute_failed_loads(self._is_load_optional)
        if self._waits is not None:
            self._waits.bind(manager)
        if self._producer is not None:
            changed = keep_window_of_last_token(manager, self._num_lookahead)
            log.info("pdconn: windowed groups keep the last token's window: groups=%d", changed)
        if self._consumer is not None:
            told = complete_windows(manager, self._consumer.pulled_until)
            self.completes_hits = self.completes_hits or told
            self._answers = AnswerWindows.of(manager, manager.max_model_len)

    def bind_pool(self, pool: BlockPool) -> None:
        """Where lent and quarantined blocks are pinned."""
        self._quarantine.bind(pool)
        if self._producer is not None:
            self._producer.bind(pool)
        if self._store is not None:  # after the producer, which finds no block pinned by us then
            self._store.bind(pool)
        self.weights.bind(pool)

    def registered(self, handshakes: dict[tuple[int, int], PdHandshake]) -> None:
        """Every worker is registered, anew if the engine has slept: say what our KV looks like.

        Raises:
            ConfigError: this vLLM works in another way than those that were tested.
        """
        self._self_test.run_once(self._answers)
        if not self._greeting.registered(handshakes):
            return
        ranks = [rank.references for rank in self._greeting.welcome.ranks]
        if self._store is not None:
            self._store.open(ranks, self._greeting.content, self._splits())
        if self._consumer is not None:
            self._consumer.registered(self._splits())
            self._consumer.doubt = self._greeting.doubt
        self._serve()

    def _splits(self) -> Splits:
        """Which blocks are described."""
        ranks = [rank.references for rank in self._greeting.welcome.ranks]
        return Splits.of(self._config.transfer_groups, ranks)

    def _serve(self) -> None:
        """Say what our KV looks like from now on."""
        welcome = self._greeting.welcome
        if self._settings.description_file is not None:
            described = msgspec.json.encode(Described.of(welcome))
            Path(self._settings.description_file).write_bytes(msgspec.json.format(described))
        if self._producer is not None:
            self._producer.serve(welcome, self._splits())

    def arrived(self, request: Request) -> None:
        """Free what is no longer lent, and claim the request's ticket at its arrival."""
        if self._adapters is not None:
            self._adapters.arrived(request)
        if self._producer is not None:
            self._producer.unpin_freed()
        if self._consumer is not None:
            self._consumer.arrived(request)
            self._spans.arrived(request)
            if self._waits is not None:
                self._waits.arrived(request)
        else:
            drop_wrong_params(request)
        if self._producer is not None:
            self._producer.arrived(request)
        if self._store is not None:
            self._store.arrived(request)

    def matched(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """A ticket's pull first; without one, or when it is of no use, the store.

        See :meth:`ConsumerScheduler.matched` and :meth:`StoreScheduler.matched`.  Nothing is
        brought for a request that asks for a prefix: it is held here, or refused.
        """
        if self._producer is not None and request.request_id in self._producer.prefixes:
            self._producer.prefixes.looked_up(request, self._held_by_all(request, num_local))
            if self._waits is not None:
                self._waits.asked(request)
            return 0, False
        if self._waits is not None and self._waits.is_held_back(request):
            return None, False
        found = self._matched(request, num_local)
        if self._waits is not None and found[0] is not None:
            self._waits.asked(request)
        return found

    def _matched(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = (0, False)
        if self._consumer is not None:
            found = self._consumer.matched(request, num_local)
            name, count = request.request_id, found[0]
            if count is not None:
                self._patience.misses(request, request.num_tokens - num_local - count)
            elif prefix := self._consumer.prefix_of(name):
                self._patience.awaits(name, prefix)
        self._promised_by_store.discard(request.request_id)
        if found[0] == 0 and self._store is not None:
            stored = self._store.matched(request, num_local)
            if stored:
                self._promised_by_store.add(request.request_id)
            return stored, bool(stored)
        return found

    def _held_by_all(self, request: Request, num_local: int) -> int:
        """Tokens that every group holds of the request's prompt.

        Beside states vLLM tells what full attention does, and beside windows where a pull is
        promised: it takes what all groups hold if nothing is brought.
        """
        if self._manager is None or not self.completes_hits:
            return num_local
        agreed = agreed_tokens(self._manager, request)
        return min(num_local, agreed - agreed % self._block_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """See :meth:`ConsumerScheduler.allocated` and :meth:`StoreScheduler.allocated`."""
        name, ids = request.request_id, blocks.get_block_ids()
        ids = self._config.select_transfer_block_ids(ids)
        if self._producer is not None:
            groups = self._config.transfer_groups
            self._producer.allocated(request, partial(without_scratch, groups, ids))
        if self._waits is not None:
            self._waits.allocated(request, num_external)
        if self._consumer is not None:
            is_prefix = self._consumer.prefix_of(name) > 0
            self._patience.allocated(name, num_external if is_prefix else 0)
        if num_external:
            self.weights.computed()
        promised = num_external if name in self._promised_by_store else 0
        self._promised_by_store.discard(name)
        is_stored = self._store is not None and self._store.allocated(request, ids, promised)
        if is_stored:
            self._loading_from_store.add(name)
        if self._consumer is not None:
            held = None
            if self.completes_hits:
                held = partial(held_tokens, self._config, blocks.blocks)
            self._consumer.allocated(request, ids, 0 if is_stored else num_external, held)

    def _is_load_optional(self, request_id: str) -> bool:
        """Whether a request waits for its store, or for a lent prefix: not for a whole prompt."""
        if request_id in self._loading_from_store:
            return True
        return self._consumer is not None and self._consumer.is_of_prefix(request_id)

    def hit_sources(self, request: Request, num_external: int) -> dict[CacheHitSource, int]:
        """Tokens loaded come from the store, or from a peer."""
        if not num_external:
            return {}
        is_stored = request.request_id in self._loading_from_store
        return {CacheHitSource.DISK if is_stored else CacheHitSource.P2P: num_external}

    def take_metadata(self, scheduler_output: SchedulerOutput) -> PdMetadata:
        """What the workers are to do in this step."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        metadata = PdMetadata(is_idle=num_tokens == 0)
        if self._waits is not None:
            self._waits.stepped(num_tokens)
        if num_tokens:
            self.weights.computed()
        metadata.weights = self._greeting.take_weights()
        if self._consumer is not None:
            for request_id in self._patience.overdue():
                self._consumer.abandon(request_id)
            metadata.commands = self._consumer.take_commands()
        if self._producer is not None:
            metadata.to_sum = self._producer.take_sums()
            self._producer.unpin_freed()
        if self._store is not None:
            select = self._config.select_transfer_block_ids
            metadata.store = self._store.scheduled(scheduler_output, select)
        return metadata

    def reported(self, output: KVConnectorOutput) -> None:
        """The workers reported.  The engine frees the blocks of what failed after this."""
        report = output.kv_connector_worker_meta
        received = output.finished_recving or ()
        if isinstance(report, PdWorkerReport):
            if self._producer is not None:
                self._producer.add_sums(report.sums)
            if self._store is not None:
                self._store.note(report.store)
        for request_id in received:
            self._received(request_id, failed=request_id in output.failed_recving)
        if self._consumer is None:
            return
        if isinstance(report, PdWorkerReport):
            self._consumer.claimed(report.claims)
            self._spans.pulled(report.pulled)
            for request_id in report.quarantined:
                self._quarantine.begin(request_id, self._consumer.blocks_of(request_id))
            for request_id in report.released:
                self._quarantine.end(request_id)
            for request_id, blocks in report.partial.items():
                if not self._consumer.is_over(request_id):
                    self._pulled_in_part(request_id, blocks)
        for request_id in received:
            self._consumer.reported(request_id)

    def _received(self, request_id: str, *, failed: bool) -> None:
        """A load or pull has ended, well or not."""
        self._patience.received(request_id, failed=failed)
        if self._waits is not None:
            self._waits.received(request_id)
        if request_id in self._loading_from_store and self._store is not None:
            self._loading_from_store.discard(request_id)
            self._store.loaded(request_id)

    def _pulled_in_part(self, request_id: str, blocks: PartialBlocks) -> None:
        if self._manager is not None:
            never_cache(self._manager, self._config, request_id, blocks)
        if self._answers is not None:
            self._answers.pulled_in_part(request_id, blocks)
        if self._store is not None:
            self._store.pulled(request_id, blocks)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Stored rows, in vLLM's own block hashes."""
        return () if self._store is None else self._store.take_events()

    def is_awaited(self) -> bool:
        """Whether an engine that was asked to stop must wait for what it lends."""
        requested_at = self._shutdown.requested_at
        if self._producer is None or requested_at is None:
            return False
        return self._producer.drain(requested_at + self._drain_s)

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """A request left the engine: lend its blocks, and return a ticket, if it asked for one."""
        if self._answers is not None:
            is_whole = request.status in _PREFILLED
            self._answers.finished(request, num_computed(request) if is_whole else 0)
        if self._consumer is not None:
            self._consumer.finished(request)
            self._spans.finished(request.request_id)
        if self._store is not None:
            self._promised_by_store.discard(request.request_id)
            self._store.finished(request)
        if self._waits is not None:
            self._waits.finished(request.request_id)
        self._patience.finished(request.request_id)
        if self._producer is None:
            return None
        ticket = None
        params = request.kv_transfer_params
        if params and request.status in _PREFILLED and self._greeting.is_proven:
            is_for_decode = params.get("do_remote_decode")
            ticket = (self._lend if is_for_decode else self._lend_back)(request, block_ids)
        self._producer.finished(request)
        return ticket

    def _lend(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The prompt, to decode."""
        assert self._producer is not None
        return self._producer.lend(request, self._held(block_ids, num_computed(request)))

    def _lend_back(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """Prompt and answer, to who computes the next turn, if their ticket is wanted."""
        assert self._producer is not None
        answers = self._producer.answers
        if answers is None or self._manager is None or not answers.asked(request):
            return None
        num_tokens = num_computed(request)
        if not num_tokens:
            return None
        held = self._held(block_ids, num_tokens)
        answer = answer_of(self._manager, self._config, request, held, num_tokens)
        return self._producer.lend_back(request, answer)

    def _held(self, block_ids: tuple[list[int], ...], num_tokens: int) -> tuple[list[int], ...]:
        """Blocks of so many tokens, by transferred group."""
        ids = self._config.select_transfer_block_ids(block_ids)
        return without_scratch(self._config.transfer_groups, ids, num_tokens)

    def take_stats(self) -> PdStats | None:
        """Leases and rows since the last call."""
        counts: dict[str, int] = {}
        for part in (self._producer, self._consumer, self._store):
            if part is not None:
                counts |= part.take_counts()
        gauges = {} if self._store is None else self._store.take_gauges()
        return PdStats({"counts": counts, "gauges": gauges}) if counts or gauges else None

    def close(self) -> None:
        """Stop every thread, close every socket."""
        for part in (self._producer, self._store):
            if part is not None:
                part.close()
