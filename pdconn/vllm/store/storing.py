"""The scheduler's part of a store in vLLM's terms: requests, blocks that are pinned, resets.

Blocks whose rows are being saved are pinned by references of our own in the engine's block pool
until every rank has read them, since vLLM frees window blocks while a request runs, and all blocks
when it ends.  A reset of the prefix cache, which may come with new weights, unpins them at once and
gives later rows another namespace; what was being saved is not committed.

:mod:`pdconn.store.engine.store_scheduler` decides what to load and what to save, without vLLM.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdconn.planning.plan import Need
from pdconn.protocol.errors import TicketError
from pdconn.protocol.keep import (
    MOST_REPORTED,
    KeepOrder,
    keep_of,
    kept_rows_params,
    reports_broken,
    with_broken,
)
from pdconn.protocol.ticket import trimmed
from pdconn.store.engine.beside import BesideOffer, PullOutlook
from pdconn.store.engine.build import build_scheduler
from pdconn.store.engine.store_scheduler import StoreScheduler
from pdconn.store.format.row import StoreLayout, store_layout
from pdconn.store.rank_commands import StoreCommand, StoreResult
from pdconn.store.settings import StoreSettings
from pdconn.store.store_errors import FormatError, StoreSettingError
from pdconn.vllm.blocks.partial import PartialBlocks
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.metadata import PdMetadata, PdWorkerReport
from pdconn.vllm.patches.cache_resets import watch_resets
from pdconn.vllm.patches.pool.pinned_blocks import NumberedPins
from pdconn.vllm.patches.pool.state_blocks import end_pass_at
from pdconn.vllm.prompt import is_prefetch
from pdconn.vllm.scheduler_part import Matched, SchedulerPart
from pdconn.vllm.store.boundary_states import StateGroups
from pdconn.vllm.store.events import StoreEvents, event_groups
from pdconn.vllm.store.row_keys import extras_of, has_keys, namespace_of, salted
from registration.references import KVCacheReferences
from transport.errors import shown

if TYPE_CHECKING:
    from pdconn.vllm.identity.greeting import Greeting

log = logging.getLogger(__name__)

_PINNED_SHARE = 4
"""At most this fraction of the blocks is pinned for saves; rows beyond that are not saved."""


class SavePins(NumberedPins):
    """Blocks that are pinned while their rows are being saved, by number of the save."""

    def __init__(self) -> None:
        super().__init__()
        self._of_save: dict[int, tuple[str | None, int]] = {}
        self._of_tenant: Counter[str | None] = Counter()

    def pin_saved(self, number: int, ids: Iterable[int], tenant: str | None) -> None:
        """Pin the blocks of a tenant's save."""
        before = self.num_blocks
        self.pin_blocks(number, ids)
        self._of_save[number] = tenant, self.num_blocks - before
        self._of_tenant[tenant] += self.num_blocks - before

    def unpin_blocks(self, number: int) -> None:
        """Unpin the blocks of a save.  Idempotent."""
        super().unpin_blocks(number)
        tenant, count = self._of_save.pop(number, (None, 0))
        self._of_tenant[tenant] -= count
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def is_full(self, tenant: str | None, num_tenants: int) -> bool:
        """Whether no further rows of a tenant are saved, since too many blocks are pinned.

        Of a quarter of the blocks each tenant has its share, whoever comes first.
        """
        most = self.pool.num_gpu_blocks
        is_over = self._of_tenant[tenant] * _PINNED_SHARE * num_tenants > most
        return is_over or bool(self.num_blocks * _PINNED_SHARE > most)


@dataclass(slots=True)
class _KnownRequest:
    """A request of the engine whose rows have keys.

    Attributes:
        order: what is asked for its session.
        is_mixed: whether it was computed with weights from before and from after a change.
        partial: blocks of which a pull wrote only the end.
    """

    request: Any
    order: KeepOrder | None = None
    is_mixed: bool = False
    partial: PartialBlocks = field(default_factory=dict)


