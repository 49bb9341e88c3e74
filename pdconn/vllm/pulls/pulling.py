"""The scheduler's part of a decode engine: decides what to pull for which request.

The ticket of every request is *claimed* at its arrival, and the claim is renewed while the request
waits in the engine's queue.  It ends in one of three ways: its blocks are *read* once the request
has some, it is *cancelled* when nothing is to be pulled (a full local hit, an abort, a rejection),
or it *fails* when the ticket is invalid.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pdconn.lifecycle.turns import Urgency
from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.protocol.early import EarlyTicket, parse_early_ticket
from pdconn.protocol.errors import TicketError
from pdconn.protocol.prefix import parse_prefix_ticket, ticket_from
from pdconn.protocol.ticket import Ticket, max_blocks_for, parse_ticket, trimmed
from pdconn.puller.commands import (
    AbandonPull,
    CancelPull,
    ClaimOutcome,
    ClaimTicket,
    Command,
    ExpectedPull,
    FailPull,
    ReadBlocks,
)
from pdconn.puller.peers import PeerKey
from pdconn.sidechannel.clock import steady
from pdconn.store.engine.beside import BesideOffer, PullOutlook
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.identity.adapters import AdapterReader
from pdconn.vllm.metadata import PdMetadata, PdWorkerReport, ReadSpeed
from pdconn.vllm.patches.pool.admitted_blocks import blocks_for, num_free_blocks
from pdconn.vllm.patches.pool.answer_windows import AnswerWindows
from pdconn.vllm.patches.request_writes import ask_of_wrong_params
from pdconn.vllm.prompt import is_prefetch, parent_of, tenant_label
from pdconn.vllm.pulls.beside import BesideStore, LenderBandwidths
from pdconn.vllm.pulls.patience import PrefixPatience
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulled import PulledBlocks
from pdconn.vllm.pulls.tracked import ClaimGrants, StartedPulls, Tracked, key_of
from pdconn.vllm.scheduler_part import ASK_AGAIN, NOTHING, Matched, SchedulerPart
from transport.errors import shown

if TYPE_CHECKING:
    from pdconn.vllm.identity.greeting import Greeting

log = logging.getLogger(__name__)

EARLY_SPARES = 0.1
"""Share of the engine's blocks that must stay free when a request is given some early."""


