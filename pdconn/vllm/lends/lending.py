"""The scheduler's part of a prefill engine: lends finished prompts, frees them later.

Lent blocks are pinned by a reference of our own in the engine's block pool, and the request itself
ends at once.  The other way, which vLLM offers too, is to keep the finished request; but then the
engine steps a thousand times a second for as long as anything is lent, and takes decode's cores.

References are dropped on the engine's thread only: when a request arrives, when a step is
scheduled, and before the prefix cache is reset.  An idle engine therefore shows lent
blocks as used until then.

A reset clears KV that may be wrong from then on, as after new weights, so nothing lent before it
may be read after it: everything lent is taken back first.  An engine that was asked to stop
lends on until its leases have ended, if it was given time for that.

Decode computes the last prompt token itself, to have something to sample from.  A recurrent
state that has seen that token already would see it twice, so where the model has states prefill
leaves the token out: it computes the prompt without it (:mod:`pdconn.vllm.lends.tickets`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pdconn.integrity.lent import LentSums
from pdconn.integrity.sums import Terms
from pdconn.lender.server import Lender
from pdconn.protocol.errors import TicketError
from pdconn.protocol.messages import Welcome
from pdconn.protocol.prefix import next_turn
from pdconn.protocol.ticket import BlockList, Ticket, TicketCut
from pdconn.puller.verification import Verify
from pdconn.sidechannel.advertise import advertised_host
from pdconn.sidechannel.clock import steady
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.config import Settings
from pdconn.vllm.lends.answers import BlockIds, LendableAnswer, LentAnswers, num_held
from pdconn.vllm.lends.pins import (
    PREFIX_LEASE_S,
    PREFIXES,
    UNCLAIMED,
    LeaseKind,
    LeasePins,
    LentShare,
)
from pdconn.vllm.lends.prefixes import PrefixLends
from pdconn.vllm.lends.tickets import LentTickets, TicketWriter
from pdconn.vllm.memory.card import kv_card, why_unreachable
from pdconn.vllm.metadata import PdMetadata, PdWorkerReport
from pdconn.vllm.patches.cache_resets import watch_resets
from pdconn.vllm.patches.pool.kept_windows import keep_window_of_last_token
from pdconn.vllm.patches.request_writes import drop_wrong_params
from pdconn.vllm.patches.stop_signal import ShutdownSignal
from pdconn.vllm.prompt import parent_of, prefix_digests
from pdconn.vllm.scheduler_part import NOTHING, Matched, SchedulerPart
from transport.errors import shown

log = logging.getLogger(__name__)

_RESET_S = 1.0
"""How long a reset waits for what is being read; it is revoked after that."""

_LOOK_S = 0.02
"""A draining engine looks that often whether its leases have ended, instead of spinning."""


class Lending(SchedulerPart):
    """Leases of one engine.

    Args:
        settings: checked settings.
        engine_id: the engine's name in tickets.
        incarnation: this boot's name in tickets.
        sizes: TP and PP size, put in tickets for proxies that look.
        has_states: whether the model keeps recurrent states.
        has_drafts: whether the engine has a drafter.
        block_tokens: tokens of the engine's largest blocks.
        num_lookahead: tokens at a prompt's end that decode computes.
        stop: says when an engine that was asked to stop must have stopped.
        clock: seconds that never go back.

    Attributes:
        answers: answers that are lent back; None where none are.
        prefixes: requests for a prefix.
        pins: what leases pin.
        tickets: writes tickets.
    """

    lends = True

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        incarnation: str,
        sizes: tuple[int, int],
        *,
        has_states: bool = False,
        has_drafts: bool = False,
        block_tokens: int = 16,
        num_lookahead: int = 1,
        stop: ShutdownSignal | None = None,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._settings, self._clock, self._stop = settings, clock, stop
        self._said_of_stop: bool | None = None
        host = advertised_host(settings.side_channel_host, settings.advertise_host)
        port = settings.side_channel_port
        self.tickets = TicketWriter(
            engine_id, incarnation, host, port, sizes, has_states, num_lookahead
        )
        self.answers = back = LentAnswers.of(settings.lend_back, has_states, has_drafts)
        self.prefixes = PrefixLends(block_tokens)
        answers = {} if back is None else {LeaseKind.ANSWER: LentShare(back.settings.share)}
        self.pins = LeasePins({LeaseKind.PREFIX: PREFIXES, **answers})
        self._lent = LentTickets()
        self._lender: Lender | None = None
        self._to_sum: list[tuple[Terms, tuple[BlockList, ...]]] = []
        self._counts: Counter[str] = Counter()

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``, and let it keep what decode's last token attends to."""
        changed = keep_window_of_last_token(manager, self.tickets.num_lookahead)
        log.info("pdconn: windowed groups keep the last token's window: groups=%d", changed)
        self.prefixes.use_manager(manager)
        if self.answers is not None:
            self.answers.manager = manager

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in, and take them back before it is reset."""
        self.pins.use_pool(block_pool)
        self.prefixes.use_pool(block_pool)
        watch_resets(block_pool, before=self.take_back)

    def serve(self, welcome: Welcome, splits: Splits = UNSPLIT) -> None:
        """Start the side channel, once every worker is registered; anew after a sleep.

        ``splits`` says which blocks the welcome describes: tickets list those.  After a sleep the
        welcome names another boot, and nothing lent by the boot before is confirmed.

        Raises:
            SideChannelInUse: the port is taken.
            Unprotected: it is reachable from elsewhere without secret or TLS.
        """
        self._end_boot()
        self.tickets.begin_boot(welcome, splits)
        host, port = self._settings.side_channel_host, self._settings.side_channel_port
        self._lender = Lender(
            welcome,
            host,
            port,
            advertised=self.tickets.host,
            why_unreachable=why_unreachable(kv_card(self._settings).devices),
            security=self._settings.security,
            is_summing=self._settings.verify is not Verify.OFF,
        )
        log.info("pdconn: lending %d rank(s) at %s:%d", len(welcome.ranks), self.tickets.host, port)

    def _end_boot(self) -> None:
        """Stop lending what a boot before has lent; a cache reset has taken back all of it."""
        if self._lender is None:
            return
        self._lender.close()
        self.unpin_freed()
        self.pins.unpin_all()
        self._lent, self._to_sum = LentTickets(), []

    # A request

    def on_new_request(self, request: Any) -> None:
        """Free what is no longer lent, and cut the request's prompt for who gets it, if it must be.

        One that asks for a prefix of ours, or to be computed for decode.
        """
        drop_wrong_params(request)
        self.unpin_freed()
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode") or self.prefixes.takes_request(request):
            return
        self.tickets.leave_last_token(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """Nothing is brought for a request that asks for a prefix: it is held here, or refused."""
        return NOTHING if self.prefixes.note_hit(request, num_computed_tokens) else None

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """A request got blocks: keep those of a prefix that it asks for."""
        if (prefix := self.prefixes.prefix_of(request.request_id)) is not None:
            self.prefixes.pin_prefix(request.request_id, blocks.of_tokens(prefix[0]))

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """A step is scheduled: what is lent since the last one is summed in it."""
        metadata.to_sum = self.take_sums()
        self.unpin_freed()

    def update_connector_output(self, connector_output: Any) -> None:
        """Workers have summed."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, PdWorkerReport):
            self.add_sums(report.sums)

    def request_finished(
        self, request: Any, blocks: TransferBlocks, num_computed: int
    ) -> dict[str, Any] | None:
        """A request leaves the engine: lend its blocks, if it asked for that."""
        ticket, params = None, request.kv_transfer_params
        if params and num_computed and self.tickets.is_proven:
            if params.get("do_remote_decode"):
                ticket = self.lend(request, blocks.of_tokens(num_computed))
            elif self.answers is not None:
                answer = self.answers.answer_of(request, blocks, num_computed)
                ticket = None if answer is None else self.lend_back(request, answer)
        self.tickets.forget_request(request.request_id)
        self.prefixes.forget_request(request.request_id)
        return ticket

    def lend(self, request: Any, block_ids: BlockIds) -> dict[str, Any] | None:
        """Pin and lend a finished request's blocks; the ticket, or None without blocks.

        Of a request for a prefix that is not held, what is answered instead of a ticket; of one
        that is held the blocks that it was found in.
        """
        name = request.request_id
        block_ids = self.prefixes.blocks_of(name) or block_ids
        if self._lender is None or not any(any(ids) for ids in block_ids):
            return None
        is_within = self.pins.may_pin(LeaseKind.PREFIX, num_held(block_ids))
        if (refusal := self.prefixes.refusal_of(name, is_within)) is not None:
            return refusal
        if name in self.pins:
            log.warning("pdconn: not lent, it has a lease already: request=%s", name)
            return None
        try:
            ticket = self.tickets.write_ticket(request, block_ids, self.prefixes.prefix_of(name))
        except TicketError as error:  # decode would refuse it, and it would be lent in vain
            log.warning("pdconn: not lent: %s request=%s", error, shown(name))
            return None
        kind, ttl_s = LeaseKind.PROMPT, self._settings.kv_lease_duration
        if name in self.prefixes:
            kind, ttl_s = LeaseKind.PREFIX, min(ttl_s, PREFIX_LEASE_S)
        now = self._clock()
        shared = self._lent.find_shared(name, ticket.prompt, now)
        if shared is not None:
            return shared.to_params(*self.tickets.sizes)
        # A sibling's lease must not be about to end.
        self._lent.share_ticket(ticket, now + ttl_s / 2)
        self._lend(ticket, block_ids, ttl_s, kind)
        return ticket.to_params(*self.tickets.sizes)

    def lend_back(self, request: Any, answer: LendableAnswer) -> dict[str, Any] | None:
        """Pin and lend prompt and answer of a finished request; what the next turn is to carry.

        None if they are not lent.  Of best-of-n answers the client sees one ticket, and it is not
        known of which.
        """
        name = request.request_id
        if self._lender is None or self.answers is None or name in self.pins:
            return None
        if parent_of(name) is not None or not any(any(ids) for ids in answer.blocks):
            return None
        *digests, whole = prefix_digests(request, (*answer.cuts, answer.num_tokens))
        cuts = tuple(map(TicketCut, answer.cuts, digests))
        try:
            prefix = answer.num_tokens, whole
            ticket = self.tickets.write_ticket(request, answer.blocks, prefix, cuts)
        except TicketError as error:
            log.warning("pdconn: not lent back: %s request=%s", error, shown(name))
            return None
        if not self.pins.may_pin(LeaseKind.ANSWER, num_held(answer.blocks)):
            return None
        self._counts["answers_lent"] += 1
        self._lend(ticket, answer.blocks, self.answers.settings.seconds, LeaseKind.ANSWER)
        return next_turn(ticket.to_params(*self.tickets.sizes))

    def _lend(self, ticket: Ticket, block_ids: BlockIds, ttl_s: float, kind: LeaseKind) -> None:
        """Pin what a ticket is for, and lend it."""
        assert self._lender is not None
        self._end_leases(self.pins.pin(ticket.request_id, block_ids, kind, self._clock()))
        self._lent.add_ticket(ticket)
        self._lender.lend(ticket.request_id, ticket.digest(), ttl_s)
        verify = self._settings.verify
        if verify is not Verify.OFF:
            terms = Terms(ticket.request_id, ticket.num_tokens, verify is Verify.SAMPLE)
            self._to_sum.append((terms, ticket.blocks))

    # Leases

    def make_room(self, num_blocks: int) -> None:
        """A request that could not be admitted lacks blocks: what is lent gives way, see pins."""
        self._end_leases(self.pins.give_way(num_blocks))
        unclaimed_s = self._settings.kv_lease_duration * UNCLAIMED
        self._end_leases(self.pins.older_than(unclaimed_s, self._clock()), if_unclaimed=True)

    def _end_leases(self, requests: Iterable[str], *, if_unclaimed: bool = False) -> None:
        """End leases that no reader has claimed; others end with their readers."""
        for request_id in requests:
            self._counts["answers_given_up"] += not if_unclaimed
            if self._lender is not None:
                self._lender.abort(request_id, if_unclaimed=if_unclaimed)

    def take_back_own(self, ticket: Ticket) -> None:
        """Decode's half of this engine was given a ticket of ours, and needs nothing lent for it.

        Clients can change a ticket: only one that says what was lent ends its lease.
        """
        if self._lender is not None and self._lent.is_lent(ticket):
            self._lender.abort(ticket.request_id)

    def unpin_freed(self) -> None:
        """Unpin blocks whose leases have ended.  Only on the engine's thread."""
        if self._lender is None:
            return
        for lease in self._lender.collect():
            log.debug("pdconn: unpinned: request=%s why=%s", lease.request, lease.why)
            self.pins.unpin(lease.request)
            self._lent.forget_ticket(lease.request)

    def weights_changed(self) -> None:
        """What is lent was computed with other weights."""
        self.take_back()

    def take_back(self) -> None:
        """End every lease and unpin its blocks.  Only on the engine's thread, which waits.

        Unclaimed leases end at once; what is being read gets a second, and is not confirmed
        after that.
        """
        if self._lender is None:
            return
        self.unpin_freed()
        # vLLM resets nothing then, so what is lent stays true.
        if self.pins.is_pool_used_by_others(self.prefixes.pinned_blocks()):
            return
        self.prefixes.unpin_prefixes()
        if not self.pins:
            return
        log.info("pdconn: cache reset: taking back what is lent: leases=%d", len(self.pins))
        self._lender.abort_all()
        if self._unpinned_within(_RESET_S):
            return
        log.warning("pdconn: cache reset: revoking leases being read: leases=%d", len(self.pins))
        self._lender.revoke_all()
        if not self._unpinned_within(_RESET_S):
            log.error("pdconn: cache reset: still lent: leases=%d", len(self.pins))

    def _unpinned_within(self, seconds: float) -> bool:
        give_up = time.monotonic() + seconds
        while self.pins and time.monotonic() < give_up:
            time.sleep(0.001)
            self.unpin_freed()
        return not self.pins

    # A stop

    def has_pending_push_work(self) -> bool:
        """Whether an engine that was asked to stop must wait for what it lends."""
        until = None if self._stop is None else self._stop.until
        return until is not None and self.drain(until)

    def drain(self, until: float) -> bool:
        """Whether an engine that was asked to stop must still wait for its leases.

        ``until`` is a time of our clock.  Waits a little itself, since vLLM asks again at once.
        Only on the engine's thread.
        """
        self._end_leases(self.pins.give_way_all(LeaseKind.ANSWER))
        self.unpin_freed()
        if not self.pins:
            return False
        left_s = until - self._clock()
        if self._said_of_stop != (left_s > 0):
            self._said_of_stop = left_s > 0
            if left_s > 0:
                log.info("pdconn: draining: leases=%d at_most_s=%.3g", len(self.pins), left_s)
            else:
                log.warning("pdconn: stopping with leases unread: leases=%d", len(self.pins))
        if left_s <= 0:
            return False
        time.sleep(min(_LOOK_S, left_s))
        return True

    def shutdown(self) -> None:
        """Stop the side channel."""
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    # What goes to workers and to metrics

    def take_sums(self) -> list[tuple[Terms, tuple[BlockList, ...]]]:
        """What workers are to sum in this step: every finished request has one to come."""
        to_sum, self._to_sum = self._to_sum, []
        return to_sum

    def add_sums(self, sums: Sequence[tuple[str, int, LentSums | None]]) -> None:
        """Workers have summed: request, rank, sums."""
        if self._lender is not None:
            for request, rank, summed in sums:
                self._lender.add_sums(request, rank, summed)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by the side channel, too."""
        counts = {} if self._lender is None else self._lender.take_counts()
        if self._counts:
            counts, self._counts = counts | self._counts, Counter()
        return counts
