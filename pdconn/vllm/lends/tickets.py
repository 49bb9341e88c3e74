"""Writes the tickets of an engine, and tracks which of them are lent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.protocol.messages import Welcome
from pdconn.protocol.ticket import Ticket, TicketCut, check_block_count, max_blocks_for, trimmed
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.identity.greeting import is_proven
from pdconn.vllm.lends.answers import BlockIds
from pdconn.vllm.patches.request_writes import num_computed, shorten
from pdconn.vllm.prompt import EMBEDDINGS, has_embeddings, parent_of, prompt_digest


@dataclass(slots=True)
class TicketWriter:
    """Writes the tickets of one engine.

    Attributes:
        engine_id: the engine's name.
        incarnation: this boot's name.
        host, port: where its side channel is reached.
        sizes: TP and PP size, for proxies.
        has_states: whether the model keeps recurrent states.
        num_lookahead: tokens at a prompt's end that decode computes, and prefill keeps windows for.
        proof_of_adapter: returns a request's adapter digest for its ticket.
        splits: which blocks are described to peers; tickets list those.
        is_proven: whether our weights are proven, so that their KV may be lent.
    """

    engine_id: str
    incarnation: str
    host: str
    port: int
    sizes: tuple[int, int]
    has_states: bool = False
    num_lookahead: int = 1
    proof_of_adapter: Callable[[Any], str] = lambda request: ""
    splits: Splits = UNSPLIT
    is_proven: bool = True
    _shortened: dict[str, str] = field(default_factory=dict)

    def begin_boot(self, welcome: Welcome, splits: Splits) -> None:
        """Write tickets for the incarnation of ``welcome`` from now on."""
        self.incarnation, self.splits = welcome.incarnation, splits
        self.is_proven = is_proven(welcome)

    def leave_last_token(self, request: Any) -> None:
        """Remove the last prompt token of a request for decode, if the model has states.

        The ticket has the digest of the whole prompt.
        """
        if (
            # Decode computes the last prompt token, to sample from it.  A recurrent state that has
            # processed that token would process it twice.
            self.has_states
            # Of a prompt of one token decode pulls nothing.
            and request.num_prompt_tokens > 1
            # Embeddings are not handed over.
            and request.prompt_token_ids is not None
            and not has_embeddings(request)
            # A session continues after its prompt.
            and not request.resumable
            # A preempted request is shortened already.
            and request.request_id not in self._shortened
            # Decode computes such a prompt itself.
            and not request.skip_reading_prefix_cache
        ):
            self._shortened[request.request_id] = prompt_digest(request)
            shorten(request, request.num_prompt_tokens - 1)

    def header_of(self, request: Any) -> tuple[int, str, str]:
        """What a request's ticket will say: tokens, and digests of the prompt and of its adapter.

        Raises:
            TicketError: there will be no ticket, or its adapter is not known yet.
        """
        if has_embeddings(request):
            raise TicketError("prompt", "token ids", "embeddings", EMBEDDINGS)
        prompt = self._prompt_digest(request)
        return request.num_prompt_tokens, prompt, self.proof_of_adapter(request)

    def _prompt_digest(self, request: Any) -> str:
        """The digest of the whole prompt, with the token that is left to decode."""
        return self._shortened.get(request.request_id) or prompt_digest(request)

    def forget_prompt(self, request_id: str) -> None:
        """Forget a request that leaves the engine."""
        self._shortened.pop(request_id, None)

    def write_ticket(
        self,
        request: Any,
        block_ids: BlockIds,
        prefix: tuple[int, str] | None = None,
        cuts: tuple[TicketCut, ...] = (),
    ) -> Ticket:
        """The ticket for a finished request: for its prompt, or for ``prefix`` (tokens, digest).

        Raises:
            TicketError: decode would refuse it.
        """
        if has_embeddings(request):
            raise TicketError("prompt", "token ids", "embeddings", EMBEDDINGS)
        blocks = tuple(trimmed(ids) for ids in self.splits.described(block_ids))
        most = max_blocks_for(request.num_prompt_tokens if prefix is None else prefix[0])
        check_block_count(sum(len(group.ids) for group in blocks), most)
        if prefix is None:
            num_tokens = min(num_computed(request), request.num_prompt_tokens)
            prefix = num_tokens, self._prompt_digest(request)
        return Ticket(
            self.engine_id,
            self.incarnation,
            request.request_id,
            self.host,
            self.port,
            *prefix,
            blocks,
            cuts,
            self.proof_of_adapter(request),
        )


class LentTickets:
    """Tickets that are lent, and those that the children of a best-of-n request share.

    vLLM makes a request of each answer (``n > 1``), and returns the ticket of the child that
    finishes last.  Which one that is, and how many there are, is unknown in the engine.  So the
    first child that finishes is lent, and its siblings, which have the same prompt, return its
    ticket.
    """

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}
        self._shared: dict[str, tuple[Ticket, float]] = {}

    @property
    def num_shared(self) -> int:
        """Tickets that children share."""
        return len(self._shared)

    def find_shared(self, request_id: str, prompt: str, now: float) -> Ticket | None:
        """The ticket of a sibling with the same prompt, unless it is too old to be shared."""
        parent = parent_of(request_id)
        if parent is None or parent not in self._shared:
            return None
        ticket, until = self._shared[parent]
        return ticket if ticket.prompt == prompt and now < until else None

    def share_ticket(self, ticket: Ticket, until: float) -> None:
        """Let siblings that finish before ``until`` share ``ticket``."""
        parent = parent_of(ticket.request_id)
        if parent is not None:
            self._shared[parent] = ticket, until

    def add_ticket(self, ticket: Ticket) -> None:
        """Record that ``ticket`` is lent."""
        self._digests[ticket.request_id] = ticket.digest()

    def is_lent(self, ticket: Ticket) -> bool:
        """Whether exactly this ticket is lent; clients can change a ticket."""
        return self._digests.get(ticket.request_id) == ticket.digest()

    def forget_ticket(self, request_id: str) -> None:
        """Forget the ticket of a freed lease."""
        self._digests.pop(request_id, None)
        parent = parent_of(request_id)
        if parent in self._shared and self._shared[parent][0].request_id == request_id:
            del self._shared[parent]
