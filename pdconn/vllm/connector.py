"""``PdConnector``: vLLM's hooks, each handed to the part that answers it.

vLLM builds the class twice: in the scheduler's process, where it lends what prefill
computed and decides what decode pulls, and in every worker's process, where it registers
memory and pulls.
"""

from __future__ import annotations

import logging
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from pdconn.protocol.messages import Described, Welcome
from pdconn.vllm.blocks.kinds import keeps_states, may_lag
from pdconn.vllm.blocks.splits import Splits
from pdconn.vllm.blocks.states import without_scratch
from pdconn.vllm.consumer import ConsumerScheduler
from pdconn.vllm.lagging import complete_windows, held_tokens
from pdconn.vllm.memory.layout import wanted_layout
from pdconn.vllm.memory.sleep import check_sleep
from pdconn.vllm.metadata import PdHandshake, PdMetadata, PdWorkerReport, welcome_of
from pdconn.vllm.partial import PartialBlocks, never_cache
from pdconn.vllm.plugin import ShutdownSignal, drain_s, join_vllm_log
from pdconn.vllm.producer import ProducerScheduler, drop_wrong_params
from pdconn.vllm.prompt import num_computed
from pdconn.vllm.quarantine import Quarantine
from pdconn.vllm.retention import keep_window_of_last_token
from pdconn.vllm.speculation import num_lookahead
from pdconn.vllm.stats import PdPromMetrics, PdStats
from pdconn.vllm.store.engine import EngineStore
from pdconn.vllm.supported import check_supported, settings_of
from pdconn.vllm.worker import PdWorker

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_PREFILLED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class PdConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill-to-decode KV transfer by one-sided reads, for hybrid models."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_log()
        check_supported(vllm_config)
        self._settings = settings = settings_of(vllm_config)
        self._incarnation = incarnation = secrets.token_hex(8)
        self._producer: ProducerScheduler | None = None
        self._consumer: ConsumerScheduler | None = None
        self._store: EngineStore | None = None
        self._loading_from_store: set[str] = set()
        self._quarantine = Quarantine()
        self._shutdown = ShutdownSignal()
        self._welcome: Welcome | None = None
        self._worker: PdWorker | None = None
        self._may_lag = may_lag(kv_cache_config)
        self._manager: KVCacheManager | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = PdWorker(settings, vllm_config, kv_cache_config)
            return
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._engine_id = transfer.engine_id
        if settings.store is not None:
            self._store = EngineStore(settings.store, vllm_config, incarnation, kv_cache_config)
        has_states = any(keeps_states(kv_cache_config))
        self._num_lookahead = num_lookahead(vllm_config, has_states)
        sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        if transfer.is_kv_producer:
            self._shutdown.watch()
            self._producer = ProducerScheduler(
                settings, transfer.engine_id, incarnation, sizes, has_states=has_states
            )
            self._drain_s = drain_s(vllm_config)
        if transfer.is_kv_consumer:
            self._consumer = ConsumerScheduler.of(
                vllm_config,
                incarnation,
                has_states=has_states,
                num_lookahead=self._num_lookahead,
                has_store=self._store is not None,
            )
        elif settings.debug_faults:
            log.warning("pdconn: debug_faults has an effect on decode only; this engine only lends")

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Let prefill keep what decode's last token attends to, and decode its partial hits."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        if self._producer is not None:
            changed = keep_window_of_last_token(kv_cache_manager, self._num_lookahead)
            log.info("pdconn: windowed groups keep the last token's window: groups=%d", changed)
        if self._consumer is not None:
            lags = complete_windows(kv_cache_manager, self._consumer.is_pulled)
            self._may_lag = self._may_lag or lags

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Where lent and quarantined blocks are pinned."""
        self._quarantine.bind(gpu_block_pool)
        if self._producer is not None:
            self._producer.bind(gpu_block_pool)
        if self._store is not None:  # after the producer, which finds no block pinned by us then
            self._store.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every worker is registered, anew if the engine has slept: say what our KV looks like."""
        handshakes = {key: meta for key, meta in metadata.items() if isinstance(meta, PdHandshake)}
        welcome = welcome_of(self._engine_id, self._incarnation, handshakes)
        if welcome == self._welcome:
            return
        if self._welcome is not None:
            welcome = welcome_of(self._engine_id, secrets.token_hex(8), handshakes)
        self._welcome, self._incarnation = welcome, welcome.incarnation
        if self._settings.description_file is not None:
            described = msgspec.json.encode(Described.of(welcome))
            Path(self._settings.description_file).write_bytes(msgspec.json.format(described))
        ranks = [rank.references for rank in welcome.ranks]
        splits = Splits.of(self._kv_cache_config.transfer_groups, ranks)
        if self._store is not None:
            self._store.open(ranks, next(iter(handshakes.values())).content, splits)
        if self._consumer is not None:
            self._consumer.registered(splits)
        if self._producer is not None:
            self._producer.serve(welcome, splits)

    def on_new_request(self, request: Request) -> None:
        """Free what is no longer lent, and claim the request's ticket at its arrival."""
        if self._producer is not None:
            self._producer.unpin_freed()
        if self._consumer is not None:
            self._consumer.arrived(request)
        else:
            drop_wrong_params(request)
        if self._producer is not None:
            self._producer.arrived(request)
        if self._store is not None:
            self._store.arrived(request)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether a pull completes a local hit of which some groups have less than others.

        It brings the states whatever is held; windows it brings from the end of the hit on.
        """
        return self._may_lag

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A pull restores every group that takes part in transfers."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """A ticket's pull first; without one, or when it is of no use, the store.

        See :meth:`ConsumerScheduler.matched` and :meth:`StoreScheduler.matched`.
        """
        found: tuple[int | None, bool] = (0, False)
        if self._consumer is not None:
            found = self._consumer.matched(request, num_computed_tokens)
        if found[0] == 0 and self._store is not None:
            stored = self._store.matched(request, num_computed_tokens)
            return stored, bool(stored)
        return found

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See :meth:`ConsumerScheduler.allocated` and :meth:`StoreScheduler.allocated`."""
        ids = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
        is_stored = self._store is not None and self._store.allocated(
            request, ids, num_external_tokens
        )
        if is_stored:
            self._loading_from_store.add(request.request_id)
        if self._consumer is not None:
            held = partial(held_tokens, self._kv_cache_config, blocks.blocks)
            self._consumer.allocated(request, ids, 0 if is_stored else num_external_tokens, held)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Tokens loaded come from the store, or from a peer."""
        if not num_external_tokens:
            return {}
        is_stored = request.request_id in self._loading_from_store
        return {CacheHitSource.DISK if is_stored else CacheHitSource.P2P: num_external_tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to do in this step."""
        metadata = PdMetadata(is_idle=scheduler_output.total_num_scheduled_tokens == 0)
        if self._consumer is not None:
            metadata.commands = self._consumer.take_commands()
        if self._producer is not None:
            metadata.to_sum = self._producer.take_sums()
            self._producer.unpin_freed()
        if self._store is not None:
            select = self._kv_cache_config.select_transfer_block_ids
            metadata.store = self._store.scheduled(scheduler_output, select)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers reported.  The engine frees the blocks of what failed after this."""
        report = connector_output.kv_connector_worker_meta
        if self._producer is not None and isinstance(report, PdWorkerReport):
            self._producer.add_sums(report.sums)
        if self._store is not None and isinstance(report, PdWorkerReport):
            self._store.note(report.store)
        for request_id in connector_output.finished_recving or ():
            if request_id in self._loading_from_store and self._store is not None:
                self._loading_from_store.discard(request_id)
                self._store.loaded(request_id)
        if self._consumer is None:
            return
        if isinstance(report, PdWorkerReport):
            self._consumer.claimed(report.claims)
            for request_id in report.quarantined:
                self._quarantine.begin(request_id, self._consumer.blocks_of(request_id))
            for request_id in report.released:
                self._quarantine.end(request_id)
            for request_id, blocks in report.partial.items():
                self._pulled_in_part(request_id, blocks)
        for request_id in connector_output.finished_recving or ():
            self._consumer.reported(request_id)

    def _pulled_in_part(self, request_id: str, blocks: PartialBlocks) -> None:
        if self._manager is not None:
            never_cache(self._manager, self._kv_cache_config, request_id, blocks)
        if self._store is not None:
            self._store.pulled(request_id, blocks)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Stored rows, in vLLM's own block hashes."""
        return () if self._store is None else self._store.take_events()

    def has_pending_push_work(self) -> bool:
        """Whether an engine that was asked to stop must wait for what it lends."""
        requested_at = self._shutdown.requested_at
        if self._producer is None or requested_at is None:
            return False
        return self._producer.drain(requested_at + self._drain_s)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request of a model with one group left the engine."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request left the engine: lend its blocks if prefill was asked for."""
        if self._consumer is not None:
            self._consumer.finished(request)
        if self._store is not None:
            self._store.finished(request)
        if self._producer is None:
            return False, None
        ticket = None
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and request.status in _PREFILLED:
            ids = self._kv_cache_config.select_transfer_block_ids(block_ids)
            groups, computed = self._kv_cache_config.transfer_groups, num_computed(request)
            ticket = self._producer.lend(request, without_scratch(groups, ids, computed))
        self._producer.finished(request)
        return False, ticket

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pin the KV memory."""
        self._of_worker().register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 is about to unmap KV memory; see :mod:`pdconn.vllm.memory.sleep`."""
        self._of_worker().sleep()

    def restore_kv_caches(self) -> None:
        """vLLM 0.33 has mapped KV memory anew."""
        self._of_worker().wake()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Our memory, for our scheduler to serve."""
        return self._of_worker().handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin before the step's forward pass, which pulls need not wait for."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, PdMetadata):
            self._of_worker().apply(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing left to do: see :meth:`bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pulls end between steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Prefill does nothing per layer: decode reads."""

    def wait_for_save(self) -> None:
        """The pass is over: what the store saves of it may be read, at leisure."""
        self._of_worker().after_pass()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Pulls that ended."""
        return self._of_worker().results()

    def build_connector_worker_meta(self) -> PdWorkerReport | None:
        """What our scheduler must know besides the results."""
        return self._of_worker().take_report()

    def get_kv_connector_stats(self) -> PdStats | None:
        """Pulls (in a worker) and leases (in the scheduler) since the last call."""
        if self._worker is not None:
            return self._worker.take_stats()
        counts: dict[str, int] = {}
        for part in (self._producer, self._consumer, self._store):
            if part is not None:
                counts |= part.take_counts()
        gauges = {} if self._store is None else self._store.take_gauges()
        return PdStats({"counts": counts, "gauges": gauges}) if counts or gauges else None

    def shutdown(self) -> None:
        """Stop every thread, close every socket, unpin the memory."""
        for part in (self._worker, self._producer, self._store):
            if part is not None:
                part.close()

    # Class side

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that transfers are best off with; vLLM takes another where it must."""
        return wanted_layout(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """vLLM 0.33 asks; what stands against it is an error that names it, as in 0.32."""
        check_sleep(kv_transfer_config)
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdStats:
        """Stats from their payload."""
        return PdStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PdPromMetrics:
        """Our metrics on vLLM's ``/metrics``."""
        return PdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _of_worker(self) -> PdWorker:
        if self._worker is None:
            raise RuntimeError("a worker's hook was called in the scheduler's process")
        return self._worker