class Storing(SchedulerPart):
    """The store of one engine, in its scheduler's process.

    Args:
        settings: checked settings.
        config: vLLM's configuration.
        writer: this boot's name.
        kv_cache_config: vLLM's KV cache configuration.
    """

    fills_blocks = True

    def __init__(
        self, settings: StoreSettings, config: Any, writer: str, kv_cache_config: Any
    ) -> None:
        self._settings, self._config, self._writer = settings, config, writer
        self._kv_cache_config = kv_cache_config
        self._events: StoreEvents | None = None
        self._store: StoreScheduler | None = None
        self._namespace = ""
        self._splits = UNSPLIT
        self._states = StateGroups()
        self._requests: dict[str, _KnownRequest] = {}
        self._tenants: Counter[str | None] = Counter()
        self._pins = SavePins()
        self._gauges: dict[str, int] = {}

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in it, and watch for resets."""
        self._pins.pool = block_pool
        watch_resets(block_pool, before=self.drop_rows, after=self._note_reset)

    def set_xfer_handshake_metadata(self, greeting: Greeting, splits: Splits) -> None:
        """Open the store, now that every worker's memory is known."""
        ranks = [rank.references for rank in greeting.welcome.ranks]
        self.open_store(ranks, greeting.content, splits)

    def open_store(
        self,
        ranks: Sequence[KVCacheReferences],
        traits: dict[str, str],
        splits: Splits = UNSPLIT,
    ) -> None:
        """Describe rows, and open the root.

        ``splits`` says which blocks ``ranks`` describe, of which rows are made.

        Raises:
            FormatError: KV memory that rows cannot hold.
            StoreError: the root cannot be opened.
            StoreSettingError: KV that cannot be compressed.
        """
        self._splits = splits
        self._check_groups()
        layout = store_layout(ranks, self._settings.block_tokens)
        if self._settings.compression == "exponents":
            check_bfloat16(self._kv_cache_config)
            layout = layout.packed()
        pool = self._pins.pool
        if pool.enable_kv_cache_events:
            self._events = StoreEvents(
                event_groups(self._kv_cache_config, layout, pool.hash_block_size),
                row_tokens=layout.block_tokens,
                hash_block_tokens=pool.hash_block_size,
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
            note_rows=None if self._events is None else self._events.note_rows,
        )

    # A request

    def on_new_request(self, request: Any) -> None:
        """Add a request that entered the engine."""
        if self._store is None:
            return
        order = self._note_session(self._store, request)
        if not has_keys(request):
            return
        self._forget(request.request_id)
        self._requests[request.request_id] = _KnownRequest(request, order)
        self._tenants[request.cache_salt] += 1
        self._store.on_new_request(
            request.request_id,
            request.all_token_ids,
            request.num_prompt_tokens,
            partial(extras_of, request, self._settings.block_tokens),
            cache_salt=request.cache_salt,
            may_load=not request.skip_reading_prefix_cache,
            reads_files=request.lora_request is not None,
            is_prefetch=is_prefetch(request),
        )

    def _note_session(self, store: StoreScheduler, request: Any) -> KeepOrder | None:
        """What is asked for a request's session, if that is to keep it; it is released at once."""
        try:
            order = keep_of(request.kv_transfer_params)
        except TicketError as error:
            log.debug("pdconn: store: nothing is kept: %s", error)
            return None
        if order is None:
            return None
        if not order.seconds:
            store.release_session(order.key)
            return None
        store.turn_came(order.key)
        return order

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """Tokens of the prompt that are fetched and verified, or None to ask again."""
        if self._store is None:
            return None
        name = request.request_id
        found = self._store.get_num_new_matched_tokens(
            name, request.num_tokens, num_computed_tokens
        )
        # A pass has to end where the prompt parts from those saved, for its state to be saved.
        if self._states and found is not None:
            end_pass_at(request, self._store.junction_of(name))
        return None if found == 0 else (found, bool(found))

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """Load what was promised into the request's blocks, or drop what was fetched."""
        if self._store is None:
            return
        name, count = request.request_id, num_external_tokens if is_promised else 0
        described = tuple(trimmed(group) for group in self._splits.described(blocks.ids))
        if self._store.update_state_after_alloc(name, described, count):
            if self._events is not None:
                self._events.note_hit(request, self._store.rows_loaded(name))
        elif count:  # what was promised is gone, and vLLM waits for it
            self._store.loads.fail_load(name)

    def offer_beside(self, request: Any, pull: PullOutlook) -> BesideOffer | None:
        """What can be loaded beside a pull of the request; None to ask again at a later step."""
        if self._store is None:
            return BesideOffer(pull.tokens.start)
        return self._store.offer_beside(request.request_id, pull)

    def join_pull(self, request: Any, need: Need, pull: PullOutlook) -> Need | None:
        """Load what was offered of ``need``, in described blocks, beside the request's pull."""
        if self._store is None:
            return None
        name = request.request_id
        loaded = self._store.join_pull(name, need, pull)
        if loaded is not None and self._events is not None:
            self._events.note_hit(request, self._store.rows_loaded(name))
        return loaded

    def is_load_optional(self, request_id: str) -> bool:
        """Whether the request waits for a load, without which it can be computed."""
        return self._store is not None and self._store.loads.is_loading(request_id)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Rows count as hits on a disk."""
        if self.is_load_optional(request.request_id):
            return {CacheHitSource.DISK: num_external_tokens}
        loaded = 0 if self._store is None else self._store.beside.tokens_of(request.request_id)
        if not loaded:
            return {}
        return {CacheHitSource.DISK: loaded, CacheHitSource.P2P: num_external_tokens - loaded}

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """Save the rows that this step completes, and load rows."""
        metadata.store = self._commands_of(scheduler_output)

    def _commands_of(self, output: Any) -> list[StoreCommand]:
        if self._store is None:
            return []
        state = output.kv_connector_block_state
        for request_id, count in output.num_scheduled_tokens.items():
            known = self._requests.get(request_id)
            if known is None or state is None or known.is_mixed:
                continue
            tenant = known.request.cache_salt
            if self._pins.is_full(tenant, len(self._tenants)):
                continue
            before = known.request.num_computed_tokens
            passed = range(before, before + count)
            ids = partial(self._ids_of, state, known, passed)
            saved = self._store.save_pass(request_id, passed.start, passed.stop, ids)
            if saved is None:
                continue
            self._pins.pin_saved(saved.number, self._splits.of_engine(saved.blocks), tenant)
            if self._events is not None:
                self._events.note_saving(known.request, saved.rows)
        return self._store.take_commands()

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply what ranks have saved, fetched and loaded, and blocks that pulls wrote in part."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, PdWorkerReport):
            self.note_results(report.store)
            for request_id, blocks in report.partial.items():
                self.skip_blocks(request_id, blocks)
        for request_id in connector_output.finished_recving or ():
            self.end_load(request_id)

    def note_results(self, results: Sequence[StoreResult]) -> None:
        """Apply results of ranks, and unpin the blocks that all have read."""
        if self._store is not None:
            for number in self._store.note_results(results):
                self._pins.unpin_blocks(number)

    def end_load(self, request_id: str) -> None:
        """Note that all ranks reported the request received, or failed."""
        if self._store is not None:
            self._store.loads.end_load(request_id)

    def skip_blocks(self, request_id: str, blocks: PartialBlocks) -> None:
        """Do not save these blocks, of which a pull wrote only the end."""
        if request_id in self._requests:
            self._requests[request_id].partial = blocks

    def request_finished(
        self, request: Any, blocks: TransferBlocks, num_computed: int
    ) -> dict[str, Any] | None:
        """Drop a request that left the engine, and keep its rows if that was asked.

        Returns:
            Parameters that tell whether they are kept, and why earlier ones are gone.
        """
        known = self._forget(request.request_id)
        if known is None or self._store is None:
            return None
        kept = None
        if known.order is not None and num_computed:
            broken = self._store.take_broken(known.order.key)
            is_kept = self._store.keep_turn(request.request_id, known.order, num_computed)
            kept = kept_rows_params(
                known.order.key.session,
                kept=is_kept,
                broken=broken,
                cut_to_s=self._store.keep_cut_to_s(known.order) if is_kept else None,
            )
        self._store.request_finished(request.request_id)
        if not num_computed or not reports_broken(request.kv_transfer_params):
            return kept
        broken_rows = self._store.take_unreported(MOST_REPORTED)
        return with_broken(kept, ((key, f"store-{why}") for key, why in broken_rows))

    def _forget(self, request_id: str) -> _KnownRequest | None:
        """Drop a request; returns what was known of it."""
        known = self._requests.pop(request_id, None)
        if known is None:
            return None
        tenant = known.request.cache_salt
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        return known

    # Resets and weights

    def drop_rows(self) -> None:
        """Neither save nor load rows from before: the prefix cache is being reset."""
        self._pins.unpin_all()
        if self._store is not None:
            self._store.clear_rows(salted(self._namespace, secrets.token_hex(8)))

    def _note_reset(self, is_reset: bool) -> None:
        if self._events is not None:
            self._events.note_reset(engine_announces=is_reset)

    def weights_changed(self) -> None:
        """Use another namespace: the engine's weights may be others from now on."""
        # It is a random one, for this boot alone: unless the engine's own prefix cache is reset as
        # well, what it computes still depends on blocks of the old weights.
        self.drop_rows()
        # Requests that have begun are computed with both weights, and are not saved.
        for known in self._requests.values():
            known.is_mixed = True

    # Metrics and events

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        return {} if self._store is None else self._store.take_store_counts()

    def take_gauges(self) -> dict[str, int]:
        """Bytes of the budget, if they have changed since the last call."""
        usage = {} if self._store is None else self._store.budget_gauges()
        if usage == self._gauges:
            return {}
        self._gauges = usage
        return usage

    def take_events(self) -> list[Any]:
        """KV events of rows committed and rows gone, since the last call."""
        return [] if self._events is None else self._events.next_events()

    def shutdown(self) -> None:
        """Stop the threads."""
        if self._store is not None:
            self._store.close()

    def _name(self, traits: dict[str, str], layout: StoreLayout) -> str:
        """The namespace; a random one where nothing proves which weights these are."""
        found = namespace_of(self._config, traits, layout, salt=secrets.token_hex(8))
        if found.doubt:
            log.warning(
                "pdconn: store: rows are kept for this boot of this engine alone, since nothing "
                "proves its weights (see weights_id in docs/stores.md): %s",
                shown(found.doubt, 300),
            )
        return found.name

    def _ids_of(self, state: Any, known: _KnownRequest, passed: range) -> tuple[list[int], ...]:
        """The request's blocks by group, as they are described; states at boundaries alone."""
        name = known.request.request_id
        blocks = TransferBlocks(self._kv_cache_config, state.get_block_ids(name))
        ids = [list(group) for group in blocks.ids]
        if self._states:
            offers = state.boundary_state_offloads.get(name, ())
            self._states.keep_boundary_states(ids, passed, offers, known.request.num_prompt_tokens)
        for group, block in known.partial.items():
            ids[group][: block + 1] = [0] * (block + 1)
        return tuple(list(group) for group in self._splits.described(ids))

    def _check_groups(self) -> None:
        """Refuse groups whose blocks belong to one request, and states without boundaries."""
        config = self._kv_cache_config
        others = set(config.transfer_group_ids) - set(config.prefix_cacheable_group_ids)
        if others:
            raise FormatError("KV cache groups", "all of them cacheable by prefix", sorted(others))
        self._states = StateGroups.from_kv_cache_config(config)


def check_bfloat16(kv_cache_config: Any) -> None:
    """Check that compression has something to compress.

    Raises:
        StoreSettingError: layers whose KV is not bfloat16; states are stored as they are.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        uniform = isinstance(spec, UniformTypeKVCacheSpecs)
        for name in group.layer_names:
            of_layer = spec.kv_cache_specs[name] if uniform else spec
            if isinstance(of_layer, MambaSpec) or of_layer.dtype == torch.bfloat16:
                continue
            raise StoreSettingError(
                "store.compression", f"'none' for KV of {of_layer.dtype}", f"'exponents' ({name})"
            )
