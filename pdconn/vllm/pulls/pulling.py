"""The scheduler's part of a decode engine: decides what to pull for which request.

The ticket of every request is *claimed* at its arrival, so that the claim is renewed while
the request queues, and ends in one of three ways: its blocks are *read* once there are
some, it is *cancelled* when nothing is to be pulled (a full local hit, an abort, a
rejection), or it is *failed* when it is wrong.

Best-of-n sends one ticket with several requests.  Each holds a claim of its own;
with prefix caching the later ones wait for the first pull and then hit its blocks.
One that comes when the first pull has started claims nothing, since the lease may be
consumed by then: it waits likewise, or computes for itself.

An engine with a store has another source for a request whose lender is gone, but vLLM takes no
promise back: what was promised and does not come fails the request, if that is the policy.  So
there a ticket is promised when every rank has been granted its claim.  Until then vLLM is told
to ask again; each rank's answer comes within the time limits of the pull.  If a claim fails, or
is lost before the request has blocks, the others are given up, and the request goes on as one
without a ticket.

A ticket that is for another prompt is left out, and its request computed, under either policy: it
was judged before anything was promised.

A ticket for a prefix alone (:mod:`pdconn.vllm.lends.prefixes`) is awaited likewise, in every
engine: what it does not bring is computed here anyway, so it costs its request nothing but time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pdconn.planning.plan import Need
from pdconn.protocol.errors import TicketError
from pdconn.protocol.prefix import parse_prefix_ticket, ticket_from
from pdconn.protocol.ticket import Ticket, max_blocks_for, parse_ticket, trimmed
from pdconn.puller.commands import (
    AbandonPull,
    CancelPull,
    ClaimOutcome,
    ClaimTicket,
    Command,
    FailPull,
    ReadBlocks,
)
from pdconn.puller.peers import PeerKey
from pdconn.sidechannel.clock import steady
from pdconn.vllm.blocks.kinds import may_lag
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.identity.adapters import AdapterReader
from pdconn.vllm.metadata import PdMetadata, PdWorkerReport
from pdconn.vllm.patches.pool.answer_windows import AnswerWindows
from pdconn.vllm.patches.request_writes import ask_of_wrong_params
from pdconn.vllm.prompt import parent_of
from pdconn.vllm.pulls.patience import PrefixPatience
from pdconn.vllm.pulls.pulled import PulledBlocks
from pdconn.vllm.pulls.tracked import ClaimGrants, StartedPulls, Tracked, key_of
from pdconn.vllm.scheduler_part import ASK_AGAIN, NOTHING, Matched, SchedulerPart
from transport.errors import shown

if TYPE_CHECKING:
    from pdconn.vllm.identity.greeting import Greeting

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullRules:
    """What an engine's configuration says of its pulls.

    Attributes:
        incarnation: this boot's name, part of every pull id.
        recompute: whether the engine recomputes what cannot be pulled; otherwise
            such requests fail.
        prefix_caching: whether a finished pull can be hit by the next request.
        max_model_len: tokens of the longest prompt that the engine takes.
        has_states: whether the model keeps recurrent states, of which there is one, after
            the last token that prefill has computed.
        num_lookahead: tokens at a prompt's end that are computed here and not pulled
            (:mod:`pdconn.vllm.speculation`).
        num_ranks: of this engine.
        is_awaiting: whether every rank must be granted a claim before its ticket is promised.
        has_lagging: whether states of a local hit may be of less than full attention has.
    """

    incarnation: str
    recompute: bool
    prefix_caching: bool
    max_model_len: int
    has_states: bool = False
    num_lookahead: int = 1
    num_ranks: int = 1
    is_awaiting: bool = False
    has_lagging: bool = False

    @classmethod
    def of(
        cls, config: Any, kv_cache_config: Any, incarnation: str, *, has_store: bool, **more: Any
    ) -> Self:
        """For an engine of vLLM's ``config``; ``more`` is what that does not say."""
        recompute = config.kv_transfer_config.kv_load_failure_policy == "recompute"
        parallel = config.parallel_config
        return cls(
            incarnation,
            recompute,
            bool(config.cache_config.enable_prefix_caching),
            config.model_config.max_model_len,
            num_ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            # A request whose pull failed is asked about again under the other policy.
            is_awaiting=has_store and not recompute,
            has_lagging=may_lag(kv_cache_config),
            **more,
        )


