"""Requests with tickets, and checks of a ticket: its request's prompt has as many tokens and the
same digest.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.errors import TicketError
from pdconn.protocol.ticket import Ticket, TicketCut
from pdconn.vllm.prompt import EMBEDDINGS, has_embeddings, prefix_digests, prompt_digest

_REMEMBERED = 4096


@dataclass(slots=True)
class ClaimGrants:
    """A request's claim: its id, and the ranks to which it was granted.

    Attributes:
        awaited: to how many ranks it must be granted before the ticket is promised.
        granted: ranks to which it was, if the engine waits for that.
        stream: the early ticket that it is for; None for a ticket.
    """

    pull: str = ""
    awaited: int = 0
    granted: set[int] = field(default_factory=set)
    stream: EarlyTicket | None = None

    @property
    def is_held(self) -> bool:
        """Whether the ticket may be promised."""
        return len(self.granted) >= self.awaited


@dataclass(slots=True)
class Tracked:
    """A request with a ticket, from its arrival to its pull or its end.

    Attributes:
        ticket: None once it is given up, and while an early ticket's request is not known.  Without
            blocks while that request is being computed.
        problem: why the ticket is not valid.
        follows: the ticket with which a sibling pulls, if the request has none of its own.
        blocks: the engine's blocks that the pull writes to, with holes, by group.
        num_local: tokens of the last local hit.
        claim: its own claim.
        mistaken: the ticket is valid, but for another prompt: a chat template that contains the
            time gives prefill and decode different prompts.
        over: the request has left the engine, which keeps its blocks until the pull has ended.
        expected_at: nothing comes of its pull before; 0 if that is not known.
        prefix: tokens of a ticket for a prefix; once checked, those that the prompt shares.  0 for
            a whole prompt.
    """

    ticket: Ticket | None
    problem: str | None
    parent: str | None
    follows: tuple[str, str] | None = None
    blocks: tuple[list[int], ...] = ()
    checked: bool = False
    mistaken: bool = False
    pulling: bool = False
    num_local: int = 0
    claim: ClaimGrants = field(default_factory=ClaimGrants)
    over: bool = False
    expected_at: float = 0.0
    prefix: int = 0

    @property
    def claims(self) -> Ticket | EarlyTicket | None:
        """What it claims; None once that is given up."""
        return self.claim.stream or self.ticket

    @property
    def key(self) -> tuple[str, str] | None:
        """What identifies its ticket, or that of the sibling that it follows."""
        return self.follows if self.claims is None else key_of(self.claims)

    @property
    def is_early(self) -> bool:
        """Whether the request whose KV it pulls is still being computed."""
        return self.claim.stream is not None and not (self.ticket and self.ticket.blocks)

    @property
    def is_waiting(self) -> bool:
        """Whether it has a claim, granted or not, and no blocks."""
        return self.claims is not None and self.problem is None and not self.pulling

    def is_followed_as(self, ticket: Ticket) -> bool:
        """Whether ``ticket``, which a rank was sent, is of the request that the others follow."""
        known = self.ticket
        if known is None or known == ticket:
            return True
        is_of_both = known.blocks and ticket.blocks
        return not is_of_both and replace(known, blocks=()) == replace(ticket, blocks=())

    def drop_ticket(self) -> None:
        """Give the ticket up; a sibling that pulls with it is followed."""
        self.follows = self.key
        self.ticket = self.claim.stream = None

    def is_open(self, request: Any) -> bool:
        """Whether the ticket may still be promised."""
        return bool(self.prefix or request.kv_transfer_params.get("do_remote_prefill"))

    def problem_of(self, request: Any, has_states: bool, num_lookahead: int) -> str | None:
        """Why the ticket is not valid for this request, or None.

        Args:
            request: vLLM's ``Request``.
            has_states: whether the model keeps recurrent states.
            num_lookahead: tokens at a prompt's end that are not pulled.
        """
        assert self.ticket is not None
        if has_embeddings(request):
            return EMBEDDINGS
        if self.prefix:
            found = _shared_with(request, self.ticket, num_lookahead)
            if isinstance(found, TicketError):
                return str(found)
            self.prefix = found
            return None
        return _problem_of_prompt(request, self.ticket, has_states)


class StartedPulls:
    """Pulls in progress, by their tickets, and best-of-n requests of which a child has pulled."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], int] = {}
        self._begun: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, key: object) -> bool:
        return key in self._under_way

    def begin_pull(self, key: tuple[str, str], parent: str | None) -> None:
        """Record a pull: siblings that arrive later may find the lease consumed."""
        self._under_way[key] = self._under_way.get(key, 0) + 1
        if parent is not None:
            self._begun[(*key, parent)] = None
            while len(self._begun) > _REMEMBERED:
                self._begun.popitem(last=False)

    def end_pull(self, key: tuple[str, str] | None) -> None:
        """Record the end of a pull; None: there was no pull."""
        if key is not None and (left := self._under_way.pop(key, 1) - 1) > 0:
            self._under_way[key] = left

    def has_begun(self, key: tuple[str, str], parent: str | None) -> bool:
        """Whether a sibling pulls, or has pulled, with the ticket that ``key`` identifies."""
        return parent is not None and (*key, parent) in self._begun


def key_of(ticket: Ticket | EarlyTicket) -> tuple[str, str]:
    """What identifies a ticket: the lender's incarnation, and the request or its stream."""
    name = ticket.stream if isinstance(ticket, EarlyTicket) else ticket.request_id
    return ticket.incarnation, name


def _problem_of_prompt(request: Any, ticket: Ticket, has_states: bool) -> str | None:
    wanted = request.num_prompt_tokens - 1
    if ticket.num_tokens < wanted:
        return str(TicketError("remote_num_tokens", f"at least {wanted}", ticket.num_tokens))
    if has_states and ticket.num_tokens > wanted:
        expected = f"{wanted}: states of later tokens cannot be used"
        return str(TicketError("remote_num_tokens", expected, ticket.num_tokens))
    digest = prompt_digest(request)
    if ticket.prompt != digest:
        return str(TicketError("pdconn.prompt", digest, ticket.prompt))
    return None


def _shared_with(request: Any, ticket: Ticket, num_lookahead: int) -> int | TicketError:
    """Tokens of the ticket's prefix that a prompt shares: all, or up to one of its cuts."""
    most = request.num_prompt_tokens - num_lookahead
    ends = (*ticket.cuts, TicketCut(ticket.num_tokens, ticket.prompt))
    short = [end for end in ends if end.num_tokens <= most]
    if not short:
        return TicketError("remote_num_tokens", f"at most {most}", ends[0].num_tokens)
    digests = prefix_digests(request, [end.num_tokens for end in short])
    for end, digest in zip(reversed(short), reversed(digests), strict=True):
        if end.digest == digest:
            return end.num_tokens
    return TicketError("pdconn.prompt", digests[-1], short[-1].digest)
