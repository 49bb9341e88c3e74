"""Keeps the KV of sessions in this engine until their next turn.

A request whose ``kv_transfer_params`` contain ``keep`` (:mod:`pdconn.protocol.keep`) leaves its KV
pinned when it has ended.  What is pinned is what the same tokens would hit now, in every group of
the model: all blocks of full attention, the blocks of the last window that is cached, and the state
at the last boundary that has one.  So the next turn hits as if nothing else had been computed
meanwhile::

    prompt and answer       ######################|~~~~~~~~~~~~~~~~~~
    pinned, full attention  ========================================
            window                                             =====
            state                                                  =
    a flood of other prompts evicts everything that is not pinned
    the next turn           ########################################|########

The blocks stay in vLLM's cache under their hashes, which also makes a session's name a hint: a
prompt hits by its tokens alone, whatever name it has.

Promises are bounded (:mod:`pdconn.lifecycle.promises`), and give way in the step in which a request
is not admitted for want of blocks, or in which those left do not suffice for as many tokens again;
so vLLM preempts no request for them.  References are dropped on the engine's thread only: an idle
engine keeps blocks beyond their time until its next step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pdconn.lifecycle.promises import (
    BreakReason,
    KeepRefused,
    KeepShares,
    Pin,
    PromiseBroken,
    PromiseEffect,
    Promises,
    Unpin,
)
from pdconn.protocol.errors import TicketError
from pdconn.protocol.keep import (
    MOST_REPORTED,
    KeepOrder,
    SessionKey,
    keep_of,
    kept_params,
    reports_broken,
    with_broken,
)
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.keeps.needs import BlockNeeds
from pdconn.vllm.metadata import PdMetadata
from pdconn.vllm.patches.cache_resets import watch_resets
from pdconn.vllm.patches.pool.local_hits import blocks_of_hit
from pdconn.vllm.patches.pool.pinned_blocks import NumberedPins
from pdconn.vllm.scheduler_part import SchedulerPart
from transport.errors import shown

log = logging.getLogger(__name__)

TOO_LARGE = "share"
"""Why nothing is kept: the session has more blocks than its tenant may keep."""
NOT_CACHED = "not_cached"
"""Why nothing is kept: no block of it is in vLLM's cache."""


