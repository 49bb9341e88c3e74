"""A prefill engine of vLLM's own scheduler whose requests are followed while it computes them.

::

    vLLM's scheduler ─► our scheduler's half ─► InlineLender ── opened, grown, completed ──► readers
         ▲                                          ▲
         └── loads, as the law draws                └── follow, confirm, done, as the law draws
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Completed,
    Confirm,
    Confirmed,
    Done,
    Follow,
    FromLender,
    Granted,
    Grown,
    Hello,
    Opened,
    Reader,
    Refused,
    Renew,
)
from pdconn.protocol.ticket import BlockList, Ticket
from tests.fakes.scripted.lender import Session
from tests.vllm.lends.prefilling import CLOCK, Prefilling, prefill_config
from tests.vllm.patches.known_tokens import place, token
from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS, KVConnectorOutput

CHUNK = 2 * BLOCK_TOKENS + 5
"""Tokens of a step: blocks are written by one step, or by two."""


@dataclass(slots=True, eq=False)
class Follower:
    """A reader of a stream, and what it was sent.

    Attributes:
        first: first token of the prompt that it expects.
        announced: blocks by position.
        ticket: with blocks once the stream is complete.
        until: it believes its claim until then.
        is_refused: the lender has ended the stream, or has refused the claim.
        is_revoked: the engine has taken back what was lent until then.
        is_over: it has confirmed, has left, or its boot is over.
    """

    stream: str
    first: int
    session: Session
    reader: Reader
    announced: list[int] = field(default_factory=list)
    ticket: Ticket | None = None
    until: float = 0.0
    is_complete: bool = False
    is_refused: bool = False
    is_revoked: bool = False
    is_over: bool = False

    @property
    def believes(self) -> bool:
        """Whether it relies on what was announced."""
        ended = self.is_refused or self.is_revoked or self.is_over
        return not ended and self.until > CLOCK()


class Followed(Prefilling):
    """One prefill engine, and the readers of its streams.

    Args:
        is_async: whether it schedules a step while another one is in flight.
        caches: whether it caches prefixes.

    Attributes:
        loads: tokens at the beginning of a prompt that are loaded, by request; all of its blocks
            once it was preempted, since a store has them by then.
        loading: requests for which a load was promised since the last one came.
        written: tokens up to which a request's own steps have written, and its preemptions by then.
    """

    def __init__(self, *, is_async: bool, caches: bool) -> None:
        super().__init__(_config(is_async, caches))
        self.scheduler.max_num_scheduled_tokens = CHUNK
        # As in engines that load: blocks are free once no step in flight writes to them.
        self.scheduler.defer_block_free = True
        self.followers: list[Follower] = []
        self.loads: dict[str, int] = {}
        self.loading: dict[str, Any] = {}
        self.written: dict[str, tuple[int, int]] = {}
        self._preemptions: list[dict[str, int]] = []
        connector = self.engine.connector
        hit = connector.get_num_new_matched_tokens

        def matched(request: Any, num_local: int) -> tuple[int | None, bool]:
            once = self.loads.get(request.request_id, 0)
            whole = (request.num_prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            until = whole if once and request.num_preemptions else once
            if until <= num_local:
                found: tuple[int | None, bool] = hit(request, num_local)
                return found
            self.loading[request.request_id] = request
            return until - num_local, True

        connector.get_num_new_matched_tokens = matched

    # Steps

    def schedule(self) -> None:
        """One step more is in flight; the lender's thread has its turn meanwhile."""
        super().schedule()
        self.turn()
        preempted = {one.name: one.request.num_preemptions for one in self.memory.passes[-1]}
        self._preemptions.append(preempted)

    def process(self, reports: KVConnectorOutput | None = None) -> None:
        """The oldest step has run, and reports; then the lender has its turn."""
        step, before = self.memory.passes[0], self._preemptions.pop(0)
        super().process(reports or KVConnectorOutput())
        for one in step:
            if one.request.num_preemptions == before[one.name]:
                self.written[one.name] = one.tokens.stop, before[one.name]
        self.turn()

    def bring(self) -> None:
        """What the waiting requests load has come, with the oldest step."""
        waiting = self.loading_now()
        self.loading.clear()
        for name, request in waiting.items():
            # vLLM counts what is loaded as computed from the start of the load on.
            num_loaded = 0 if request.is_finished() else request.num_computed_tokens
            for at in range(num_loaded):
                self.memory.write(0, place(self.blocks(name), at), token(request, at))
        self.process(KVConnectorOutput(finished_recving=set(waiting)))

    def loading_now(self) -> dict[str, Any]:
        """Requests whose blocks wait for what they load; those that were aborted wait as well."""
        return {
            name: request
            for name, request in self.loading.items()
            if name in self.scheduler.requests
            and (request.is_finished() or request.status.name == "WAITING_FOR_REMOTE_KVS")
        }

    @contextmanager
    def without_blocks(self) -> Iterator[None]:
        """All free blocks are others' meanwhile."""
        others = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        yield
        self.pool.free_blocks(others)

    def turn(self) -> None:
        """As that of :class:`Prefilling`; readers are sent what the lender has for them."""
        super().turn()
        for one in self.followers:
            self._hear(one, one.session.replies)
            one.session.replies.clear()

    def begin_boot(self) -> None:
        """As that of :class:`Prefilling`; readers lose their connections."""
        super().begin_boot()
        for one in getattr(self, "followers", ()):
            one.is_over = True

    # Readers

    def follow(self, stream: str, first: int) -> Follower:
        """A reader comes, with the early ticket of a stream."""
        session, number = Session("reader"), len(self.followers)
        one = Follower(stream, first, session, Reader(f"d/f{number}", 0, 1))
        self.followers.append(one)
        hello = Hello(PROTOCOL_VERSION, "d", f"boot-{self.boot}")
        self._hear(one, self.lender.say(session, hello, Follow(1, stream, one.reader)))
        return one

    def confirm_follower(self, one: Follower) -> bool:
        """A reader has read all; whether it was lent until now."""
        assert one.ticket is not None
        ticket, one.is_over = one.ticket, True
        message = Confirm(7, ticket.request_id, one.reader, ticket.digest())
        answers = self.lender.say(one.session, message)
        return any(isinstance(answer, Confirmed) for answer in answers)

    def renew(self, one: Follower) -> None:
        """A reader asks for more time; its claim may have expired, or its lease ended."""
        assert one.ticket is not None
        message = Renew(8, one.ticket.request_id, one.reader)
        self._hear(one, self.lender.say(one.session, message))

    def leave(self, one: Follower) -> None:
        """A reader does without."""
        one.is_over = True
        name = one.stream if one.ticket is None else one.ticket.request_id
        self.lender.say(one.session, Done(name, one.reader, b"e" * 16))

    def _hear(self, one: Follower, messages: Iterable[FromLender]) -> None:
        for message in messages:
            if isinstance(message, Opened):
                header = message.num_tokens, message.prompt
                one.ticket = Ticket(
                    "p", f"boot-{self.boot}", message.request, self.side.tickets.host, 1, *header,
                    (), adapter=message.adapter,
                )  # fmt: skip
            elif isinstance(message, Granted):
                one.until = CLOCK() + message.ttl_ms / 1000
            elif isinstance(message, Refused):
                one.is_refused = True
            elif isinstance(message, Grown):
                for grown in message.blocks:
                    assert grown.first == len(one.announced), f"{one}: {grown} is out of order"
                    one.announced += grown.ids
            elif isinstance(message, Completed):
                assert one.ticket is not None
                [(first, ids)] = message.blocks
                assert list(ids[: len(one.announced)]) == one.announced, f"{one}: {message}"
                ticket = one.ticket
                one.ticket = Ticket(
                    ticket.engine_id, ticket.incarnation, ticket.request_id, ticket.host,
                    ticket.port, ticket.num_tokens, ticket.prompt, (BlockList(first, ids),),
                    adapter=ticket.adapter,
                )  # fmt: skip
                one.is_complete, one.announced = True, list(ids)

    def wrong_blocks(self, one: Follower) -> list[int]:
        """Blocks that were announced to a reader, and hold something else than its prompt."""
        last = len(one.announced) * BLOCK_TOKENS
        if one.is_complete and one.ticket is not None:
            last = min(last, one.ticket.num_tokens)
        table = tuple(one.announced)
        return [
            table[at // BLOCK_TOKENS]
            for at in range(last)
            if self.memory.read(place(table, at)) != (one.first, at)
        ]


_CONFIGS: dict[tuple[bool, bool], Any] = {}


def _config(is_async: bool, caches: bool) -> Any:
    """Made once, since it takes vLLM long."""
    if (is_async, caches) not in _CONFIGS:
        made = prefill_config(is_async=is_async, policy="recompute")
        made.cache_config.enable_prefix_caching = caches
        _CONFIGS[is_async, caches] = made
    return _CONFIGS[is_async, caches]
