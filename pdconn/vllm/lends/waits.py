"""Requests that wait for blocks, and what gives way so that no two engines wait for each other.

A request that waits for blocks here may hold a claim, which pins blocks elsewhere; and blocks
here may be pinned by leases whose readers wait elsewhere::

    A   lends to B ◄──────── claims ──────── waits for blocks   B
        waits for blocks ─── claims ───────► lends to A

So an engine that lends bounds what its requests hold elsewhere while they wait for blocks.  When
it has stood still for a quarter of a second (a request waits, nothing is computed or pulled), its
claims for prefixes are given up, as the least costs; and then round by round those for whole
prompts, the newer half first, a quarter of a second each.  Of ``n`` none is left after
``log2(n) + 1`` rounds.  The same begins where prompts are lent and no request was admitted for ten
seconds, although others still compute.  Requests whose claims are given up compute here.  An
engine that lends nothing gives up nothing: what its requests wait for ends by itself.
The whole argument is in ``docs/design.md``.

That is rare: an engine that decodes, too, computes prompts for others within a share of
its blocks (:mod:`pdconn.vllm.lends.prompts`), so that those who decode find room.
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
"""Of standing still until claims for prefixes are given up; of each round after that."""
ADMITS_NONE_S = 10.0
"""Without admitting a request, while one waits for blocks."""
DECODES_S = 60.0
"""An engine decodes for others if it was handed a prompt within so many seconds."""


class BlockWaits(SchedulerPart):
    """Which requests wait for blocks in an engine that lends, and may pull as well.

    Args:
        lending: gives way.
        pulling: gives way; None where it only lends.
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
        """Requests that are known; none when the engine is quiet."""
        return len(self._asked) + len(self._loading) + len(self._loaded) + len(self._prompts)

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``."""
        self._manager = manager

    def on_new_request(self, request: Any) -> None:
        """A request entered the engine; one that was handed over says that we decode for others."""
        params = request.kv_transfer_params
        # What is no dict is a wrong ticket, of who handed the request over.
        if params and (not isinstance(params, dict) or params.get("do_remote_prefill")):
            self._handed_over_at = self._clock()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """Hold a request back that is to be lent, since as much is lent as may be."""
        return ASK_AGAIN if self.is_held_back(request) else None

    def is_held_back(self, request: Any) -> bool:
        """Whether a request is to wait, since as much is lent as may be; it has no blocks then."""
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

    def note_answer(self, request: Any) -> None:
        """vLLM asked what can be loaded, was answered, and allocates blocks next, if it can."""
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
        """A request got blocks, and loads ``num_external_tokens`` tokens into them."""
        name = request.request_id
        self._asked.pop(name, None)
        self._loaded.discard(name)
        self._none_since = math.inf
        if num_external_tokens:
            self._loading.add(name)
        if self._is_to_be_lent(request) and self._manager is not None:
            self._prompts.begin_prompt(name, blocks_for(self._manager, request.num_prompt_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads have ended: their requests are given further blocks, or asked for again."""
        for request_id in connector_output.finished_recving or ():
            if request_id in self._loading:
                self._loading.discard(request_id)
                self._loaded.add(request_id)

    def request_finished(self, request: Any, blocks: TransferBlocks, num_computed: int) -> None:
        """A request left the engine."""
        name = request.request_id
        self._loading.discard(name)
        self._loaded.discard(name)
        self._asked.pop(name, None)
        self._prompts.end_prompt(name)

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """A step was scheduled: what waits for blocks now makes claims give way, in time."""
        num_scheduled = scheduler_output.total_num_scheduled_tokens
        waits, pins, now = bool(self._asked or self._loaded), self._lending.pins, self._clock()
        self._lenders_give_way(num_scheduled)
        self._asked.clear()
        if self._pulling is None:
            return
        is_still = not (num_scheduled or self._loading) and (waits or self._prompts.holds_back)
        self._still_since = _since(self._still_since, now, is_still and len(pins) > 0)
        admits_none = waits and pins.count(LeaseKind.PROMPT) > 0
        self._none_since = _since(self._none_since, now, admits_none)
        first = min(self._still_since + FIRST_S, self._none_since + ADMITS_NONE_S)
        if now < first:
            self._giving_way = None
            return
        self._giving_way = self._giving_way or _Rounds(self._pulling)
        self._giving_way.drop_due_claims(now - first)

    def _lenders_give_way(self, num_scheduled: int) -> None:
        """What we lend gives way to the request that could not be admitted, if that helps."""
        if self._manager is None or not (self._asked or self._loaded):
            return
        free = num_free_blocks(self._manager)
        needed = blocks_for(self._manager, max(self._asked.values(), default=0))
        lacking = max(1, needed - free)
        if not (num_scheduled or self._loading) or lacking <= self._lending.pins.num_yielding:
            self._lending.make_room(lacking)

    def _is_to_be_lent(self, request: Any) -> bool:
        params = request.kv_transfer_params
        is_asked = isinstance(params, dict) and bool(params.get("do_remote_decode"))
        return is_asked and request.request_id not in self._lending.prefixes


class _Rounds:
    """Rounds in which claims give way, of which each leaves half of those for whole prompts."""

    def __init__(self, pulling: Pulling) -> None:
        self._pulling = pulling
        self._next = 1
        self._most = len(pulling.waiting_claims(prefixes=False))

    def drop_due_claims(self, seconds: float) -> None:
        """It has been time for claims to give way for ``seconds``."""
        # What a prefix saves is least, and others may have come since.
        self._pulling.drop_claims(self._pulling.waiting_claims(prefixes=True))
        while seconds >= self._next * ROUND_S:
            keeps = self._most >> self._next
            self._next += 1
            self._pulling.drop_claims(self._pulling.waiting_claims(prefixes=False)[keeps:])


def _since(since: float, now: float, holds: bool) -> float:
    """Since when something holds; infinity while it does not."""
    return min(since, now) if holds else math.inf
