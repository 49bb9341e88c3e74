"""A prefill engine of vLLM's own scheduler, whose lender takes turns when the law says so.

::

    vLLM's scheduler ─► our scheduler's half ─► InlineLender ◄─ claims, renewals, confirmations
                                                     │            of readers, as the law draws
    tokens of lent blocks ◄── confirmed ◄────────────┘
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Confirm,
    Confirmed,
    Done,
    Granted,
    Hello,
    RankGeometry,
    Reader,
    Renew,
    Welcome,
)
from pdconn.protocol.ticket import Ticket, parse_ticket
from pdconn.vllm.lends.lending import Lending
from tests.fakes.pair import Cache
from tests.fakes.scripted.lender import InlineLender, Session
from tests.vllm.patches.known_tokens import KnownTokens, blocks_of, place
from tests.vllm.patches.vllm_scheduler import (
    BLOCK_TOKENS,
    Engine,
    KVConnectorOutput,
    Request,
    engine_config,
    transfer_config,
)
from transport.testing.inprocess.faults import ManualClock

LEASE_S = 3.0
CLOCK = ManualClock(1000.0)
"""Of every engine: it only goes on."""


def prefill_config(*, is_async: bool = True, **more: Any) -> Any:
    """Of an engine that lends; ``more`` goes into its ``KVTransferConfig``."""
    extra = {"side_channel_host": "127.0.0.1", "side_channel_port": 1}
    transfer = transfer_config("kv_producer", kv_lease_duration=LEASE_S, **extra, **more)
    return engine_config(transfer, is_async=is_async)


class VirtualTime:
    """The module ``time`` of an engine's thread that waits for its lender."""

    engine: Prefilling | None = None

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return CLOCK()

    def sleep(self, seconds: float) -> None:
        """The lender's thread has its turn meanwhile."""
        CLOCK.advance(seconds)
        if self.engine is not None:
            self.engine.turn()


TIME = VirtualTime()


@dataclass(slots=True)
class Lent:
    """A ticket that a client was given.

    Attributes:
        first: first token of its prompt.
        at: when it was given.
        is_revoked: a reset has taken it back.
    """

    ticket: Ticket
    first: int
    at: float
    is_revoked: bool = False


@dataclass(slots=True)
class Claimed:
    """A reader's claim: it believes it until ``until``."""

    lent: Lent
    session: Session
    reader: Reader
    until: float
    seq: itertools.count[int] = field(default_factory=lambda: itertools.count(2))


class Prefilling:
    """One prefill engine.

    Args:
        config: of vLLM; None for one that schedules asynchronously.
    """

    def __init__(self, config: Any = None) -> None:
        self.engine = Engine(prefill_config() if config is None else config)
        self.half = self.engine.connector._scheduler
        self.side: Lending = self.half.parts.lending
        self.side._clock = CLOCK
        self.scheduler = self.engine.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.memory = KnownTokens()
        self.boot = 0
        self.lent: list[Lent] = []
        self.claims: list[Claimed] = []
        self.refusals = 0
        self.stands_still = False
        TIME.engine = self
        self.begin_boot()

    @property
    def lender(self) -> InlineLender:
        """Of this boot."""
        made: Any = self.side._lender
        assert isinstance(made, InlineLender)
        return made

    def begin_boot(self) -> None:
        """Workers are registered, at the start and after a sleep."""
        self.boot += 1
        references = Cache("BHLNC", filled=False).references
        geometry = RankGeometry(0, 0, b"address", references)
        self.side.serve(Welcome.in_our_version("p", f"boot-{self.boot}", {}, (geometry,)))
        self.claims.clear()  # sessions end with their lender
        for lent in self.lent:
            lent.is_revoked = True

    def turn(self) -> None:
        """The lender has its turn, unless its thread stands still."""
        if not self.stands_still:
            self.lender.turn()

    # Requests and steps

    def arrive(self, name: str, first: int, num_tokens: int, params: Any) -> None:
        """A request comes; its client wants one token, as a router asks of prefill."""
        extra = {"kv_transfer_params": params} if params else None
        sampling = self.engine.sampling(extra_args=extra)
        sampling.max_tokens = 1 if params else 8
        tokens = list(range(first, first + num_tokens))
        self.scheduler.add_request(
            Request(name, tokens, sampling, None, block_hasher=self.engine._hasher)
        )

    def schedule(self) -> None:
        """One step more is in flight."""
        self.engine.schedule()
        self.memory.begin_step(self.scheduler, self.engine.in_flight[-1])

    def process(self, reports: KVConnectorOutput | None = None) -> None:
        """The oldest step has run; tickets go to clients."""
        firsts = {
            one.name: one.request.prompt_token_ids[0] for step in self.memory.passes for one in step
        }
        self.memory.end_step()
        for answer in self.engine.process(KVConnectorOutput() if reports is None else reports):
            params = answer.kv_transfer_params or {}
            if not params.get("do_remote_prefill"):
                continue
            ticket = parse_ticket(params)
            known = [one for one in self.lent if one.ticket == ticket and not one.is_revoked]
            for one in known:
                assert CLOCK() - one.at <= LEASE_S / 2, f"{one} is shared, and is about to end"
                assert one.ticket.request_id in self.side.pins, f"{one} is shared, and has ended"
                assert one.first == firsts[answer.request_id], f"{one} is shared, by another prompt"
            self.lent += [] if known else [Lent(ticket, firsts[answer.request_id], CLOCK())]

    def blocks(self, name: str) -> tuple[int, ...]:
        """Blocks that a request has now."""
        return blocks_of(self.scheduler, name)

    # Readers

    def claim(self, lent: Lent, ticket: Ticket) -> bool:
        """A reader claims what it was lent, as ``ticket`` says; whether it was granted."""
        session, reader = Session("reader"), Reader(f"d/{len(self.claims)}", 0, 1)
        hello = Hello(PROTOCOL_VERSION, "d", f"boot-{self.boot}")
        claim = Claim(1, ticket.request_id, reader, ticket.digest())
        *_, answer = self.lender.say(session, hello, claim)
        if not isinstance(answer, Granted):
            return False
        until = CLOCK() + answer.ttl_ms / 1000
        self.claims.append(Claimed(lent, session, reader, until))
        return True

    def renew(self, one: Claimed) -> None:
        """A reader asks for more time."""
        message = Renew(next(one.seq), one.lent.ticket.request_id, one.reader)
        [answer] = self.lender.say(one.session, message)
        if isinstance(answer, Granted):
            one.until = CLOCK() + answer.ttl_ms / 1000
        else:
            self.claims.remove(one)

    def confirm(self, one: Claimed) -> bool:
        """A reader has read all, and asks whether it was lent until now."""
        ticket = one.lent.ticket
        message = Confirm(next(one.seq), ticket.request_id, one.reader, ticket.digest())
        self.claims.remove(one)
        [answer] = self.lender.say(one.session, message)
        return isinstance(answer, Confirmed)

    def give_up(self, one: Claimed) -> None:
        """A reader does without."""
        ticket = one.lent.ticket
        self.claims.remove(one)
        self.lender.say(one.session, Done(ticket.request_id, one.reader, ticket.digest()))

    def is_intact(self, lent: Lent) -> bool:
        """Whether what was lent is in its blocks."""
        [blocks] = lent.ticket.blocks
        table = (0,) * blocks.first + blocks.ids
        tokens = range(blocks.first * BLOCK_TOKENS, lent.ticket.num_tokens)
        return all(self.memory.read(place(table, at)) == (lent.first, at) for at in tokens)

    def close(self) -> None:
        """End what it has of threads."""
        TIME.engine = None
        self.engine.close()
