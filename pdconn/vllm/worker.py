"""The worker's part: registers KV memory, pulls on decode, reports to the scheduler."""

from __future__ import annotations

import logging
from functools import partial
from random import Random
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdconn.faults.relay import Relays
from pdconn.integrity.lent import LentSums, lent_sums
from pdconn.integrity.memory import AnyMemory
from pdconn.integrity.sums import Terms
from pdconn.lifecycle.pull import Patience
from pdconn.protocol.messages import RankGeometry
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import CompareAnew, EndBeside, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import NO_RESULTS, Puller, PullResults
from pdconn.sidechannel.affinity import wider_affinity
from pdconn.store.budget.locks import HeldWriter
from pdconn.store.rank.store import RankStore
from pdconn.store.rank_commands import (
    BesideEnded,
    FailLoad,
    Fetch,
    FetchResult,
    JoinPull,
    LoadRows,
)
from pdconn.store.shelf.open import open_shelf
from pdconn.vllm.blocks.arrangement import arrangement_of
from pdconn.vllm.blocks.geometry import kv_cache_references
from pdconn.vllm.blocks.heads import heads_by_layer
from pdconn.vllm.blocks.kinds import transferred_specs
from pdconn.vllm.blocks.partial import block_tokens, partial_blocks
from pdconn.vllm.blocks.recurrent_states import num_groups, state_chunks
from pdconn.vllm.blocks.traits import block_traits
from pdconn.vllm.config import Settings
from pdconn.vllm.identity.weights import engine_weights, started_at
from pdconn.vllm.idle_steps import IDLE_STEP_S
from pdconn.vllm.memory.layout import report_layout
from pdconn.vllm.memory.opening import open_nixl, open_transport
from pdconn.vllm.memory.warm import BackendOptions, network_only, rehearse_pulls, warm_up_of
from pdconn.vllm.metadata import PdHandshake, PdMetadata, PdWorkerReport, ReadSpeed
from pdconn.vllm.stats import PdStats
from pdconn.vllm.tracing.pull_spans import TracedPull, are_traced
from registration import RegisteredKVMemory
from registration.references import KVCacheReferences
from registration.scratch import Scratch
from transport import Transport
from transport.faulty import FaultyTransport
from transport.streams import StreamPoint, stream_point

log = logging.getLogger(__name__)


