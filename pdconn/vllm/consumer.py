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
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pdconn.planning.plan import Need
from pdconn.protocol.errors import TicketError
from pdconn.protocol.ticket import Ticket, max_blocks_for, parse_ticket, trimmed
from pdconn.puller.commands import CancelPull, ClaimTicket, Command, FailPull, ReadBlocks
from pdconn.puller.peers import PeerKey
from pdconn.puller.results import ClaimOutcome
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.prompt import EMBEDDINGS, has_embeddings, parent_of, prompt_digest
from transport.errors import shown

log = logging.getLogger(__name__)

_REMEMBERED = 4096


@dataclass(slots=True)
class _Tracked:
    """A request with a ticket, from its arrival to its pull or its end.

    Attributes:
        follows: the ticket that a sibling pulls with, when there is no ticket of its own.
        blocks: the engine's blocks that the pull writes to, holes and all, by group.
        num_local: the local hit in tokens that the engine last asked with.
        pull: the id of its own claim.
        granted: ranks that were granted it, where the engine waits for that.
    """

    ticket: Ticket | None
    problem: str | None
    parent: str | None
    follows: tuple[str, str] | None = None
    blocks: tuple[list[int], ...] = ()
    checked: bool = False
    pulling: bool = False
    num_local: int = 0
    pull: str = ""
    granted: set[int] = field(default_factory=set)