class Keeping(SchedulerPart):
    """Promises of one engine to keep blocks.

    Args:
        shares: checked settings.
        clock: seconds that never go back.
    """

    def __init__(self, shares: KeepShares, clock: Callable[[], float]) -> None:
        self._shares, self._clock = shares, clock
        self._needs = BlockNeeds()
        self._pins = NumberedPins()
        self._promises: Promises[SessionKey, int] | None = None
        self._orders: dict[str, KeepOrder] = {}
        self._used: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, int] = {}

    def __len__(self) -> int:
        """Known requests and promises; 0 when the engine is idle and nothing is kept."""
        known = len(self._orders) + len(self._needs)
        return known + (0 if self._promises is None else len(self._promises))

    @property
    def num_blocks(self) -> int:
        """Kept blocks; one that several promises keep counts once."""
        return 0 if self._promises is None else self._promises.size

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``, to look up what a finished request leaves."""
        self._needs.manager = manager

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in; promises end before it is reset."""
        self._promises = Promises(self._shares.limits_of(block_pool.num_gpu_blocks))
        self._pins.pool = block_pool
        # vLLM refuses a reset while blocks are in use.  Where it refuses this one for another
        # reason, the promises are broken all the same, and their sessions are told.
        watch_resets(block_pool, before=self.drop_all)

    # A request

    def on_new_request(self, request: Any) -> None:
        """Note what a new request asks for its session; release it at once if it asks for that."""
        try:
            order = keep_of(request.kv_transfer_params)
        except TicketError as error:
            log.warning("pdconn: nothing is kept: %s request=%s", error, shown(request.request_id))
            return
        if order is None or self._promises is None:
            return
        self._perform(self._promises.expire(self._clock()))
        if order.seconds > 0:
            self._orders[request.request_id] = order
        else:
            self._perform(self._promises.release(order.key))

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """Note that a request was admitted; count a promise that a later turn has come back to."""
        self._needs.note_admitted(request)
        order = self._orders.get(request.request_id)
        if order is None or self._promises is None or not self._promises.use(order.key):
            return
        self._used.add(request.request_id)
        self._counts["promises_used"] += 1

    def request_finished(
        self, request: Any, blocks: TransferBlocks, num_computed: int
    ) -> dict[str, Any] | None:
        """Keep what a finished request leaves, if it has asked for that.

        Returns:
            Parameters that tell the tokens that are kept, and why an earlier promise was broken;
            for a router also those of other sessions.
        """
        self._needs.note_finished(request.request_id)
        order = self._orders.pop(request.request_id, None)
        used = request.request_id in self._used
        self._used.discard(request.request_id)
        if self._promises is None:
            return None
        kept = None
        if order is not None and num_computed:
            kept = self._keep_turn(self._promises, request, order, num_computed, used=used)
        # An answer of an aborted request is not read.
        if not num_computed or not reports_broken(request.kv_transfer_params):
            return kept
        # Last, with those that had to give way for this turn.
        return with_broken(kept, self._promises.take_unreported(MOST_REPORTED))

    def _keep_turn(
        self,
        promises: Promises[SessionKey, int],
        request: Any,
        order: KeepOrder,
        num_computed: int,
        *,
        used: bool,
    ) -> dict[str, Any]:
        """Keep what a turn leaves; returns what the answer tells of it."""
        held, num_tokens = blocks_of_hit(self._needs.manager, request, num_computed)
        broken = promises.tell(order.key)
        effects = promises.keep(order.key, held, order.seconds, self._clock())
        self._perform(effects)
        refused = None if any(isinstance(e, Pin) for e in effects) else NOT_CACHED
        if any(isinstance(effect, KeepRefused) for effect in effects):
            refused = TOO_LARGE
        return kept_params(
            order.key.session,
            num_tokens if refused is None else 0,
            used=used,
            broken=broken,
            refused=refused,
            cut_to_s=self._shares.cut_to_s(order.seconds) if refused is None else None,
        )

    # A step

    def note_matched_tokens(self, request: Any) -> None:
        """Note a request for which vLLM allocates blocks next, if there are enough."""
        self._needs.note_asked(request)

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """End promises whose time is up, and break some for requests that lack blocks."""
        if self._promises is None:
            return
        now, counts = self._clock(), scheduler_output.num_scheduled_tokens
        self._perform(self._promises.expire(now))
        if not self.num_blocks:
            self._needs.forget_asked()
            return
        kept = self.num_blocks
        lacking = self._needs.take_lacking(counts, now, kept, self._blocks_kept_for)
        if lacking > 0:
            self.make_room(lacking)

    def make_room(self, num_blocks: int) -> None:
        """Break promises for requests that lack ``num_blocks`` blocks, the oldest first.

        At least one is broken.  Those of sessions whose turns are here come last.
        """
        if self._promises is not None:
            here = {order.key for order in self._orders.values()}
            self._perform(self._promises.make_room(num_blocks, here))

    def _blocks_kept_for(self, request_id: str) -> int:
        """Blocks that are kept for the session of a request that is here."""
        order = self._orders.get(request_id)
        if order is None or self._promises is None:
            return 0
        return len(self._promises.items_of(order.key))

    # Resets and weights

    def drop_all(self) -> None:
        """Break every promise: the cache is being reset."""
        if self._promises is not None:
            self._perform(self._promises.drop_all())

    def weights_changed(self) -> None:
        """Break every promise: its KV is of other weights."""
        self.drop_all()

    # Metrics

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        counts, self._counts = +self._counts, Counter()
        return dict(counts)

    def take_gauges(self) -> dict[str, int]:
        """Kept blocks and sessions, if they have changed since the last call."""
        if self._promises is None:
            return {}
        gauges = {
            "kept_blocks": self.num_blocks,
            "kept_sessions": self._promises.num_kept,
            "blocks": int(self._pins.pool.num_gpu_blocks),
            "keepable_blocks": self._promises.limits.size,
        }
        if gauges == self._gauges or not (self._gauges or gauges["kept_sessions"]):
            return {}
        self._gauges = gauges
        return gauges

    def _perform(self, effects: Iterable[PromiseEffect[int]]) -> None:
        for effect in effects:
            match effect:
                case Pin():
                    self._pins.pin_blocks(effect.number, effect.items)
                    self._counts["promises_made"] += 1
                case Unpin():
                    self._pins.unpin_blocks(effect.number)
                case PromiseBroken():
                    self._counts[f"promises_broken_{effect.why}"] += 1
                    if effect.why is BreakReason.ROOM:
                        log.debug("pdconn: a promise gave way to requests that lack blocks")
                case KeepRefused():
                    self._counts["promises_refused"] += 1