class PdWorker:
    """One worker's registered memory, and on decode its puller.

    Args:
        settings: checked settings.
        config: the engine's configuration.
        kv_cache_config: the worker's KV cache configuration.
    """

    def __init__(
        self, settings: Settings, config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._settings = settings
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._kv_caches: dict[str, Any] = {}
        self._is_asleep = False
        self._content: dict[str, str] = {}
        self._traits: dict[str, str] = {}
        self._memory: RegisteredKVMemory | None = None
        self._puller: Puller | None = None
        self._handshake: PdHandshake | None = None
        self._stats = PdStats()
        self._report = PdWorkerReport()
        self._store: RankStore | None = None
        self._num_fetching = 0
        self._relays: Relays | None = None
        self._scratch: Scratch | None = None
        self._rehearsed: list[object] = []
        self._is_idle = False
        self._others_wait = False
        self._lends = False
        self._rank = 0

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe and pin the KV memory, at the start and after each sleep; start the puller.

        Raises:
            RegistrationError: memory that cannot be described.
            TransportError: memory that cannot be pinned.
        """
        self._kv_caches = kv_caches
        tp_rank, pp = get_tensor_model_parallel_rank(), get_pp_group()
        references = self._references(kv_caches, tp_rank)
        layers = self._config.compilation_config.static_forward_context
        specs = transferred_specs(self._kv_cache_config)
        if not self._content:  # at the start: a sleep does not change the loaded weights
            named, since = self._settings.weights_id, started_at()
            weights = engine_weights(self._config, named=named, since=since)
            self._content = block_traits(self._config, layers, specs, weights)
            self._traits = self._content if self._settings.enforce_handshake_compat else {}
        content, traits = self._content, self._traits
        transfer = self._config.kv_transfer_config
        self._lends = transfer.is_kv_producer
        # vLLM sets it to 1 if the ranks do not step together, as with a dense model.
        self._others_wait = self._config.parallel_config.data_parallel_size > 1
        name = f"{transfer.engine_id}-{pp.rank_in_group}-{tp_rank}"
        transport = open_transport(self._settings, self._config, name, lends=self._lends)
        self._memory = RegisteredKVMemory(transport, references, tuple(kv_caches.values()))
        geometry = RankGeometry(pp.rank_in_group, tp_rank, self._memory.address, references)
        self._handshake = PdHandshake(msgspec.msgpack.encode(geometry), traits, content)
        log.info("pdconn: registered %s", _summary(references))
        layout = self._config.cache_config.get_resolved_kv_cache_layout()
        report_layout(self._settings.layout, layout.name, references)
        tp_size = self._config.parallel_config.tensor_parallel_size
        self._rank = pp.rank_in_group * tp_size + tp_rank
        if self._settings.rehearse and transport.name == "nixl":
            self._rehearse(transport)
        if transfer.is_kv_consumer:
            me = Rank(
                engine_id=transfer.engine_id,
                rank=self._rank,
                of=pp.world_size * tp_size,
                spread=tp_rank,
                references=references,
                traits=traits,
            )
            self._puller = self._open_puller(me, transport)
        if (store := self._settings.store) is not None:
            with wider_affinity():
                self._store = RankStore(
                    store,
                    references,
                    self._rank,
                    lambda: open_shelf(store),
                    hold=None if store.read_only else partial(HeldWriter, store.root),
                )

    def get_handshake_metadata(self) -> PdHandshake | None:
        """This worker's memory, which the scheduler serves to peers."""
        return self._handshake

    def bind_connector_metadata(self, metadata: PdMetadata) -> None:
        """Pass on the scheduler's commands of this step; only checksums are computed here."""
        self._is_idle = metadata.is_idle
        if metadata.weights is not None and self._traits:
            self._traits = {**self._traits, **metadata.weights}
            if self._puller is not None:
                self._puller.post_command(CompareAnew(self._traits))
        for terms, blocks in metadata.to_sum:
            self._sum(terms, blocks)
        after = self._drafted(metadata)
        if self._puller is not None:  # None while asleep; the scheduler sends the commands again
            for command in metadata.commands:
                self._puller.post_command(
                    command, after if isinstance(command, ReadBlocks) else None
                )
        if self._store is not None:
            for asked in metadata.store:
                self._num_fetching += isinstance(asked, Fetch | LoadRows | JoinPull | FailLoad)
                self._store.post_command(asked, after)
        self._set_waiting()

    def wait_for_save(self) -> None:
        """The step's forward pass has written its KV, which may be saved now."""
        if self._store is not None:
            self._store.after_pass()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Loads that have ended since the last step.

        Raises:
            BackendFailure: we lend, and peers can read from us no more.
            PullerBroken: a thread of the puller has died.
        """
        if self._lends and self._memory is not None:
            self._memory.transport.check()
        results = KVConnectorTransferResults()
        # An engine that only waits for pulls steps without a pause, and occupies the cores that
        # they need.  So an idle step waits for the first report; but not on a data-parallel rank of
        # a model with experts, since the ranks with work would wait for it in every step.
        if self._is_idle and not self._others_wait:
            self._wait()
        if self._store is not None:
            self._collect_stored(self._store, results)
        if self._puller is not None:
            pulled = self._puller.take_results()
            if pulled is not NO_RESULTS:
                self._note(pulled, results)
        self._set_waiting()
        return results

    def build_connector_worker_meta(self) -> PdWorkerReport | None:
        """Further reports for the scheduler, or None."""
        if self._report.is_empty:
            return None
        report, self._report = self._report, PdWorkerReport()
        return report

    def take_stats(self) -> PdStats | None:
        """Pulls since the last call, or None."""
        if self._puller is not None:
            for name, amount in self._puller.take_pull_counts().items():
                self._stats.add_count(name, amount)
        if self._store is not None:
            for name, amount in self._store.take_rank_counts().items():
                self._stats.add_count(f"store_{name}", amount)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, PdStats()
        return stats

    def shutdown(self) -> None:
        """Stop the threads and unpin the memory."""
        if self._store is not None:
            self._store.close()
        self._end_transfers()
        self._store, self._kv_caches = None, {}

    def unregister_kv_caches(self) -> None:
        """KV memory is about to be unmapped: end every pull and close the transport.

        Idempotent (:mod:`pdconn.vllm.memory.sleep`).

        Raises:
            BackendFailure: a read can still write to the memory, which must stay.
        """
        if not self._is_asleep and self._memory is not None:
            self._end_transfers()
            self._is_asleep = True
            log.info("pdconn: KV memory is no longer registered: the engine goes to sleep")

    def restore_kv_caches(self) -> None:
        """KV memory is mapped again, to other pages: register it.  Idempotent.

        Raises:
            RegistrationError, TransportError: it cannot be described or pinned.
        """
        if self._is_asleep:
            self.register_kv_caches(self._kv_caches)
            self._is_asleep = False

    def _drafted(self, metadata: PdMetadata) -> StreamPoint | None:
        """The point that the GPU must reach before this step's loads write to their blocks."""
        # vLLM's model runner V2 reports a step's tokens before its drafter has run, so a block that
        # the drafter still writes may have been freed, and given to another request.  This step's
        # own pass comes after this point.
        asked = (*metadata.commands, *metadata.store)
        if not any(isinstance(one, ReadBlocks | LoadRows | JoinPull) for one in asked):
            return None
        if self._memory is None or self._config.speculative_config is None:
            return None
        return stream_point(self._memory.references.tensors[0].device)

    def _end_transfers(self) -> None:
        if self._puller is not None:
            self._puller.close()
        if self._relays is not None:
            self._relays.close()
        if self._memory is not None:
            self._memory.close()
        self._puller = self._relays = self._memory = self._scratch = None
        self._rehearsed = []

    def _set_waiting(self) -> None:
        """Prefetches and saves of the store let what is more urgent go first."""
        if self._store is not None:
            pulls = None if self._puller is None else self._puller.most_urgent
            self._store.set_waiting(pulls, is_loading=self._num_fetching > 0)

    def _wait(self) -> None:
        """Wait for the store, or for the puller."""
        if self._num_fetching and self._store is not None:
            self._store.wait_for_answer(IDLE_STEP_S)
        elif self._puller is not None:
            self._puller.wait_for_report(IDLE_STEP_S)

    def _collect_stored(self, store: RankStore, results: KVConnectorTransferResults) -> None:
        loaded, failed, answers = (
            store.take_loaded(),
            store.take_load_failures(),
            store.take_results(),
        )
        results.finished_recving.update(loaded, failed)
        results.failed_recving.update(failed)
        self._report.store += answers
        for ended in store.take_ended_beside():
            if self._puller is not None:
                self._puller.post_command(EndBeside(ended.request, ended.loaded))
        fetched = sum(isinstance(answer, FetchResult | BesideEnded) for answer in answers)
        self._num_fetching -= len(loaded) + len(failed) + fetched

    def _note(self, pulled: PullResults, results: KVConnectorTransferResults) -> None:
        results.finished_recving.update(pulled.received)
        for record in pulled.records:
            self._stats.record(record)
            if self._store is not None and not record.is_followed:
                speed = ReadSpeed(record.request, record.moved.nbytes, record.transfer_s)
                self._report.read.append(speed)
            if are_traced(self._config):
                self._report.pulled.append(TracedPull.now(self._rank, record))
            if record.begins:
                sizes = block_tokens(self._kv_cache_config)
                self._report.add_partial(record.request, partial_blocks(record.begins, sizes))
        for failed in pulled.failed:
            results.failed_recving.add(failed.request)
            results.finished_recving.add(failed.request)
            if not failed.is_cancelled:
                self._stats.add_count("failed")
            if failed.quarantined:
                self._report.quarantined.append(failed.request)
                self._stats.add_count("quarantined")
        self._report.released += pulled.released
        self._report.claims += pulled.claims
        self._report.expected += pulled.expected

    def _sum(self, terms: Terms, blocks: tuple[BlockList, ...]) -> None:
        """Checksum what a finished request lends, on the engine's thread."""
        summed: LentSums | None = None
        try:
            if self._memory is not None:  # None while asleep: nothing is lent
                summed = lent_sums(AnyMemory(), self._memory.references, blocks, terms)
        except Exception:  # no GPU memory to spare: readers get ChecksumUnavailable
            log.warning("pdconn: lent without checksums: request=%s", terms.request, exc_info=True)
        self._report.sums.append((terms.request, self._rank, summed))

    def _open_puller(self, me: Rank, transport: Transport) -> Puller:
        settings, faults = self._settings, self._settings.debug_faults
        if faults:
            log.warning("pdconn: debug_faults is on, answers may be wrong: %s", faults)
        # Each rank has its own seed, or all would fail alike.
        if faults.reads:
            rng = Random(f"{faults.seed}/{me.rank}")
            transport = FaultyTransport(transport, faults.reads, rng)
        if faults.messages:
            self._relays = Relays(faults.messages, faults.seed + 1000 * me.rank)
        patience = Patience(settings.claim_timeout, settings.read_timeout, settings.drain_timeout)
        warm_up, self._scratch = warm_up_of(settings.warm_peers, me.references, transport)
        through = None if self._relays is None else self._relays.through
        with wider_affinity():
            return Puller(
                me,
                transport,
                patience=patience,
                verify=settings.verify,
                security=settings.security,
                warm_up=warm_up,
                through=through,
            )

    def _rehearse(self, transport: Transport) -> None:
        """Pull once from ourselves, as from a peer on this host and as from one on another."""
        ours = self._settings.backend_options
        options: list[BackendOptions] = [ours]
        if "UCX" in self._settings.backends and (remote := network_only(ours)) is not None:
            options.append(remote)
        openers = [
            partial(open_nixl, self._settings, self._config, "rehearsal", each, lends=self._lends)
            for each in options
        ]
        with wider_affinity():
            self._rehearsed = rehearse_pulls(
                transport,
                openers,
                lends=self._lends,
                pulls=self._config.kv_transfer_config.is_kv_consumer,
            )

    def _references(self, kv_caches: dict[str, Any], tp_rank: int) -> KVCacheReferences:
        model, parallel = self._config.model_config, self._config.parallel_config
        layout = self._config.cache_config.get_resolved_kv_cache_layout()
        layers = self._config.compilation_config.static_forward_context
        specs = transferred_specs(self._kv_cache_config)
        return kv_cache_references(
            self._kv_cache_config,
            kv_caches,
            layout=layout.name,
            total_kv_heads=heads_by_layer(self._config, layers, specs),
            states=partial(
                state_chunks,
                num_groups=num_groups(model.hf_text_config),
                tp_rank=tp_rank,
                tp_size=parallel.tensor_parallel_size,
            ),
            units=lambda name, spec: arrangement_of(spec, layers.get(name), layout.name).unit,
            tp_rank=tp_rank,
            tp_size=parallel.tensor_parallel_size,
            modules=layers,
        )


def _summary(references: KVCacheReferences) -> str:
    groups = ", ".join(
        f"{group.kind}{f'({group.window})' if group.window else ''} x {len(group.layers)} layers"
        for group in references.groups
    )
    nbytes = sum(memory.nbytes for memory in references.memories())
    return f"{nbytes / 2**20:.0f} MiB in {len(references.memories())} region(s): {groups}"