class Pulling(SchedulerPart):
    """Tickets of one engine.

    Args:
        rules: from its configuration.
        clock: seconds that never go back.

    Attributes:
        doubt: why nothing may be pulled; empty if pulls are allowed.
        adapters: reads adapters of requests; None where they are compared by name alone.
        take_back_own: ends the lease of a ticket that this engine has issued itself.
        store: loads beside pulls what it has of their prompts; None without one.
    """

    fills_blocks = True

    def __init__(self, rules: PullRules, clock: Callable[[], float] = steady) -> None:
        self._rules, self._clock = rules, clock
        self.doubt = ""
        self.adapters: AdapterReader | None = None
        self.take_back_own: Callable[[Ticket], None] | None = None
        self.store: BesideStore | None = None
        self._manager: Any = None
        self._splits: Splits | None = None
        self._tracked: dict[str, Tracked] = {}
        self._pulling = StartedPulls()
        self._patience, self._pulled = PrefixPatience(clock), PulledBlocks()
        self._bandwidths = LenderBandwidths(clock)
        self._commands: list[Command] = []
        self._number = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether it completes hits: states are always pulled, windows from what they hold."""
        return self._rules.has_lagging or self._pulled.completes_windows

    @property
    def answer_windows(self) -> AnswerWindows | None:
        """Caches windows of finished requests; None before the manager is bound."""
        return self._pulled.answers

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``."""
        self._manager = manager
        self._pulled.use_manager(manager, self.pulled_until)

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin quarantined blocks in."""
        self._pulled.quarantine.bind_gpu_block_pool(block_pool)

    def set_xfer_handshake_metadata(self, greeting: Greeting, splits: Splits) -> None:
        """Take the workers' memory, again after a sleep."""
        self.workers_registered(splits)
        self.set_doubt(greeting.doubt)

    def set_doubt(self, doubt: str) -> None:
        """Set why nothing may be pulled from now on; empty if pulls are allowed."""
        self.doubt = doubt

    def workers_registered(self, splits: Splits) -> None:
        """Every worker is registered; ``splits``: which blocks they describe."""
        has_slept, self._splits = self._splits is not None, splits
        # After a sleep the workers have no claims and pulls: requests that wait for blocks
        # claim their tickets again, and pulls have failed.
        if has_slept:
            self._commands.clear()
            self._pulled.quarantine.end_all_reads()
            for request_id, tracked in self._tracked.items():
                if tracked.pulling:
                    self._commands.append(FailPull(request_id, "the engine has slept"))
                elif (claims := tracked.claims) is not None:
                    tracked.claim.granted.clear()
                    if tracked.claim.stream is not None:
                        tracked.ticket = None  # named again
                    self._claim(request_id, tracked, claims)

    # A request

    def on_new_request(self, request: Any) -> None:
        """Claim the ticket of a new request, if it has one."""
        # Clients write kv_transfer_params.  Anything but a dict with a ticket is an invalid ticket,
        # to which the failure policy applies.
        params = request.kv_transfer_params
        if isinstance(params, dict) and not params.get("do_remote_prefill"):
            self._prefix_arrived(request, ticket_from(params))
            return
        if not params:
            return
        parent = parent_of(request.request_id)
        try:
            early = parse_early_ticket(params)
            if early is not None:
                claim = ClaimGrants(awaited=self._rules.num_ranks, stream=early)
                self._track(request, Tracked(None, None, parent, claim=claim), early)
                return
            ticket = parse_ticket(params, max_blocks_for(self._num_tokens(request)))
        except TicketError as error:
            self._tracked[request.request_id] = Tracked(None, str(error), parent)
            log.warning("pdconn: ticket refused: %s request=%s", error, shown(request.request_id))
            if not isinstance(params, dict):
                ask_of_wrong_params(request)
            return
        awaited = self._rules.num_ranks if self._rules.is_awaiting else 0
        tracked = Tracked(ticket, None, parent, claim=ClaimGrants(awaited=awaited))
        self._track(request, tracked, ticket)

    def _prefix_arrived(self, request: Any, given: object) -> None:
        """Claim the ticket for the prefix of a new request."""
        if given is None:
            return
        name = request.request_id
        # The ticket is promised once its claims are granted: the prefix is computed here otherwise,
        # so an invalid ticket or a lost lender costs the request nothing but time.
        try:
            ticket = parse_prefix_ticket(given, max_blocks_for(self._num_tokens(request)))
        except TicketError as error:
            log.warning("pdconn: ticket for a prefix refused: %s request=%s", error, shown(name))
            return
        claim = ClaimGrants(awaited=self._rules.num_ranks)
        tracked = Tracked(ticket, None, parent_of(name), claim=claim, prefix=ticket.num_tokens)
        self._track(request, tracked, ticket)

    def _track(self, request: Any, tracked: Tracked, ticket: Ticket | EarlyTicket) -> None:
        self._tracked[request.request_id] = tracked
        if self.doubt:
            self._lost(request.request_id, self.doubt)
        elif ticket.incarnation == self._rules.incarnation:
            # A router may choose one engine for both legs.  A transport cannot read from itself,
            # and the KV is in this engine's own cache.
            if self.take_back_own is not None and isinstance(ticket, Ticket):
                self.take_back_own(ticket)
            self._lost(request.request_id, "this engine has issued it, and looks in its own cache")
        elif self._pulling.has_begun(key_of(ticket), tracked.parent):
            # A sibling of a best-of-n request pulls with the ticket, and may have consumed the
            # lease: wait for its blocks, or compute.
            tracked.drop_ticket()
        else:
            self._claim(request.request_id, tracked, ticket)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """Tokens behind the local hit that are pulled; None if nothing is pulled."""
        name, (count, is_async) = request.request_id, self._match(request, num_computed_tokens)
        if count is not None:
            self._patience.note_missing(request, request.num_tokens - num_computed_tokens - count)
        elif prefix := self.prefix_of(name):
            self._patience.note_claim(name, prefix)
        return (count, is_async) if count != 0 else None

    def _match(self, request: Any, num_local: int) -> Matched:
        """The answer for a request with a ticket: the first case that applies."""
        tracked = self._tracked.get(request.request_id)
        # 1. There is no ticket, or the request is computed, by an earlier answer.
        if tracked is None or not tracked.is_open(request):
            return NOTHING
        # 2. The engine holds all tokens of the ticket.  The last prompt token is never pulled,
        #    since the engine computes it to sample from it; nor are those that a drafter looks
        #    ahead to.
        tracked.num_local = num_local
        if self._until(request, tracked) > num_local:
            self._check(request, tracked)
        count = self._until(request, tracked) - num_local
        if count <= 0:
            return NOTHING
        # 3. The ticket is invalid: the policy decides.  A request whose ticket is for another
        #    prompt is computed under either policy, since nothing has failed, and nothing was
        #    promised.
        if tracked.problem is not None:
            is_computed = self._rules.recompute or tracked.prefix or tracked.mistaken
            return NOTHING if is_computed else (count, True)
        is_known = self._knows_adapter(request, tracked)
        # 4. A sibling pulls with the same ticket: its blocks will be a local hit.
        if self._rules.prefix_caching and tracked.key in self._pulling:
            return ASK_AGAIN
        # 5. The ticket was given up, or it is for a prefix of which a store has all.
        offer = None if tracked.claims is None else self._ask_store(request, tracked)
        if tracked.claims is None or self._yields(request, tracked, offer):
            return NOTHING
        # 6. The ticket is promised once its claim is held, its adapter is known to be ours, and it
        #    is known what a store loads beside the pull.  If its request is still being computed,
        #    there must be blocks to spare.
        is_promised = is_known and tracked.claim.is_held and self._has_room(request, tracked)
        return (count, True) if is_promised and offer is not None else ASK_AGAIN

    def _ask_store(self, request: Any, tracked: Tracked) -> BesideOffer | None:
        """What a store has of the prompt, which is looked up while the claim is on its way."""
        if self.store is None:
            return BesideOffer(tracked.num_local)
        return self.store.offer_beside(request, self._outlook(request, tracked))

    def _yields(self, request: Any, tracked: Tracked, offer: BesideOffer | None) -> bool:
        """Whether the ticket is given up, since the store loads the prompt alone."""
        if offer is None or not offer.is_enough:
            return False
        self._counts["prefixes_stored"] += 1
        self._give_up(request.request_id, tracked)
        return True

    def _outlook(self, request: Any, tracked: Tracked) -> PullOutlook:
        tokens = range(tracked.num_local, self._until(request, tracked))
        return PullOutlook(tokens, self._bandwidths.of(tracked.claims), tracked.prefix > 0)

    def _has_room(self, request: Any, tracked: Tracked) -> bool:
        """Whether a request may have blocks before the lender has computed all that fills them."""
        if not tracked.is_early or self._manager is None:
            return True
        # Two engines that compute for each other would wait for each other's blocks.
        if self._rules.is_lender:
            return False
        needed = blocks_for(self._manager, request.num_tokens)
        spare = EARLY_SPARES * self._manager.block_pool.num_gpu_blocks
        return num_free_blocks(self._manager) - needed >= spare

    def _until(self, request: Any, tracked: Tracked) -> int:
        """Tokens of the prompt that are pulled, or that the engine holds already."""
        return tracked.prefix or int(request.num_prompt_tokens) - self._rules.num_lookahead

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        """Process outcomes of awaited claims; those of requests with blocks are ignored."""
        for outcome in outcomes:
            tracked = self._tracked.get(outcome.request)
            if tracked is None or tracked.claim.pull != outcome.pull or tracked.pulling:
                continue
            if tracked.claims is None:  # it was given up before this was heard
                continue
            tracked.expected_at, problem, ticket = 0.0, outcome.problem, outcome.ticket
            if problem is None and ticket is not None and not tracked.is_followed_as(ticket):
                problem = "its lender has sent another request to another rank"
            if problem is None:
                tracked.claim.granted.add(outcome.rank)
                tracked.ticket = ticket or tracked.ticket
            elif tracked.problem is None:
                self._lost(outcome.request, problem)

    def pulled_until(self, request: Any) -> int:
        """Tokens up to which a pull loads what is not held; 0 if none can be promised now."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.is_open(request):
            return 0
        self._check(request, tracked)
        if tracked.problem is not None or not self._knows_adapter(request, tracked):
            return 0
        if tracked.claims is None or (self._rules.prefix_caching and tracked.key in self._pulling):
            return 0
        is_promised = tracked.claim.is_held and self._has_room(request, tracked)
        return self._until(request, tracked) if is_promised else 0

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """Read into the request's blocks, or give up its claim."""
        name, count = request.request_id, num_external_tokens if is_promised else 0
        self._patience.note_blocks(name, count if self.prefix_of(name) else 0)
        tracked = self._tracked.get(name)
        if tracked is None or tracked.pulling:
            return
        if not tracked.prefix:  # from now on the request is computed, also if the pull fails
            request.kv_transfer_params["do_remote_prefill"] = False
        key = tracked.key
        if count <= 0 or tracked.problem is not None or tracked.claims is None or key is None:
            self._give_up(name, tracked)
            if count > 0:
                self._fail(name, tracked)
            return
        tracked.pulling = True
        self._pulling.begin_pull(key, tracked.parent)
        tracked.blocks, local = blocks.ids, tracked.num_local
        starts = (local,) * len(tracked.blocks)
        if self.supports_divergent_local_hybrid_hits:  # groups may hold different parts of the hit
            starts = blocks.held_tokens(local)
        described = (self._splits or UNSPLIT).described(tracked.blocks)
        tokens = tuple(range(start, local + count) for start in starts)
        need = Need(tokens, tuple(trimmed(ids) for ids in described))
        beside = None
        if self.store is not None:
            beside = self.store.join_pull(request, need, self._outlook(request, tracked))
        rest = need if beside is None else cover.rest_of(need, beside)
        urgency = Urgency.PREFETCH if is_prefetch(request) else Urgency.PULL
        self._commands.append(ReadBlocks(name, rest, beside, urgency, tenant_label(request)))

    def blocks_of(self, request_id: str) -> tuple[int, ...]:
        """Blocks of a request whose pull was not reported yet, without holes."""
        return tuple(block for ids in self._tracked[request_id].blocks for block in ids if block)

    def is_over(self, request_id: str) -> bool:
        """Whether a request has left the engine, or its pull has been reported."""
        tracked = self._tracked.get(request_id)
        return tracked is None or tracked.over

    def is_load_optional(self, request_id: str) -> bool:
        """Whether a request waits for a prefix or a stream; for a ticket the policy decides."""
        tracked = self._tracked.get(request_id)
        is_stream = tracked is not None and tracked.claim.stream is not None
        return is_stream or self.is_of_prefix(request_id)

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' reports of claims, pulls, and blocks."""
        report = connector_output.kv_connector_worker_meta
        received = connector_output.finished_recving or ()
        for request_id in received:
            failed = request_id in connector_output.failed_recving
            self._patience.note_pull(request_id, failed=failed)
        if isinstance(report, PdWorkerReport):
            for speed in report.read:
                self._note_speed(speed)
            self.note_claims(report.claims)
            self._note_expected(report.expected)
            self._note_blocks(report)
        for request_id in received:
            self.end_pull(request_id)

    def _note_expected(self, expected: Iterable[ExpectedPull]) -> None:
        for one in expected:
            tracked = self._tracked.get(one.request)
            if tracked is not None and tracked.claim.pull == one.pull:
                tracked.expected_at = self._clock() + one.in_s

    def _note_speed(self, speed: ReadSpeed) -> None:
        tracked = self._tracked.get(speed.request)
        if tracked is not None:
            self._bandwidths.learn_read(tracked.claims, speed.nbytes, speed.seconds)

    def quiet_until(self) -> float:
        """Before when nothing comes of any pull; 0 without one, or if it is not known of all."""
        return min((one.expected_at for one in self._tracked.values()), default=0.0)

    def _note_blocks(self, report: PdWorkerReport) -> None:
        quarantine = self._pulled.quarantine
        for request_id in report.quarantined:
            quarantine.keep_blocks(request_id, self.blocks_of(request_id))
        for request_id in report.released:
            quarantine.end_read(request_id)
        for request_id, blocks in report.partial.items():
            if not self.is_over(request_id):
                self._pulled.mark_partial(request_id, blocks)

    def end_pull(self, request_id: str) -> None:
        """Forget a pull that the workers have reported, received or failed."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._pulling.end_pull(None if tracked.claims is None else tracked.key)

    def request_finished(self, request: Any, blocks: TransferBlocks, num_computed: int) -> None:
        """Give up the claim of a request that was finished, aborted, or rejected; or its pull."""
        self._pulled.keep_answer(request, num_computed)
        self._patience.forget_waits(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if tracked.pulling:
            # The engine keeps the blocks until the workers report the pull.
            tracked.over = True
            self._commands.append(CancelPull(request.request_id))
        else:
            self._give_up(request.request_id, tracked)

    # Pulls that end early

    def waiting_claims(self, *, prefixes: bool) -> list[str]:
        """Requests with a claim, granted or not, and without blocks; oldest first."""
        waiting = {name: one.prefix for name, one in self._tracked.items() if one.is_waiting}
        return [name for name, prefix in waiting.items() if bool(prefix) == prefixes]

    def prefix_of(self, request_id: str) -> int:
        """Tokens of the prefix that a request pulls or may pull; 0 without one."""
        tracked = self._tracked.get(request_id)
        return 0 if tracked is None or tracked.ticket is None else tracked.prefix

    def is_of_prefix(self, request_id: str) -> bool:
        """Whether the ticket of a request is, or was, for a prefix and not for its whole prompt."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.prefix > 0

    def abandon(self, request_id: str) -> None:
        """Compute a prefix that takes too long; a read in flight puts its blocks in quarantine."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.claims is not None:
            self._counts["prefixes_late"] += 1
            if tracked.pulling:
                self._commands.append(AbandonPull(request_id))
            elif tracked.problem is None:
                self._lost(request_id, "the lender has not answered in time")

    def drop_claims(self, requests: Iterable[str]) -> None:
        """Give up the claims of these waiting requests, which are computed."""
        for name in requests:
            self._counts["tickets_gave_way"] += 1
            self._lost(name, "claim given up: requests wait for blocks while blocks are lent")

    def weights_changed(self) -> None:
        """Drop the tickets: their KV is of other weights than ours."""
        for name, tracked in list(self._tracked.items()):
            if tracked.claims is not None and not tracked.pulling:
                self._lost(name, "our weights have changed")

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """Give up prefixes that take too long, and send this step's commands."""
        for request_id in self._patience.overdue():
            self.abandon(request_id)
        metadata.commands = self.take_commands()

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        if not self._counts:  # in most steps
            return {}
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def take_commands(self) -> list[Command]:
        """This step's commands for the pullers, in order."""
        commands, self._commands = self._commands, []
        return commands

    def _claim(self, request_id: str, tracked: Tracked, ticket: Ticket | EarlyTicket) -> None:
        self._number += 1
        claim = tracked.claim
        claim.pull = f"{self._rules.incarnation}/{self._number}"
        self._commands.append(ClaimTicket(request_id, claim.pull, ticket, claim.awaited > 0))

    def _num_tokens(self, request: Any) -> int:
        """Tokens that the ticket of ``request`` may be for, at most."""
        # For a request that the frontend has rejected, vLLM sends one of a single token with the
        # ticket, so that its lease can be ended.
        if request.abort_immediately:
            return self._rules.max_model_len
        return int(request.num_prompt_tokens)

    def _knows_adapter(self, request: Any, tracked: Tracked) -> bool:
        """Whether the request's adapter has been read; a ticket with another one is dropped."""
        if self.adapters is None or tracked.ticket is None:
            return True
        is_read, difference = self.adapters.compare(request, tracked.ticket.adapter)
        if difference:
            self._lost(request.request_id, difference)
        return is_read

    def _check(self, request: Any, tracked: Tracked) -> None:
        """Compare ticket and prompt, once, and only if something is to be pulled."""
        if tracked.checked or tracked.ticket is None:
            return
        tracked.checked = True
        tracked.problem = tracked.problem_of(
            request, self._rules.has_states, self._rules.num_lookahead
        )
        if tracked.problem is not None:
            tracked.mistaken = True
            self._counts["tickets_mistaken"] += 1
            name = shown(request.request_id)
            log.warning(
                "pdconn: ticket refused: it is for another prompt (%s) request=%s",
                tracked.problem,
                name,
            )

    def _lost(self, request_id: str, problem: str) -> None:
        """Drop a ticket whose claim has failed: cancel the other ranks' claims.

        If a sibling pulls with the ticket, the request waits for its blocks.
        """
        tracked = self._tracked[request_id]
        claims = tracked.claims
        assert claims is not None
        log.warning(
            "pdconn: ticket dropped: %s request=%s lender=%s",
            problem,
            shown(request_id),
            PeerKey.from_ticket(claims),
        )
        self._counts["tickets_gone"] += 1
        self._commands.append(CancelPull(request_id))
        tracked.drop_ticket()

    def _fail(self, request_id: str, tracked: Tracked) -> None:
        self._tracked[request_id] = tracked
        tracked.pulling = True
        self._commands.append(FailPull(request_id, tracked.problem or "no ticket"))

    def _give_up(self, request_id: str, tracked: Tracked) -> None:
        """Give up the claim of a request that pulls nothing; the lender is notified."""
        del self._tracked[request_id]
        if tracked.claims is not None:
            self._commands.append(CancelPull(request_id))
            tracked.ticket = tracked.claim.stream = None
