"""The scheduler's part of a prefill engine: lends finished prompts, frees them later.

Lent blocks are pinned by a reference of our own in the engine's block pool, and the request itself
ends at once.  vLLM could keep the finished request instead; but then the engine steps a thousand
times a second as long as anything is lent, and occupies decode's cores.

References are dropped on the engine's thread only: when a request arrives, when a step is
scheduled, and before the prefix cache is reset.  So an idle engine reports lent blocks as used
until then.
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
from pdconn.lender.sessions import Followed
from pdconn.protocol.early import stream_of
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
from pdconn.vllm.lends.growing import GrowingRequest, GrowingRequests
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
"""How long a reset waits for reads of lent blocks, before it revokes their leases."""

_LOOK_S = 0.02
"""How often an engine that is shutting down checks whether its leases have ended."""


class Lending(SchedulerPart):
    """Leases of one engine.

    Args:
        settings: checked settings.
        engine_id: the engine's name in tickets.
        incarnation: this boot's name in tickets.
        sizes: TP and PP size, which tickets contain for proxies.
        has_states: whether the model keeps recurrent states.
        has_drafts: whether the engine has a drafter.
        block_tokens: tokens of the engine's largest blocks.
        num_lookahead: tokens at a prompt's end that decode computes.
        stop: gives the deadline of an engine that is shutting down.
        clock: seconds that never go back.

    Attributes:
        answers: decides which answers are lent back; None if none are.
        prefixes: requests for a prefix.
        pins: blocks that leases pin.
        tickets: writes tickets.
        growing: requests that may be followed while they are computed; None if none may.
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
        self.answers = back = LentAnswers.from_settings(settings.lend_back, has_states, has_drafts)
        self.prefixes = PrefixLends(block_tokens)
        answers = {} if back is None else {LeaseKind.ANSWER: LentShare(back.settings.share)}
        self.pins = LeasePins({LeaseKind.PREFIX: PREFIXES, **answers})
        self.growing: GrowingRequests | None = None
        self._lent = LentTickets()
        self._lender: Lender | None = None
        self._to_sum: list[tuple[Terms, tuple[BlockList, ...]]] = []
        self._counts: Counter[str] = Counter()

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``, and make it keep the window of decode's last token."""
        changed = keep_window_of_last_token(manager, self.tickets.num_lookahead)
        log.info("pdconn: windowed groups keep the last token's window: groups=%d", changed)
        self.prefixes.bind_kv_cache_manager(manager)
        if self.answers is not None:
            self.answers.manager = manager
        if self.growing is not None:
            self.growing.manager = manager

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in; leases end before it is reset."""
        self.pins.bind_gpu_block_pool(block_pool)
        self.prefixes.bind_gpu_block_pool(block_pool)
        watch_resets(block_pool, before=self.take_back)

    def serve(self, welcome: Welcome, splits: Splits = UNSPLIT) -> None:
        """Start the side channel, once every worker is registered; again after a sleep.

        Args:
            welcome: after a sleep it has another incarnation, and leases of the former one are not
                confirmed.
            splits: which blocks the welcome describes, and tickets list.

        Raises:
            SideChannelInUse: the port is taken.
            Unprotected: it is reachable from other hosts, without secret or TLS.
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
        """Close the side channel of the former incarnation; a cache reset has ended its leases."""
        if self._lender is None:
            return
        self._lender.close()
        self.unpin_freed()
        self.pins.unpin_all()
        self._lent, self._to_sum = LentTickets(), []
        if self.growing is not None:
            self.growing.clear()

    # A request

    def on_new_request(self, request: Any) -> None:
        """Unpin freed leases; register a request for a prefix, or shorten a prompt for decode."""
        drop_wrong_params(request)
        self.unpin_freed()
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode") or self.prefixes.takes_request(request):
            return
        self.tickets.leave_last_token(request)
        # A request whose name is lent already is not lent, so nobody may follow it.
        if self.growing is None or request.request_id in self.pins:
            return
        if (stream := _stream_of(request)) is not None:
            self.growing.add_request(request, stream)
            self._open_streams(self.growing)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """Nothing is loaded for a request for a prefix: the prefix is held here, or refused."""
        return NOTHING if self.prefixes.note_hit(request, num_computed_tokens) else None

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """Pin the blocks of the prefix that a request asks for."""
        if (prefix := self.prefixes.prefix_of(request.request_id)) is not None:
            self.prefixes.pin_prefix(request.request_id, blocks.of_tokens(prefix[0]))

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """Let the workers sum the blocks lent since the last step; announce what has begun."""
        metadata.to_sum = self.take_sums()
        self.unpin_freed()
        if self.growing and self._lender is not None:
            self._open_streams(self.growing)
            for begun in self.growing.note_scheduled(scheduler_output.num_scheduled_tokens):
                self._lender.grow_stream(begun.request_id, begun.blocks)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' checksums, and announce what followed requests have written."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, PdWorkerReport):
            self.add_sums(report.sums)
        if self.growing:
            self._announce(self.growing)

    def request_finished(
        self, request: Any, blocks: TransferBlocks, num_computed: int
    ) -> dict[str, Any] | None:
        """Lend the blocks of a finished request, if it has asked for that."""
        ticket, params = None, request.kv_transfer_params
        if params and num_computed and self.tickets.is_proven:
            if params.get("do_remote_decode"):
                # The prompt, also if the client has asked for a longer answer than a router does.
                num_lent = min(num_computed, request.num_prompt_tokens)
                ticket = self.lend_request(request, blocks.of_tokens(num_lent))
            elif self.answers is not None:
                answer = self.answers.answer_of(request, blocks, num_computed)
                ticket = None if answer is None else self.lend_back(request, answer)
        self.tickets.forget_prompt(request.request_id)
        self.prefixes.forget_prefix(request.request_id)
        self._close_stream(request.request_id)
        return ticket

    def lend_request(self, request: Any, block_ids: BlockIds) -> dict[str, Any] | None:
        """Pin and lend the blocks of a finished request.

        For a request for a prefix these are the blocks in which it was found.

        Returns:
            The ticket; a refusal if the prefix is not held; None if nothing is lent.
        """
        name = request.request_id
        block_ids = self.prefixes.blocks_of(name) or block_ids
        if self._lender is None or not any(any(ids) for ids in block_ids):
            return None
        is_within = self.pins.may_pin(LeaseKind.PREFIX, num_held(block_ids))
        if (refusal := self.prefixes.refusal_of(name, is_within)) is not None:
            return refusal
        if name in self.pins and not self._grows(name):
            log.warning("pdconn: not lent, it has a lease already: request=%s", name)
            return None
        try:
            block_ids, unpinned = self._as_announced(name, block_ids)
            ticket = self.tickets.write_ticket(request, block_ids, self.prefixes.prefix_of(name))
        except TicketError as error:  # decode would refuse the ticket
            log.warning("pdconn: not lent: %s request=%s", error, shown(name))
            return None
        kind, ttl_s = LeaseKind.PROMPT, self._settings.kv_lease_duration
        if name in self.prefixes:
            kind, ttl_s = LeaseKind.PREFIX, min(ttl_s, PREFIX_LEASE_S)
        now = self._clock()
        shared = self._lent.find_shared(name, ticket.prompt, now)
        if shared is not None:
            return shared.to_params(*self.tickets.sizes)
        # Siblings share the ticket only while half of the lease is left.
        self._lent.share_ticket(ticket, now + ttl_s / 2)
        self._lend(ticket, unpinned, ttl_s, kind)
        return ticket.to_params(*self.tickets.sizes)

    def lend_back(self, request: Any, answer: LendableAnswer) -> dict[str, Any] | None:
        """Pin and lend prompt and answer of a finished request.

        Returns:
            ``kv_transfer_params`` for the next turn's request; None if nothing is lent.
        """
        name = request.request_id
        if self._lender is None or self.answers is None or name in self.pins:
            return None
        # Of best-of-n answers the client sees one ticket, and it is unknown of which answer.
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
        """Pin and lend the blocks of ``ticket``; ``block_ids`` are not pinned by a stream."""
        assert self._lender is not None
        name = ticket.request_id
        self._end_leases(self.pins.pin(name, block_ids, kind, self._clock()))
        self._lent.add_ticket(ticket)
        growing = None if self.growing is None else self.growing.remove_request(name)
        if growing is None:
            self._lender.lend(name, ticket.digest(), ttl_s)
        else:
            if not growing.is_open:  # its adapter was not known before
                self._open_stream(growing, (ticket.num_tokens, ticket.prompt, ticket.adapter))
            self._lender.complete_stream(ticket, ttl_s)
        verify = self._settings.verify
        if verify is not Verify.OFF:
            terms = Terms(ticket.request_id, ticket.num_tokens, verify is Verify.SAMPLE)
            self._to_sum.append((terms, ticket.blocks))

    # Streams

    def _open_streams(self, growing: GrowingRequests) -> None:
        """Let readers follow requests whose tickets could be written."""
        if self._lender is None or not self.tickets.is_proven:
            return
        for one in growing.unopened():
            try:
                header = self.tickets.header_of(one.request)
            except TicketError as error:  # its adapter may not have been read yet
                log.debug("pdconn: not followed yet: %s", error)
                continue
            self._open_stream(one, header)

    def _open_stream(self, one: GrowingRequest, header: tuple[int, str, str]) -> None:
        assert self._lender is not None
        one.is_open = True
        name, ttl_s = one.request.request_id, self._settings.kv_lease_duration
        # From here on the name has a lease, whose end is reported once.
        self.pins.pin_more(name, ())
        self._lender.open_stream(name, one.stream, header, ttl_s)

    def _announce(self, growing: GrowingRequests) -> None:
        """Pin and announce blocks that the steps so far have written."""
        if self._lender is None:
            return
        self._open_streams(growing)
        self.unpin_freed()
        for growth in growing.take_growth(self.tickets.splits):
            self.pins.pin_more(growth.request_id, growth.pins)
            self._counts["blocks_announced"] += len(growth.pins)
            self._lender.grow_stream(growth.request_id, growth.blocks)

    def _grows(self, request_id: str) -> bool:
        return self.growing is not None and request_id in self.growing

    def _as_announced(self, request_id: str, ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Blocks of a finished request for its ticket, and those that are to be pinned.

        Raises:
            TicketError: more was announced than the request has blocks.
        """
        return (ids, ids) if self.growing is None else self.growing.as_announced(request_id, ids)

    def _close_stream(self, request_id: str) -> None:
        """End the stream of a request that leaves the engine and is not lent."""
        growing = None if self.growing is None else self.growing.remove_request(request_id)
        if growing is not None and growing.is_open and self._lender is not None:
            self._lender.abort_lease(request_id)

    # Leases

    def free_announced(self) -> None:
        """End the streams of preempted requests: their blocks are pinned, and nothing can run."""
        for name in () if self.growing is None else self.growing.preempted():
            self._counts["streams_gave_way"] += 1
            self._close_stream(name)

    def make_room(self, num_blocks: int) -> None:
        """End leases for a request that lacks ``num_blocks`` blocks."""
        self._end_leases(self.pins.give_way(num_blocks))
        unclaimed_s = self._settings.kv_lease_duration * UNCLAIMED
        self._end_leases(self.pins.older_than(unclaimed_s, self._clock()), if_unclaimed=True)

    def _end_leases(self, requests: Iterable[str], *, if_unclaimed: bool = False) -> None:
        """End these leases; those with claims end with their readers."""
        for request_id in requests:
            self._counts["answers_given_up"] += not if_unclaimed
            if self._lender is not None:
                self._lender.abort_lease(request_id, if_unclaimed=if_unclaimed)

    def take_back_own(self, ticket: Ticket) -> None:
        """End the lease of a ticket that has come back to this engine, which needs no lease."""
        # Clients can change a ticket: only one that equals ours ends its lease.
        if self._lender is not None and self._lent.is_lent(ticket):
            self._lender.abort_lease(ticket.request_id)

    def unpin_freed(self) -> None:
        """Unpin blocks of freed leases; note who is followed.  Only on the engine's thread."""
        if self._lender is None:
            return
        for report in self._lender.take_reports():
            if isinstance(report, Followed):
                if self.growing is not None:
                    self.growing.note_followed(report.request)
                continue
            log.debug("pdconn: unpinned: request=%s why=%s", report.request, report.why)
            self.pins.unpin_lease(report.request)
            if self.growing is not None:
                self.growing.remove_request(report.request)
            self._lent.forget_ticket(report.request)

    def weights_changed(self) -> None:
        """End every lease: its KV is of other weights."""
        self.take_back()

    def take_back(self) -> None:
        """End every lease and unpin its blocks.  Only on the engine's thread, which waits.

        Unclaimed leases end at once; reads have ``_RESET_S`` to end, and are not confirmed after
        that.
        """
        # A reset drops KV that is wrong from now on, for example after new weights, so no lease
        # from before it may be read after it.
        if self._lender is None:
            return
        self.unpin_freed()
        # vLLM refuses the reset then, so leases stay valid.
        if self.pins.is_pool_used_by_others(self.prefixes.pinned_blocks()):
            return
        self.prefixes.unpin_prefixes()
        if not self.pins:
            return
        log.info("pdconn: cache reset: ending leases: leases=%d", len(self.pins))
        self._lender.abort_all()
        # Readers of streams of which nothing is pinned yet have nothing to read.
        if not self._falls_to_zero(lambda: self.pins.num_blocks):
            read = len(self.pins)
            log.warning("pdconn: cache reset: revoking leases being read: leases=%d", read)
        if self.pins:
            self._lender.revoke_all()
        if not self._falls_to_zero(lambda: len(self.pins)):
            log.error("pdconn: cache reset: leases have not ended: leases=%d", len(self.pins))

    def _falls_to_zero(self, count: Callable[[], int]) -> bool:
        """Whether ``count`` of what is pinned falls to 0 within ``_RESET_S``."""
        give_up = time.monotonic() + _RESET_S
        while count() and time.monotonic() < give_up:
            time.sleep(0.001)
            self.unpin_freed()
        return not count()

    # A stop

    def has_pending_push_work(self) -> bool:
        """Whether an engine that is shutting down must wait for its leases."""
        until = None if self._stop is None else self._stop.until
        return until is not None and self.drain_leases(until)

    def drain_leases(self, until: float) -> bool:
        """Whether an engine that is shutting down must still wait for its leases.

        Sleeps for up to ``_LOOK_S``.  Only on the engine's thread.

        Args:
            until: the deadline, in seconds of our clock.
        """
        self._end_leases(self.pins.give_way_all(LeaseKind.ANSWER))
        self.unpin_freed()
        if not self.pins.num_blocks:
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
        time.sleep(min(_LOOK_S, left_s))  # vLLM calls again at once
        return True

    def shutdown(self) -> None:
        """Close the side channel."""
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    # What goes to workers and to metrics

    def take_sums(self) -> list[tuple[Terms, tuple[BlockList, ...]]]:
        """Lent blocks for the workers to sum in this step."""
        to_sum, self._to_sum = self._to_sum, []
        return to_sum

    def add_sums(self, sums: Sequence[tuple[str, int, LentSums | None]]) -> None:
        """Pass the workers' checksums to the lender: request, rank, sums."""
        if self._lender is not None:
            for request, rank, summed in sums:
                self._lender.add_sums(request, rank, summed)

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call, with those of the side channel."""
        counts = {} if self._lender is None else self._lender.take_lease_counts()
        if self._counts:
            counts, self._counts = counts | self._counts, Counter()
        return counts


def _stream_of(request: Any) -> str | None:
    """The stream of a request; None without one."""
    try:
        return stream_of(request.kv_transfer_params)
    except TicketError as error:  # a client's mistake: nobody can follow the request
        log.warning("pdconn: not followed: %s request=%s", error, shown(request.request_id))
        return None