class ConsumerScheduler:
    """Tickets of one decode engine.

    Args:
        incarnation: this boot's name, part of every pull id.
        recompute: whether the engine recomputes what cannot be pulled; otherwise
            such requests fail.
        prefix_caching: whether a finished pull can be hit by the next request.
        max_model_len: tokens of the longest prompt that the engine takes.
        has_states: whether the model keeps recurrent states, of which there is one, after
            the last token that prefill has computed.
        num_lookahead: tokens at a prompt's end that are computed here and not pulled
            (:mod:`pdconn.vllm.speculation`).
        awaited_ranks: how many ranks must be granted a claim before its ticket is promised;
            none without a store.
    """

    def __init__(
        self,
        incarnation: str,
        recompute: bool,
        prefix_caching: bool,
        max_model_len: int,
        *,
        has_states: bool = False,
        num_lookahead: int = 1,
        awaited_ranks: int = 0,
    ) -> None:
        self._incarnation = incarnation
        self._recompute = recompute
        self._prefix_caching = prefix_caching
        self._max_model_len = max_model_len
        self._has_states = has_states
        self._num_lookahead = num_lookahead
        self._awaited_ranks = awaited_ranks
        self._splits = UNSPLIT
        self._is_registered = False
        self._tracked: dict[str, _Tracked] = {}
        self._pulling: dict[tuple[str, str], int] = {}
        self._started: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._commands: list[Command] = []
        self._number = 0
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(
        cls, config: Any, incarnation: str, *, has_states: bool, num_lookahead: int, has_store: bool
    ) -> ConsumerScheduler:
        """For an engine of vLLM's ``config``."""
        recompute = config.kv_transfer_config.kv_load_failure_policy == "recompute"
        parallel = config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return cls(
            incarnation,
            recompute=recompute,
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            max_model_len=config.model_config.max_model_len,
            has_states=has_states,
            num_lookahead=num_lookahead,
            # A request whose pull failed is asked about again under the other policy.
            awaited_ranks=ranks if has_store and not recompute else 0,
        )

    def __len__(self) -> int:
        return len(self._tracked)

    def registered(self, splits: Splits) -> None:
        """Every worker is registered: ``splits`` says which blocks they describe.

        When it is so again the engine has slept, and its workers know of no claim and no pull any
        more: requests that wait for blocks claim their tickets anew, and pulls have failed.
        """
        self._splits = splits
        if self._is_registered:
            self._commands = []
            for request_id, tracked in self._tracked.items():
                if tracked.pulling:
                    self._commands.append(FailPull(request_id, "the engine has slept"))
                elif tracked.ticket is not None:
                    tracked.granted.clear()
                    self._claim(request_id, tracked, tracked.ticket)
        self._is_registered = True

    def arrived(self, request: Any) -> None:
        """A request entered the engine; claim its ticket if it has one.

        Clients write ``kv_transfer_params``, which may be anything.  What is no dict, and what
        is no ticket, is a wrong ticket: it costs its own request what the policy says.
        """
        params = request.kv_transfer_params
        if not params or (isinstance(params, dict) and not params.get("do_remote_prefill")):
            return
        parent = parent_of(request.request_id)
        try:
            ticket = parse_ticket(params, max_blocks_for(self._num_tokens(request)))
        except TicketError as error:
            self._tracked[request.request_id] = _Tracked(None, str(error), parent)
            log.warning("pdconn: ticket of %s is wrong: %s", shown(request.request_id), error)
            if not isinstance(params, dict):  # vLLM asks it next, and we ask it later
                request.kv_transfer_params = {"do_remote_prefill": True}
            return
        tracked = self._tracked[request.request_id] = _Tracked(ticket, None, parent)
        if self._was_started(ticket, parent):
            tracked.ticket, tracked.follows = None, _key(ticket)
            return
        self._claim(request.request_id, tracked, ticket)

    def matched(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """How many tokens after the local hit can be pulled; None to ask again later.

        The last prompt token is never pulled: the engine computes it anyway, to have
        something to sample from; nor are others that a drafter looks ahead to.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not request.kv_transfer_params.get("do_remote_prefill"):
            return 0, False
        tracked.num_local = num_local
        count = request.num_prompt_tokens - self._num_lookahead - num_local
        if count <= 0:
            return 0, False
        self._check(request, tracked)
        if tracked.problem is not None:
            return (0, False) if self._recompute else (count, True)
        key = tracked.follows if tracked.ticket is None else _key(tracked.ticket)
        if self._prefix_caching and key is not None and self._pulling.get(key):
            return None, False
        if tracked.ticket is None:
            return 0, False
        return (count, True) if len(tracked.granted) >= self._awaited_ranks else (None, False)

    def claimed(self, outcomes: Iterable[ClaimOutcome]) -> None:
        """Ranks told what came of awaited claims; those of requests that have blocks are over."""
        for outcome in outcomes:
            tracked = self._tracked.get(outcome.request)
            if tracked is None or tracked.pull != outcome.pull or tracked.pulling:
                continue
            if outcome.problem is None:
                tracked.granted.add(outcome.rank)
            elif tracked.ticket is not None and tracked.problem is None:
                self._lost(outcome.request, tracked.ticket, outcome.problem)

    def is_pulled(self, request: Any) -> bool:
        """Whether the engine, if it asks now what can be pulled, is promised it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not request.kv_transfer_params.get("do_remote_prefill"):
            return False
        self._check(request, tracked)
        if tracked.ticket is None or tracked.problem is not None:
            return False
        if self._prefix_caching and self._pulling.get(_key(tracked.ticket)):
            return False
        return len(tracked.granted) >= self._awaited_ranks

    def allocated(
        self,
        request: Any,
        blocks: tuple[list[int], ...],
        num_external: int,
        held: Callable[[int], tuple[int, ...]] | None = None,
    ) -> None:
        """The request got blocks, of which ``num_external`` tokens are ours to fill.

        ``held`` tells of a local hit what each group holds of it; without it all of it.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.pulling:
            return
        # From here on the engine must not ask us again, also when it recomputes.
        request.kv_transfer_params["do_remote_prefill"] = False
        if num_external <= 0 or tracked.problem is not None or tracked.ticket is None:
            self._give_up(request.request_id, tracked)
            if num_external > 0:
                self._fail(request.request_id, tracked)
            return
        tracked.pulling = True
        key = _key(tracked.ticket)
        self._pulling[key] = self._pulling.get(key, 0) + 1
        self._note_started(key, tracked.parent)
        tracked.blocks = blocks
        until = tracked.num_local + num_external
        starts = (tracked.num_local,) * len(blocks) if held is None else held(tracked.num_local)
        described = tuple(trimmed(ids) for ids in self._splits.described(blocks))
        need = Need(tuple(range(start, until) for start in starts), described)
        self._commands.append(ReadBlocks(request.request_id, need))

    def blocks_of(self, request_id: str) -> tuple[int, ...]:
        """Blocks of a request whose pull was not reported yet, holes left out."""
        return tuple(block for ids in self._tracked[request_id].blocks for block in ids if block)

    def reported(self, request_id: str) -> None:
        """The workers reported the pull, received or failed."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._ended(tracked)

    def finished(self, request: Any) -> None:
        """The request left the engine: finished, aborted, or rejected at its arrival."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if tracked.pulling:
            # The engine keeps the blocks until the workers report, so stay tracked.
            self._commands.append(CancelPull(request.request_id))
        else:
            self._give_up(request.request_id, tracked)

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

    def _claim(self, request_id: str, tracked: _Tracked, ticket: Ticket) -> None:
        self._number += 1
        tracked.pull = f"{self._incarnation}/{self._number}"
        is_awaited = self._awaited_ranks > 0
        self._commands.append(ClaimTicket(request_id, tracked.pull, ticket, is_awaited))

    def _num_tokens(self, request: Any) -> int:
        """Tokens of the prompt that the ticket of ``request`` is for, at most.

        For a request that the frontend rejected vLLM sends one of a single token, with the
        ticket, so that it is given back.
        """
        rejected = getattr(request, "abort_immediately", False)
        return self._max_model_len if rejected else int(request.num_prompt_tokens)

    def _check(self, request: Any, tracked: _Tracked) -> None:
        """Compare ticket and prompt, once, and only if something is to be pulled."""
        if tracked.checked or tracked.ticket is None:
            return
        tracked.checked = True
        tracked.problem = _problem(request, tracked.ticket, self._has_states)
        if tracked.problem is not None:
            name = shown(request.request_id)
            log.warning("pdconn: ticket of %s is wrong: %s", name, tracked.problem)

    def _lost(self, request_id: str, ticket: Ticket, problem: str) -> None:
        """A claim failed: give up those of the other ranks, and go on without the ticket.

        If a sibling pulls with the ticket all the same, its blocks are waited for.
        """
        log.warning(
            "pdconn: ticket of %s is of no use, asking the store: lender=%s reason=%s",
            shown(request_id),
            PeerKey.of(ticket),
            problem,
        )
        self._counts["tickets_gone"] += 1
        self._commands.append(CancelPull(request_id))
        tracked = self._tracked[request_id]
        tracked.ticket, tracked.follows = None, _key(ticket)

    def _fail(self, request_id: str, tracked: _Tracked) -> None:
        self._tracked[request_id] = tracked
        tracked.pulling = True
        self._commands.append(FailPull(request_id, tracked.problem or "no ticket"))

    def _give_up(self, request_id: str, tracked: _Tracked) -> None:
        """Nothing will be pulled: give the claim up, which notifies the lender."""
        del self._tracked[request_id]
        if tracked.ticket is not None:
            self._commands.append(CancelPull(request_id))
            tracked.ticket = None

    def _ended(self, tracked: _Tracked) -> None:
        if tracked.ticket is None:
            return
        key = _key(tracked.ticket)
        left = self._pulling.pop(key, 1) - 1
        if left > 0:
            self._pulling[key] = left

    def _note_started(self, key: tuple[str, str], parent: str | None) -> None:
        """Siblings that come from now on may find the lease consumed."""
        if parent is not None:
            self._started[(*key, parent)] = None
            while len(self._started) > _REMEMBERED:
                self._started.popitem(last=False)

    def _was_started(self, ticket: Ticket, parent: str | None) -> bool:
        return parent is not None and (*_key(ticket), parent) in self._started


def _key(ticket: Ticket) -> tuple[str, str]:
    return ticket.incarnation, ticket.request_id


def _problem(request: Any, ticket: Ticket, has_states: bool) -> str | None:
    """Why the ticket cannot be this request's, or None."""
    if has_embeddings(request):
        return EMBEDDINGS
    wanted = request.num_prompt_tokens - 1
    if ticket.num_tokens < wanted:
        return str(TicketError("remote_num_tokens", f"at least {wanted}", ticket.num_tokens))
    if has_states and ticket.num_tokens > wanted:
        expected = f"{wanted}, since states of later tokens are of no use"
        return str(TicketError("remote_num_tokens", expected, ticket.num_tokens))
    digest = prompt_digest(request)
    if ticket.prompt != digest:
        return str(TicketError("pdconn.prompt", digest, ticket.prompt))
    return None
