"""The connector's half in the scheduler's process: passes vLLM's hooks to its parts.

:mod:`~pdconn.vllm.scheduler_part` lists the parts.  The engine's thread calls everything here, by
vLLM's names.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
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
from pdconn.protocol.ticket import ours_in
from pdconn.sidechannel.clock import steady
from pdconn.vllm.blocks.kinds import keeps_states, may_lag
from pdconn.vllm.blocks.splits import Splits
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.config import Settings
from pdconn.vllm.identity.adapters import AdapterReader
from pdconn.vllm.identity.changes import WeightChanges
from pdconn.vllm.identity.greeting import Greeting
from pdconn.vllm.idle_steps import IdleSteps
from pdconn.vllm.keeps.keeping import Keeping
from pdconn.vllm.lends.growing import GrowingRequests
from pdconn.vllm.lends.lending import Lending
from pdconn.vllm.lends.waits import BlockWaits
from pdconn.vllm.metadata import PdHandshake, PdMetadata
from pdconn.vllm.patches.deferred_frees import defer_frees
from pdconn.vllm.patches.failed_loads import recompute_failed_loads
from pdconn.vllm.patches.request_writes import num_computed
from pdconn.vllm.patches.self_test import SelfTest
from pdconn.vllm.patches.stop_signal import ShutdownSignal, drain_s
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from pdconn.vllm.scheduler_part import NOTHING, Matched, SchedulerPart
from pdconn.vllm.speculation import num_lookahead
from pdconn.vllm.stats import PdStats
from pdconn.vllm.store.storing import Storing
from pdconn.vllm.tracing.pull_spans import PullSpans

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerParts:
    """The parts of one engine, in the order in which hooks are passed to them.

    Attributes:
        lending, pulling, storing, waits, keeping: the part, or None.
        every: all parts.
        asked: those that may answer ``get_num_new_matched_tokens``, in the order of asking.
    """

    def __init__(
        self,
        *,
        lending: Lending | None = None,
        pulling: Pulling | None = None,
        storing: Storing | None = None,
        spans: PullSpans | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self.lending, self.pulling, self.storing = lending, pulling, storing
        self.keeping = keeping
        self.waits = None if lending is None else BlockWaits(lending, pulling, steady)
        # In a step, waits give up claims before pulling sends the commands for that.  Pulling makes
        # a new request's parameters a dict before lending reads them, and caches the blocks of a
        # finished request before lending lends them.
        # It also caches an answer's last window, which keeping keeps then.
        self.every = _there(self.waits, pulling, spans, lending, storing, keeping)
        # The first part that returns an answer decides.
        self.asked = _there(
            lending,  # 1. The request asks for a prefix of ours: nothing is loaded.
            self.waits,  # 2. It is for another engine, whose share of blocks is used up: ask again.
            pulling,  # 3. It has a ticket: promised, or its claim is awaited.
            storing,  # 4. The store has rows of it: fetched and verified, or looked up.
        )  # 5. None: it is computed.


def _there(*parts: SchedulerPart | None) -> tuple[SchedulerPart, ...]:
    return tuple(part for part in parts if part is not None)


def _united(params: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The parameters of all parts: keys of the first, and what each has in ``pdconn``."""
    if len(params) < 2:
        return params[0] if params else None
    ours: dict[str, Any] = {}
    for name, value in (item for one in reversed(params) for item in ours_in(one).items()):
        # Two parts may tell of one session, and of others: of their blocks, and of their rows.
        match ours.get(name), value:
            case dict(known), dict():
                ours[name] = {**known, **value}
            case list(known), list():
                ours[name] = [*known, *value]
            case _:
                ours[name] = value
    return {**params[0], "pdconn": ours}


