"""``PdconnConnector``: passes vLLM's hooks to its scheduler or worker half.

vLLM creates the class in the scheduler's process, where :class:`PdScheduler` lends blocks and
decides what is pulled, and in every worker's process, where :class:`PdWorker` registers memory and
pulls.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
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

from pdconn.vllm.config import ConfigError
from pdconn.vllm.memory.layout import wanted_layout
from pdconn.vllm.memory.sleep import check_sleep
from pdconn.vllm.metadata import PdHandshake, PdMetadata, PdWorkerReport
from pdconn.vllm.patches.engine_calls import watch_updates
from pdconn.vllm.patches.self_test import tried
from pdconn.vllm.patches.tested_versions import check_version
from pdconn.vllm.plugin import join_vllm_log
from pdconn.vllm.scheduler import PdScheduler
from pdconn.vllm.stats import PdPromMetrics, PdStats
from pdconn.vllm.supported import answer_in_tree_keys, check_supported, settings_of
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


class PdconnConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill-to-decode KV transfer by one-sided reads, for hybrid models."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_log()
        check_supported(vllm_config)
        settings = settings_of(vllm_config)
        check_version(vllm.__version__, settings.untested_vllm)
        self._worker: PdWorker | None = None
        self._scheduler: PdScheduler | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = PdWorker(settings, vllm_config, kv_cache_config)
        else:
            answer_in_tree_keys(vllm_config)
            self._scheduler = PdScheduler(settings, vllm_config, kv_cache_config)
            watch_updates(self._scheduler.weights)

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's ``KVCacheManager``, before any request."""
        super().bind_kv_cache_manager(kv_cache_manager)
        bound = partial(self._of_scheduler().bind_kv_cache_manager, kv_cache_manager)
        tried("bind_kv_cache_manager", bound)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's block pool, in which lent and quarantined blocks are pinned."""
        self._of_scheduler().bind_gpu_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve the workers' memory to peers.

        Raises:
            ConfigError: another connector's metadata: MultiConnector passes on those of the first
                connector that has some.
        """
        handshakes = {key: meta for key, meta in metadata.items() if isinstance(meta, PdHandshake)}
        if not handshakes:
            seen = ", ".join(sorted({type(meta).__name__ for meta in metadata.values()}))
            hint = "MultiConnector serves one connector that hands over, the first in its list"
            raise ConfigError("handshake metadata", "ours", seen or "none", hint)
        self._of_scheduler().set_xfer_handshake_metadata_pp_aware(handshakes)

    def on_new_request(self, request: Request) -> None:
        """Claim the ticket of a new request."""
        self._of_scheduler().on_new_request(request)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether a local hit is completed of which some groups hold less than others."""
        ours = self._scheduler
        return ours is not None and ours.supports_divergent_local_hybrid_hits

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Every group that takes part in transfers: vLLM does not zero their blocks."""
        # Pulls and loads zero the rest of the blocks (:mod:`pdconn.planning.plan`).
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that are loaded from a lender or the store; None: ask again."""
        return self._of_scheduler().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start the load of a request that has blocks."""
        ours = self._of_scheduler()
        ours.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Whether loaded tokens come from the store or from a peer."""
        ours = self._of_scheduler()
        return ours.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Commands for the workers in this step."""
        return self._of_scheduler().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the workers' reports."""
        self._of_scheduler().update_connector_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Stored rows, as vLLM's block hashes."""
        return self._of_scheduler().take_events()

    def has_pending_push_work(self) -> bool:
        """Whether an engine that is shutting down must wait for its leases."""
        return self._of_scheduler().has_pending_push_work()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lend the blocks of a finished request of a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lend the blocks of a finished request; they are pinned, so vLLM need not wait."""
        return False, self._of_scheduler().request_finished(request, block_ids)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pin the KV memory."""
        self._of_worker().register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Close the transport: vLLM 0.33 is about to unmap KV memory."""
        self._of_worker().unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Register KV memory again, which vLLM 0.33 has mapped to other pages."""
        self._of_worker().restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This worker's memory, for our scheduler to serve."""
        return self._of_worker().get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start loads before the step's forward pass, for which they need not wait."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, PdMetadata):
            self._of_worker().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Does nothing: :meth:`bind_connector_metadata` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end between steps."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Does nothing: decode reads from KV memory."""

    def wait_for_save(self) -> None:
        """The forward pass has ended: the store may save its KV later."""
        self._of_worker().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended."""
        return self._of_worker().get_transfer_results()

    def build_connector_worker_meta(self) -> PdWorkerReport | None:
        """Further reports for our scheduler."""
        return self._of_worker().build_connector_worker_meta()

    def get_kv_connector_stats(self) -> PdStats | None:
        """Pulls (in a worker) and leases (in the scheduler) since the last call."""
        if self._worker is not None:
            return self._worker.take_stats()
        return self._of_scheduler().get_kv_connector_stats()

    def shutdown(self) -> None:
        """Stop every thread, close every socket, unpin the memory."""
        if self._worker is not None:
            self._worker.shutdown()
        else:
            self._of_scheduler().shutdown()

    # Class side

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The preferred layout for transfers; vLLM may use another."""
        return wanted_layout(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the engine may sleep (vLLM 0.33); raises with the reason if not, as in 0.32."""
        check_sleep(kv_transfer_config)
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdStats:
        """Statistics from their payload."""
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

    def _of_scheduler(self) -> PdScheduler:
        if self._scheduler is None:
            raise RuntimeError("a scheduler's hook was called in a worker's process")
        return self._scheduler


PdConnector = PdconnConnector
"""The former name, for configurations and subclasses that use it."""