class Pulling(SchedulerPart):
    """Tickets of one engine.

    Args:
        rules: what its configuration says.
        clock: seconds that never go back.

    Attributes:
        doubt: why nothing may be pulled; empty if it may.
        adapters: reads adapters of requests; None where they are compared by name alone.
        take_back_own: ends the lease of a ticket that this engine made itself.
    """

    fills_blocks = True

    def __init__(self, rules: PullRules, clock: Callable[[], float] = steady) -> None:
        self._rules = rules
        self.doubt = ""
        self.adapters: AdapterReader | None = None
        self.take_back_own: Callable[[Ticket], None] | None = None
        self._splits: Splits | None = None
        self._tracked: dict[str, Tracked] = {}
        self._pulling = StartedPulls()
        self._patience, self._pulled = PrefixPatience(clock), PulledBlocks()
        self._commands: list[Command] = []
        self._number = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """It brings the states whatever is held; windows it brings from what they hold on."""
        return self._rules.has_lagging or self._pulled.completes_windows

    @property
    def answer_windows(self) -> AnswerWindows | None:
        """What caches windows of requests that end; None before the manager is bound."""
        return self._pulled.answers

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``."""
        self._pulled.use_manager(manager, self.pulled_until)

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin quarantined blocks in."""
        self._pulled.quarantine.use_pool(block_pool)

    def set_xfer_handshake_metadata(self, greeting: Greeting, splits: Splits) -> None:
        """Every worker is registered."""
        self.workers_registered(splits)
        self.set_doubt(greeting.doubt)

    def set_doubt(self, doubt: str) -> None:
        """Why nothing may be pulled from now on; empty if it may."""
        self.doubt = doubt

    def workers_registered(self, splits: Splits) -> None:
        """Every worker is registered: ``splits`` says which blocks they describe.

        When it is so again the engine has slept, and its workers know of no claim and no pull any
        more: requests that wait for blocks claim their tickets anew, and pulls have failed.
        """
        has_slept, self._splits = self._splits is not None, splits
        if has_slept:
            self._commands.clear()
            for request_id, tracked in self._tracked.items():
                if tracked.pulling:
                    self._commands.append(FailPull(request_id, "the engine has slept"))
                elif tracked.ticket is not None:
                    tracked.claim.granted.clear()
                    self._claim(request_id, tracked, tracked.ticket)

    # A request

    def on_new_request(self, request: Any) -> None:
        """A request entered the engine; claim its ticket if it has one.

        Clients write ``kv_transfer_params``, which may be anything.  What is no dict, and what
        is no ticket, is a wrong ticket: it costs its own request what the policy says.
        """
        params = request.kv_transfer_params
        if isinstance(params, dict) and not params.get("do_remote_prefill"):
            self._prefix_arrived(request, ticket_from(params))
            return
        if not params:
            return
        parent = parent_of(request.request_id)
        try:
            ticket = parse_ticket(params, max_blocks_for(self._num_tokens(request)))
        except TicketError as error:
            self._tracked[request.request_id] = Tracked(None, str(error), parent)
            log.warning("pdconn: ticket of %s is wrong: %s", shown(request.request_id), error)
            if not isinstance(params, dict):
                ask_of_wrong_params(request)
            return
        awaited = self._rules.num_ranks if self._rules.is_awaiting else 0
        tracked = Tracked(ticket, None, parent, claim=ClaimGrants(awaited=awaited))
        self._track(request, tracked, ticket)

    def _prefix_arrived(self, request: Any, given: object) -> None:
        """A request names a ticket for its prefix.  A wrong one is of no use, and no harm."""
        if given is None:
            return
        name = request.request_id
        try:
            ticket = parse_prefix_ticket(given, max_blocks_for(self._num_tokens(request)))
        except TicketError as error:
            log.warning("pdconn: prefix of %s is not pulled: %s", shown(name), error)
            return
        claim = ClaimGrants(awaited=self._rules.num_ranks)
        tracked = Tracked(ticket, None, parent_of(name), claim=claim, prefix=ticket.num_tokens)
        self._track(request, tracked, ticket)

    def _track(self, request: Any, tracked: Tracked, ticket: Ticket) -> None:
        self._tracked[request.request_id] = tracked
        if self.doubt:
            self._lost(request.request_id, self.doubt)
        elif ticket.incarnation == self._rules.incarnation:
            # A router may choose one engine for both legs.  No transport reads from itself, and
            # what was computed is in this engine's own cache.
            if self.take_back_own is not None:
                self.take_back_own(ticket)
            self._lost(request.request_id, "this engine lent it itself, and looks in its cache")
        elif self._pulling.has_begun(ticket, tracked.parent):
            tracked.ticket, tracked.follows = None, key_of(ticket)
        else:
            self._claim(request.request_id, tracked, ticket)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """How many tokens after the local hit can be pulled, if any."""
        name, (count, is_async) = request.request_id, self._match(request, num_computed_tokens)
        if count is not None:
            self._patience.note_missing(request, request.num_tokens - num_computed_tokens - count)
        elif prefix := self.prefix_of(name):
            self._patience.note_claim(name, prefix)
        return (count, is_async) if count != 0 else None

    def _match(self, request: Any, num_local: int) -> Matched:
        """Decides on a ticket; the first of these cases that applies."""
        tracked = self._tracked.get(request.request_id)
        # 1. There is no ticket, or vLLM was told before to compute the request.
        if tracked is None or not tracked.is_open(request):
            return NOTHING
        # 2. The engine holds all that the ticket brings.  The last prompt token is never pulled:
        #    the engine computes it anyway, to have something to sample from; nor are others that
        #    a drafter looks ahead to.
        tracked.num_local = num_local
        if self._until(request, tracked) > num_local:
            self._check(request, tracked)
        count = self._until(request, tracked) - num_local
        if count <= 0:
            return NOTHING
        # 3. The ticket is wrong.  Nothing was promised yet, so a request whose ticket is for
        #    another prompt, which is no failure of anything, is computed whatever the policy says
        #    of pulls that fail.
        if tracked.problem is not None:
            is_computed = self._rules.recompute or tracked.prefix or tracked.mistaken
            return NOTHING if is_computed else (count, True)
        is_known = self._knows_adapter(request, tracked)
        # 4. A sibling pulls the same: its blocks will be hit.
        key = tracked.follows if tracked.ticket is None else key_of(tracked.ticket)
        if self._rules.prefix_caching and key in self._pulling:
            return ASK_AGAIN
        # 5. The ticket was given up.
        if tracked.ticket is None:
            return NOTHING
        # 6. It is promised once its claim is held, and its adapter is known to be ours.
        return (count, True) if is_known and tracked.claim.is_held else ASK_AGAIN

    def _until(self, request: Any, tracked: Tracked) -> int:
        """Tokens of the prompt that the pull brings, or the engine holds already."""
        return tracked.prefix or int(request.num_prompt_tokens) - self._rules.num_lookahead

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        """Ranks report what came of awaited claims; those of requests with blocks are over."""
        for outcome in outcomes:
            tracked = self._tracked.get(outcome.request)
            if tracked is None or tracked.claim.pull != outcome.pull or tracked.pulling:
                continue
            if outcome.problem is None:
                tracked.claim.granted.add(outcome.rank)
            elif tracked.ticket is not None and tracked.problem is None:
                self._lost(outcome.request, outcome.problem)

    def pulled_until(self, request: Any) -> int:
        """Tokens up to which a pull will bring what is not held; 0 if none is promised now."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.is_open(request):
            return 0
        self._check(request, tracked)
        if tracked.problem is not None or not self._knows_adapter(request, tracked):
            return 0
        ticket = tracked.ticket
        if ticket is None or (self._rules.prefix_caching and key_of(ticket) in self._pulling):
            return 0
        return self._until(request, tracked) if tracked.claim.is_held else 0

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """The request got blocks: read into them, or give the claim up."""
        name, count = request.request_id, num_external_tokens if is_promised else 0
        self._patience.note_blocks(name, count if self.prefix_of(name) else 0)
        tracked = self._tracked.get(name)
        if tracked is None or tracked.pulling:
            return
        if not tracked.prefix:  # from here on we must not be asked again, also to recompute
            request.kv_transfer_params["do_remote_prefill"] = False
        if count <= 0 or tracked.problem is not None or tracked.ticket is None:
            self._give_up(name, tracked)
            if count > 0:
                self._fail(name, tracked)
            return
        tracked.pulling = True
        self._pulling.begin_pull(key_of(tracked.ticket), tracked.parent)
        tracked.blocks, local = blocks.ids, tracked.num_local
        starts = (local,) * len(tracked.blocks)
        if self.supports_divergent_local_hybrid_hits:  # groups hold different parts of the hit
            starts = blocks.held_tokens(local)
        described = (self._splits or UNSPLIT).described(tracked.blocks)
        tokens = tuple(range(start, local + count) for start in starts)
        need = Need(tokens, tuple(trimmed(ids) for ids in described))
        self._commands.append(ReadBlocks(name, need))

    def blocks_of(self, request_id: str) -> tuple[int, ...]:
        """Blocks of a request whose pull was not reported yet, holes left out."""
        return tuple(block for ids in self._tracked[request_id].blocks for block in ids if block)

    def is_over(self, request_id: str) -> bool:
        """Whether a request has left the engine, or its pull was reported."""
        tracked = self._tracked.get(request_id)
        return tracked is None or tracked.over

    def is_load_optional(self, request_id: str) -> bool:
        """Whether it waits for a prefix: a whole prompt's failure is the policy's matter."""
        return self.is_of_prefix(request_id)

    def update_connector_output(self, connector_output: Any) -> None:
        """Workers reported claims, pulls, and what pulls have left in blocks."""
        report = connector_output.kv_connector_worker_meta
        received = connector_output.finished_recving or ()
        for request_id in received:
            failed = request_id in connector_output.failed_recving
            self._patience.note_pull(request_id, failed=failed)
        if isinstance(report, PdWorkerReport):
            self.note_claims(report.claims)
            self._note_blocks(report)
        for request_id in received:
            self.end_pull(request_id)

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
        """The workers reported the pull, received or failed."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._pulling.end_pull(tracked.ticket)

    def request_finished(self, request: Any, blocks: TransferBlocks, num_computed: int) -> None:
        """The request left the engine: finished, aborted, or rejected at its arrival."""
        self._pulled.keep_answer(request, num_computed)
        self._patience.forget_request(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if tracked.pulling:
            # The engine keeps the blocks until the workers report, so stay tracked.
            tracked.over = True
            self._commands.append(CancelPull(request.request_id))
        else:
            self._give_up(request.request_id, tracked)

    # Pulls that end early

    def waiting_claims(self, *, prefixes: bool) -> list[str]:
        """Requests that hold a claim, or ask for one, and have no blocks; oldest first."""
        waiting = {name: one.prefix for name, one in self._tracked.items() if one.is_waiting}
        return [name for name, prefix in waiting.items() if bool(prefix) == prefixes]

    def prefix_of(self, request_id: str) -> int:
        """Tokens of the prefix that a request may still pull, or pulls; 0 without one."""
        tracked = self._tracked.get(request_id)
        return 0 if tracked is None or tracked.ticket is None else tracked.prefix

    def is_of_prefix(self, request_id: str) -> bool:
        """Whether what a request pulls, or was to pull, is a prefix, and not its whole prompt."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.prefix > 0

    def abandon(self, request_id: str) -> None:
        """A prefix takes too long: its request computes, though a read of it may still run."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.ticket is not None:
            self._counts["prefixes_late"] += 1
            if tracked.pulling:
                self._commands.append(AbandonPull(request_id))
            elif tracked.problem is None:
                self._lost(request_id, "its lender did not answer in time")

    def drop_claims(self, requests: Iterable[str]) -> None:
        """End the claims of these waiting requests, which go on without their tickets."""
        for name in requests:
            self._counts["tickets_gave_way"] += 1
            self._lost(name, "gave way, since nothing moved while blocks were lent")

    def weights_changed(self) -> None:
        """What tickets are for is of other weights than ours now: go on without them."""
        for name, tracked in list(self._tracked.items()):
            if tracked.ticket is not None and not tracked.pulling:
                self._lost(name, "our weights have changed")

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """A step is scheduled: prefixes that take too long are given up, commands go out."""
        for request_id in self._patience.overdue():
            self.abandon(request_id)
        metadata.commands = self.take_commands()

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        if not self._counts:  # asked in every step
            return {}
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def take_commands(self) -> list[Command]:
        """This step's commands for the pullers, in order."""
        commands, self._commands = self._commands, []
        return commands

    def _claim(self, request_id: str, tracked: Tracked, ticket: Ticket) -> None:
        self._number += 1
        claim = tracked.claim
        claim.pull = f"{self._rules.incarnation}/{self._number}"
        self._commands.append(ClaimTicket(request_id, claim.pull, ticket, claim.awaited > 0))

    def _num_tokens(self, request: Any) -> int:
        """Tokens of the prompt that the ticket of ``request`` is for, at most.

        For a request that the frontend rejected vLLM sends one of a single token, with the
        ticket, so that it is given back.
        """
        if request.abort_immediately:
            return self._rules.max_model_len
        return int(request.num_prompt_tokens)

    def _knows_adapter(self, request: Any, tracked: Tracked) -> bool:
        """Whether it is known if the ticket is of our adapter; one that is not is of no use."""
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
            log.warning("pdconn: ticket of %s is not for its prompt: %s", name, tracked.problem)

    def _lost(self, request_id: str, problem: str) -> None:
        """A claim failed: give up those of the other ranks, and go on without the ticket.

        If a sibling pulls with the ticket all the same, its blocks are waited for.
        """
        tracked = self._tracked[request_id]
        ticket = tracked.ticket
        assert ticket is not None
        log.warning(
            "pdconn: ticket of %s is of no use, going on without: lender=%s reason=%s",
            shown(request_id),
            PeerKey.of(ticket),
            problem,
        )
        self._counts["tickets_gone"] += 1
        self._commands.append(CancelPull(request_id))
        tracked.ticket, tracked.follows = None, key_of(ticket)

    def _fail(self, request_id: str, tracked: Tracked) -> None:
        self._tracked[request_id] = tracked
        tracked.pulling = True
        self._commands.append(FailPull(request_id, tracked.problem or "no ticket"))

    def _give_up(self, request_id: str, tracked: Tracked) -> None:
        """Nothing will be pulled: give the claim up, which notifies the lender."""
        del self._tracked[request_id]
        if tracked.ticket is not None:
            self._commands.append(CancelPull(request_id))
            tracked.ticket = None