class PdScheduler:
    """:class:`~pdconn.vllm.connector.PdconnConnector` in the scheduler's process.

    Attributes:
        parts: of this engine.
        supports_divergent_local_hybrid_hits: whether a local hit is completed of which some groups
            hold less than others.
        weights: is notified of calls that may change them.
    """

    def __init__(
        self, settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._settings, self._config = settings, kv_cache_config
        incarnation = secrets.token_hex(8)
        self._greeting = Greeting(vllm_config, incarnation)
        self._adapters = AdapterReader() if settings.enforce_handshake_compat else None
        self._promised: dict[str, SchedulerPart] = {}
        self._self_test = SelfTest(None)
        self.supports_divergent_local_hybrid_hits = may_lag(kv_cache_config)
        self.parts = self._build_parts(vllm_config, incarnation)
        pulling, parallel = self.parts.pulling, vllm_config.parallel_config
        # Data-parallel ranks of a model with experts wait for each other in every step.
        self._idle_steps = None
        if pulling is not None and parallel.data_parallel_size == 1:
            self._idle_steps = IdleSteps(pulling.quiet_until)
        self.weights = WeightChanges(self._greeting, self.parts.every, self._serve)

    def _build_parts(self, vllm_config: VllmConfig, incarnation: str) -> SchedulerParts:
        settings, config = self._settings, self._config
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        lending = pulling = storing = None
        has_states = any(keeps_states(config))
        lookahead = num_lookahead(vllm_config, has_states)
        if settings.store is not None:
            storing = Storing(settings.store, vllm_config, incarnation, config)
        if transfer.is_kv_producer:
            has_drafts = vllm_config.speculative_config is not None
            stop = ShutdownSignal(wait_s=drain_s(vllm_config))
            stop.install_handlers()
            lending = Lending(
                settings,
                transfer.engine_id,
                incarnation,
                (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
                has_states=has_states,
                has_drafts=has_drafts,
                block_tokens=max(g.kv_cache_spec.block_size for g in config.kv_cache_groups),
                num_lookahead=lookahead,
                stop=stop,
            )
            lending.growing = GrowingRequests(config, has_drafts=has_drafts)
            if self._adapters is not None:
                lending.tickets.proof_of_adapter = self._adapters.proof_of
        if transfer.is_kv_consumer:
            rules = PullRules.from_config(
                vllm_config,
                config,
                incarnation,
                has_store=storing is not None,
                has_states=has_states,
                num_lookahead=lookahead,
            )
            pulling = Pulling(rules)
            pulling.adapters = self._adapters
            pulling.store = storing
            if lending is not None:
                pulling.take_back_own = lending.take_back_own
        elif settings.debug_faults:
            log.warning("pdconn: debug_faults has an effect on decode only; this engine only lends")
        spans = None if pulling is None else PullSpans.from_config(vllm_config)
        return SchedulerParts(
            lending=lending,
            pulling=pulling,
            storing=storing,
            spans=spans,
            keeping=None if settings.keep is None else Keeping(settings.keep, steady),
        )

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take vLLM's ``KVCacheManager``, before any request.

        Raises:
            ConfigError: with this vLLM we might fill blocks that a step still writes.
        """
        self._self_test = SelfTest(manager)
        every = self.parts.every
        if any(part.fills_blocks for part in every):
            defer_frees()
            recompute_failed_loads(self.is_load_optional)
        # Lending first: pulling keeps windows relative to what is freed then.
        for part in reversed(every):
            part.bind_kv_cache_manager(manager)
        self.supports_divergent_local_hybrid_hits = (
            self.supports_divergent_local_hybrid_hits
            or any(part.supports_divergent_local_hybrid_hits for part in every)
        )

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Take vLLM's block pool, in which lent, quarantined and saved blocks are pinned."""
        # Before a reset the part that was bound last is called first, so saves unpin their blocks
        # before lending does; otherwise lending would find blocks in use, and keep its leases.
        for part in self.parts.every:
            part.bind_gpu_block_pool(pool)
        self.weights.watch_pool(pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, handshakes: dict[tuple[int, int], PdHandshake]
    ) -> None:
        """Serve the workers' memory to peers, at the start and after each sleep.

        Raises:
            ConfigError: the self-test has failed with this vLLM.
        """
        pulling = self.parts.pulling
        self._self_test.run_once(None if pulling is None else pulling.answer_windows)
        if not self._greeting.registered(handshakes):
            return
        # A store that cannot be opened stops the engine before it lends anything.
        splits = self._splits()
        for part in reversed(self.parts.every):
            part.set_xfer_handshake_metadata(self._greeting, splits)
        self._serve()

    def _splits(self) -> Splits:
        """Which blocks the workers describe."""
        ranks = [rank.references for rank in self._greeting.welcome.ranks]
        return Splits.from_ranks(self._config.transfer_groups, ranks)

    def _serve(self) -> None:
        """Serve the present Welcome to peers."""
        welcome = self._greeting.welcome
        if self._settings.description_file is not None:
            described = msgspec.json.encode(Described.from_welcome(welcome))
            Path(self._settings.description_file).write_bytes(msgspec.json.format(described))
        splits = self._splits()
        for part in self.parts.every:
            part.serve(welcome, splits)

    # A request

    def on_new_request(self, request: Request) -> None:
        """Claim the ticket of a new request, and unpin the blocks of freed leases."""
        if self._adapters is not None:
            self._adapters.read_adapter_of(request)
        for part in self.parts.every:
            part.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Matched:
        """The answer of the first part that has one, in the order of :class:`SchedulerParts`."""
        self._promised.pop(request.request_id, None)
        answer = NOTHING
        for part in self.parts.asked:
            found = part.get_num_new_matched_tokens(request, num_computed_tokens)
            if found is not None:
                answer = found
                if answer[0]:
                    self._promised[request.request_id] = part
                break
        if answer[0] is not None:
            for part in self.parts.every:
                part.note_matched_tokens(request)
        return answer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start the load by the part that has promised the external tokens."""
        promised = self._promised.pop(request.request_id, None)
        if num_external_tokens:
            self.weights.note_computed()
        given = TransferBlocks(self._config, blocks.get_block_ids(), blocks.blocks)
        for part in self.parts.every:
            part.update_state_after_alloc(
                request, given, num_external_tokens, is_promised=part is promised
            )

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Whether loaded tokens come from the store or from a peer."""
        if not num_external_tokens:
            return {}
        for part in self.parts.every:
            if found := part.get_external_cache_hit_sources(request, num_external_tokens):
                return found
        return {CacheHitSource.P2P: num_external_tokens}

    def is_load_optional(self, request_id: str) -> bool:
        """Whether a request waits for the store or a lent prefix, and not for a whole prompt."""
        return any(part.is_load_optional(request_id) for part in self.parts.every)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """Lend and keep the blocks of a finished request.

        Returns:
            ``kv_transfer_params`` for its answer, or None.
        """
        self._promised.pop(request.request_id, None)
        count = num_computed(request) if request.status in _COMPUTED else 0
        blocks = TransferBlocks(self._config, block_ids)
        params = [part.request_finished(request, blocks, count) for part in self.parts.every]
        return _united([one for one in params if one is not None])

    # A step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PdMetadata:
        """Commands for the workers in this step."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        has_slept = self._idle_steps is not None and self._idle_steps.rest(num_tokens)
        metadata = PdMetadata(is_idle=num_tokens == 0 and not has_slept)
        if num_tokens:
            self.weights.note_computed()
        metadata.weights = self._greeting.take_weights()
        for part in self.parts.every:
            part.build_connector_meta(scheduler_output, metadata)
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process the workers' reports.  vLLM frees the blocks of failed loads after this."""
        for part in self.parts.every:
            part.update_connector_output(output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Stored rows, as vLLM's block hashes."""
        return [event for part in self.parts.every for event in part.take_events()]

    def get_kv_connector_stats(self) -> PdStats | None:
        """Counts of leases, tickets and rows since the last call."""
        counts: dict[str, int] = {}
        gauges: dict[str, int] = {}
        for part in self.parts.every:
            counts |= part.take_counts()
            gauges |= part.take_gauges()
        return PdStats({"counts": counts, "gauges": gauges}) if counts or gauges else None

    def has_pending_push_work(self) -> bool:
        """Whether an engine that is shutting down must wait for its leases."""
        return any(part.has_pending_push_work() for part in self.parts.every)

    def shutdown(self) -> None:
        """Stop every thread, close every socket."""
        for part in self.parts.every:
            part.shutdown()
