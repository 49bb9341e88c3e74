"""Requests that wait for blocks, and claims given up so that no two engines wait for each other.

A request that waits for blocks here may hold a claim, which pins blocks elsewhere; and blocks
here may be pinned by leases whose readers wait elsewhere::

    A   lends to B ◄──────── claims ──────── waits for blocks   B
        waits for blocks ─── claims ───────► lends to A

So an engine that lends gives up claims of requests that wait for blocks, once it is stalled (a
request waits, nothing is computed or loaded) for a quarter of a second: first those for prefixes,
which cost least, then those for whole prompts, half of them in each round.  Of ``n`` none is left
after ``log2(n) + 1`` rounds.  Their requests compute here.  An engine that lends nothing gives up
nothing: what its requests wait for ends by itself.  ``docs/design.md`` has the whole argument.

This is rare: an engine that also decodes computes prompts for others within a share of its blocks
(:mod:`pdconn.vllm.lends.prompts`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdconn.vllm.lends.pins import LeaseKind
from pdconn.vllm.lends.prompts import PromptShare
from pdconn.vllm.patches.pool.admitted_blocks import blocks_for, num_free_blocks
from pdconn.vllm.scheduler_part import ASK_AGAIN, Matched, SchedulerPart

if TYPE_CHECKING:
    from pdconn.vllm.blocks.transferred import TransferBlocks
    from pdconn.vllm.lends.lending import Lending
    from pdconn.vllm.metadata import PdMetadata
    from pdconn.vllm.pulls.pulling import Pulling

log = logging.getLogger(__name__)

FIRST_S = ROUND_S = 0.25
"""Of a stall until claims for prefixes are given up; of each round after that."""
ADMITS_NONE_S = 10.0
"""Without an admitted request while one waits for blocks: the engine counts as stalled."""
DECODES_S = 60.0
"""An engine decodes for others if it was given a ticket within the last so many seconds."""


class BlockWaits(SchedulerPart):
    """Requests that wait for blocks in an engine that lends, and may pull as well.

    Args:
        lending: whose leases yield.
        pulling: whose claims are given up; None in an engine that only lends.
        clock: seconds that never go back.
    """

    def __init__(
        self, lending: Lending, pulling: Pulling | None, clock: Callable[[], float]
    ) -> None:
        self._lending, self._pulling, self._clock = lending, pulling, clock
        self._manager: Any = None
        self._prompts = PromptShare()
        self._handed_over_at = -math.inf
        self._asked: dict[str, int] = {}
        self._loading: set[str] = set()
        self._loaded: set[str] = set()
        self._still_since = self._none_since = math.inf
        self._giving_way: _Rounds | None = None

    def __len__(self) -> int:
        """Known requests; 0 when the engine is idle."""
        return len(self._asked) + len(self._loading) + len(self._loaded) + len(self._prompts)

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``."""
        self._manager = manager

    def on_new_request(self, request: Any) -> None:
        """Record that a request with a ticket has arrived: this engine decodes for others."""
        params = request.kv_transfer_params
        # Anything but a dict is an invalid ticket.
        if params and (not isinstance(params, dict) or params.get("do_remote_prefill")):
            self._handed_over_at = self._clock()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """Delay a request for another engine while the share of its prompts is used up."""
        return ASK_AGAIN if self.is_held_back(request) else None

    def is_held_back(self, request: Any) -> bool:
        """Whether a request must wait, without blocks, since the share of prompts is used up."""
        if not self._is_to_be_lent(request) or self._manager is None or self._pulling is None:
            return False
        if self._clock() - self._handed_over_at > DECODES_S:
            return False
        return not self._prompts.may_begin_prompt(
            request.request_id,
            blocks_for(self._manager, request.num_prompt_tokens),
            num_lent=self._lending.pins.num_blocks,
            num_gpu_blocks=self._manager.block_pool.num_gpu_blocks,
        )

    def note_matched_tokens(self, request: Any) -> None:
        """Record a request for which vLLM allocates blocks next, if there are enough."""
        if self._manager is not None:
            self._asked[request.request_id] = int(request.num_tokens)

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """Record that a request has blocks, and loads ``num_external_tokens`` tokens into them."""
        name = request.request_id
        self._asked.pop(name, None)
        self._loaded.discard(name)
        self._none_since = math.inf
        if num_external_tokens:
            self._loading.add(name)
        if self._is_to_be_lent(request) and self._manager is not None:
            self._prompts.begin_prompt(name, blocks_for(self._manager, request.num_prompt_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """Record loads that have ended: their requests need more blocks, or a new look-up."""
        for request_id in connector_output.finished_recving or ():
            if request_id in self._loading:
                self._loading.discard(request_id)
                self._loaded.add(request_id)

    def request_finished(self, request: Any, blocks: TransferBlocks, num_computed: int) -> None:
        """Forget a request that leaves the engine."""
        name = request.request_id
        self._loading.discard(name)
        self._loaded.discard(name)
        self._asked.pop(name, None)
        self._prompts.end_prompt(name)

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """End leases and claims for requests that have waited for blocks too long."""
        num_scheduled = scheduler_output.total_num_scheduled_tokens
        waits, pins, now = bool(self._asked or self._loaded), self._lending.pins, self._clock()
        self._lenders_give_way(num_scheduled)
        self._asked.clear()
        if self._pulling is None:
            return
        # 1. Nothing is computed or loaded, and a request waits.
        is_still = not (num_scheduled or self._loading) and (waits or self._prompts.holds_back)
        self._still_since = _since(self._still_since, now, is_still and pins.num_blocks > 0)
        # 2. No request is admitted while prompts are lent, although others compute.
        admits_none = waits and pins.count_leases(LeaseKind.PROMPT) > 0
        self._none_since = _since(self._none_since, now, admits_none)
        first = min(self._still_since + FIRST_S, self._none_since + ADMITS_NONE_S)
        if now < first:
            self._giving_way = None
            return
        self._giving_way = self._giving_way or _Rounds(self._pulling)
        self._giving_way.drop_due_claims(now - first)

    def _lenders_give_way(self, num_scheduled: int) -> None:
        """Let leases yield to the request that lacks blocks, if they have enough of them."""
        if self._manager is None or not (self._asked or self._loaded):
            return
        free = num_free_blocks(self._manager)
        needed = blocks_for(self._manager, max(self._asked.values(), default=0))
        lacking = max(1, needed - free)
        is_still = not (num_scheduled or self._loading)
        if is_still or lacking <= self._lending.pins.num_yielding:
            self._lending.make_room(lacking)
        if is_still:
            self._lending.free_announced()

    def _is_to_be_lent(self, request: Any) -> bool:
        params = request.kv_transfer_params
        is_asked = isinstance(params, dict) and bool(params.get("do_remote_decode"))
        return is_asked and request.request_id not in self._lending.prefixes


class _Rounds:
    """Rounds of giving up claims; each keeps the older half of those for whole prompts."""

    def __init__(self, pulling: Pulling) -> None:
        self._pulling = pulling
        self._next = 1
        self._most = len(pulling.waiting_claims(prefixes=False))

    def drop_due_claims(self, seconds: float) -> None:
        """Give up the claims that are due ``seconds`` after the stall was declared."""
        # Claims for prefixes in every round, since new ones may have been made.
        self._pulling.drop_claims(self._pulling.waiting_claims(prefixes=True))
        while seconds >= self._next * ROUND_S:
            keeps = self._most >> self._next
            self._next += 1
            self._pulling.drop_claims(self._pulling.waiting_claims(prefixes=False)[keeps:])


def _since(since: float, now: float, holds: bool) -> float:
    """Since when a condition holds; infinity while it does not."""
    return min(since, now) if holds else math.inf
