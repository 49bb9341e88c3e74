"""Agents, a flood of one-off prompts, and the router's own decisions, in virtual time.

Of the router these are real: the policy ``prefix`` and the costs that it sees, the index of caches
fed by the engines' KV events, what is in flight, the table of sessions, and when a prefetch has its
turn.  HTTP and tokenizing are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
from multidict import CIMultiDict

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.subscriber import EventSource
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.loads import LoadPoller, LoadReading
from pdconn.router.fleet.member import Member, Role
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.openai.session_orders import SessionName, SessionOrder, SessionReports
from pdconn.router.prefix.hashing import NOTHING, HashScheme
from pdconn.router.prefix.kv_events import Batch, decode_batch
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Decision, PrefixAware
from pdconn.router.routing.request_events import TurnKept
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.routing.session_table import SessionTable
from pdconn.router.routing.tokenize import Tokenised
from tests.simulation.sessions.engine import HASHING, Answer, CacheSize, SessionEngine, Speed
from tests.simulation.world import NO_FAULTS, World

LOAD_EVERY_S = 1.0
LAG_S = 0.002
"""Between router and engine."""


@dataclass(frozen=True)
class Load:
    """What is asked of the fleet.

    Attributes:
        first, growth: tokens of a first prompt, and by which a turn grows, answer included.
        pause_s: shortest and longest.
        one_off: tokens of a prompt of the flood.
        at_once: prompts of the flood under way, for each prefill engine; 0 for no flood.
        spread_s: in which first turns begin.
        most_s: after so long what is not answered never will be.
        least_s: the flood goes on for so long, though all sessions have had their turns.
        keeps: whether turns say ``keep``.
        lead_s: a turn is prefetched so long before its pause ends; None: it is not.
    """

    sessions: int = 40
    turns: int = 20
    first: int = 8000
    growth: int = 400
    answer: int = 100
    pause_s: tuple[float, float] = (1.0, 20.0)
    one_off: int = 2048
    at_once: int = 2
    keeps: bool = False
    lead_s: float | None = None
    keep_s: float = 600.0
    spread_s: float = 20.0
    least_s: float = 0.0
    most_s: float = 3600.0


@dataclass(frozen=True)
class Shape:
    """Of the fleet.

    Attributes:
        publishes: whether engines publish KV events; else the router goes by its table of sessions.
    """

    prefill: int = 12
    decode: int = 4
    prefill_cache: CacheSize = field(default_factory=lambda: CacheSize(64, 2000))
    decode_cache: CacheSize = field(default_factory=lambda: CacheSize(64, 6250))
    speed: Speed = field(default_factory=Speed)
    prefill_step_s: float = 0.004
    alone_below: int = 256
    publishes: bool = True


@dataclass(frozen=True)
class Turn:
    """A turn of a session that was not its first.

    Attributes:
        earlier, new: tokens of its prompt that earlier turns had, with their answers; and others.
        computed: tokens of its prompt that an engine computed.
        first_s: to its first token.
        broken: whether its answer tells that promises were broken, or that one is refused.
        moved: whether prefill was asked that was not asked to keep it.
    """

    earlier: int
    new: int
    computed: int
    first_s: float
    broken: bool
    moved: bool

    @property
    def again(self) -> int:
        """Earlier tokens that an engine computed again."""
        return max(0, self.computed - self.new)

    @property
    def hit(self) -> float:
        """The share of earlier tokens that no engine computed again."""
        return 1 - self.again / self.earlier


@dataclass
class _Session:
    name: str
    tokens: list[int]
    left: int
    earlier: int = 0


class _Tokens:
    """The router's tokenizer: requests bring their tokens."""

    def __init__(self) -> None:
        self.models: Any = self
        self.of: dict[str, list[int]] = {}

    async def tokenise(self, request: RoutedRequest) -> Tokenised:
        return Tokenised(self.of[request.request_id], NOTHING)


class Fleet:
    """One run.

    Attributes:
        turns: later turns of all sessions.
        flooded: seconds at which prompts of the flood were answered; ``waits``: what they took.
        began_s, ended_s: of the run.
    """

    def __init__(self, shape: Shape, load: Load, seed: int = 0) -> None:
        self.world = World(seed, NO_FAULTS)
        self.shape, self.load = shape, load
        self.turns: list[Turn] = []
        self.flooded: list[float] = []
        self.waits: list[float] = []
        self.began_s = self.ended_s = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = itertools.count()
        self._tokens = itertools.count(1_000_000, 50_000)
        self._open = 0
        self._refused: set[str] = set()
        self.engines: dict[str, SessionEngine] = {}
        scheme = HashScheme(HASHING, shape.prefill_cache.block_tokens)
        members = self._start()
        registry = EngineRegistry.from_members(members)
        nobody: Any = None
        loads = LoadPoller(registry, nobody, clock=lambda: self.world.now)
        self._prompts = _Tokens()
        tokeniser: Any = self._prompts
        self.router = RequestRouter(
            registry,
            PrefixAware(shape.alone_below),
            PrefixCaches(scheme=scheme),
            tokeniser,
            loads,
            sessions=SessionTable(clock=lambda: self.world.now),
        )
        for member in members if shape.publishes else ():
            self._apply(member.url, Batch(0.0, []))

    def _start(self) -> list[Member]:
        members, shape = [], self.shape
        speeds = {
            Role.PREFILL: Speed(
                shape.speed.prefill_per_s, shape.speed.pulled_per_s, shape.prefill_step_s
            ),
            Role.DECODE: shape.speed,
        }
        for number in range(shape.prefill + shape.decode):
            role = Role.PREFILL if number < shape.prefill else Role.DECODE
            size = shape.prefill_cache if role is Role.PREFILL else shape.decode_cache
            member = Member(f"http://10.0.0.{number}:8000", frozenset((role,)))
            members.append(member)
            self.engines[member.url] = SessionEngine(
                self.world,
                member.url,
                size,
                speeds[role],
                is_prefill=role is Role.PREFILL,
                publish=partial(self._publish, member.url),
            )
        return members

    def _publish(self, engine: str, published: Any) -> None:
        if self.shape.publishes:
            self._apply(engine, decode_batch(self._encoder.encode(published)))

    def _apply(self, engine: str, batch: Batch) -> None:
        source = EventSource(engine, 0, f"tcp://{urlsplit(engine).hostname}:5557", None)
        self.router.caches.apply_batch(source, batch)

    def run(self) -> None:
        """Until every session has had its turns."""
        self._poll()
        begins = self.world.rng.uniform
        for number in range(self.load.sessions):
            tokens = self._fresh(self.load.first)
            session = _Session(f"agent {number}", tokens, self.load.turns)
            self._open += 1
            self.world.at(begins(0.0, self.load.spread_s), partial(self._turn, session))
        for _ in range(self.load.at_once * self.shape.prefill):
            self.world.at(begins(0.0, 0.1), self._flood)
        began = self.began_s = self.world.now
        while self._open or self.world.now < began + self.load.least_s:
            if self.world.now > began + self.load.most_s:
                break
            self.world.run(self.world.now + 1.0)
        self.ended_s = self.world.now

    @property
    def is_over(self) -> bool:
        """Whether every session has had its turns."""
        return not self._open

    def close(self) -> None:
        """End the engines."""
        for engine in self.engines.values():
            engine.close()

    def count(self, name: str) -> int:
        """A count of all engines together."""
        return sum(engine.counts[name] for engine in self.engines.values())

    # The router

    def _poll(self) -> None:
        for name, engine in self.engines.items():
            ours, _ = self.router.loads.inflight.requests_at(name)
            self.router.loads.latest[name] = LoadReading(engine.load(), self.world.now, ours)
        self.world.at(LOAD_EVERY_S, self._poll)

    def _decide(self, tokens: list[int], order: SessionOrder | None) -> Decision:
        name = f"r{next(self._numbers)}"
        # With events its tokens are looked up, and else counted.
        prompt = b"1" if self.shape.publishes else b"1" + b",1" * (len(tokens) - 1)
        body = parse_body(Route.COMPLETIONS, b'{"prompt": [%b]}' % prompt)
        request = RoutedRequest(name, CIMultiDict(), body, session=order)
        self._prompts.of[name] = tokens
        deciding = self.router.decide(request)
        try:
            while True:
                deciding.send(None)
        except StopIteration as end:
            decision: Decision = end.value
        del self._prompts.of[name]
        self.router.decisions.end_decision(decision, request.outcome())
        return decision

    def _ask(
        self,
        tokens: list[int],
        num_answer: int,
        order: SessionOrder | None,
        on_first: Callable[[], None],
        then: Callable[[int, list[int], str | None], None],
    ) -> None:
        """One request through the fleet; ``then`` gets the tokens computed, and the answer."""
        decision = self._decide(tokens, order)
        decode = decision.ranking.decode[0].candidate.engine
        inflight = self.router.loads.inflight

        def answered(computed: int, prefill: str | None) -> None:
            flight = inflight.start_request(decode, 0)

            def ended(answer: Answer) -> None:
                flight.finish()
                self._told(order, answer, decode, is_prefill=False)
                computed_here = 0 if prefill else len(tokens) - answer.cached
                then(computed + computed_here, answer.tokens, prefill)

            self.world.at(LAG_S, lambda: self.engines[decode].ask(
                tokens, num_answer, self._params(order, decode), ended,
                on_first=lambda answer: on_first(), pulled=prefill is not None,
            ))  # fmt: skip

        if decision.ranking.alone:
            answered(0, None)
        else:
            self._prefill(tokens, order, decision, answered)

    def _prefill(
        self,
        tokens: list[int],
        order: SessionOrder | None,
        decision: Decision,
        then: Callable[[int, str], None],
    ) -> None:
        candidate = decision.ranking.prefill[0].candidate
        engine = candidate.engine
        uncached = max(0, decision.num_tokens - candidate.held_or_pulled)
        flight = self.router.loads.inflight.start_request(engine, uncached)

        def ended(answer: Answer) -> None:
            flight.finish()
            self._told(order, answer, engine, is_prefill=True)
            self.router.prefill_reported(decision, engine, answer.cached)
            then(len(tokens) - answer.cached, engine)

        # The engine's blocks are lent by the simulation.  Marked as a prefetch, which has no part
        # in that either, its answer reports promises of other sessions that were broken.
        ours = {"prefetch": True, **(self._params(order, engine) or {"pdconn": {}})["pdconn"]}
        self.world.at(LAG_S, lambda: self.engines[engine].ask(tokens, 1, {"pdconn": ours}, ended))

    def _params(self, order: SessionOrder | None, engine: str) -> dict[str, Any] | None:
        keep = self.router.sessions.ask_to_keep(order, engine)
        return None if keep is None else {"pdconn": {"keep": keep}}

    def _told(
        self, order: SessionOrder | None, answer: Answer, engine: str, *, is_prefill: bool
    ) -> None:
        reports = msgspec.convert(answer.told, SessionReports)
        self.router.sessions.note_broken(engine, reports.broken)
        if order is None or reports.kept is None:
            return
        body = parse_body(Route.COMPLETIONS, b'{"prompt": [1]}')
        request = RoutedRequest("told", CIMultiDict(), body, session=order)
        self.router.sessions.saw(request, TurnKept(engine, reports.kept, is_prefill))
        if reports.kept.refused is not None:
            self._refused.add(order.session.name)

    # Agents

    def _order(self, session: _Session) -> SessionOrder:
        keep_s = self.load.keep_s if self.load.keeps else None
        return SessionOrder(SessionName("t", session.name), keep_s)

    def _turn(self, session: _Session) -> None:
        began, order = self.world.now, self._order(session)
        known = self.router.sessions.find_session(order.session)
        keepers = () if known is None else tuple(known.keepers)
        first_s: list[float] = []
        told: list[str] = []

        def first() -> None:
            first_s.append(self.world.now - began)
            told.extend(self.router.sessions.take_untold(order.session))

        def ended(computed: int, answer: list[int], prefill: str | None) -> None:
            if session.earlier:
                is_broken = bool(told) or session.name in self._refused
                moved = self.load.keeps and prefill is not None and prefill not in keepers
                new = len(session.tokens) - session.earlier
                turn = Turn(session.earlier, new, computed, first_s[0], is_broken, moved)
                self.turns.append(turn)
            self._refused.discard(session.name)
            session.left -= 1
            if not session.left:
                self._open -= 1
                return
            session.tokens += answer
            session.earlier = len(session.tokens)
            session.tokens += self._fresh(self.load.growth - len(answer))
            self._pause(session)

        self._ask(session.tokens, self.load.answer, order, first, ended)

    def _pause(self, session: _Session) -> None:
        pause_s = self.world.rng.uniform(*self.load.pause_s)
        if self.load.lead_s is not None:
            ahead = max(0.0, pause_s - self.load.lead_s)
            self.world.at(ahead, partial(self._prefetch, session))
        self.world.at(pause_s, partial(self._turn, session))

    def _prefetch(self, session: _Session) -> None:
        """As the router's: a request of one token, once those before it are computed."""
        tokens = list(session.tokens)
        order = self._order(session)
        decision = self._decide(tokens, order)
        engine = decision.ranking.prefill[0].candidate.engine
        waiting = self.router.loads.inflight.start_request(engine, 0)

        def go() -> None:
            waiting.finish()
            self._prefill(tokens, order, decision, lambda computed, engine: None)

        waiting.when_ahead(0, partial(self.world.at, 0.0, go))

    # The flood

    def _flood(self) -> None:
        began = self.world.now

        def ended(computed: int, answer: list[int], prefill: str | None) -> None:
            self.flooded.append(self.world.now)
            self.waits.append(self.world.now - began)
            self.world.at(0.0, self._flood)

        self._ask(self._fresh(self.load.one_off), 2, None, lambda: None, ended)

    def _fresh(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt has."""
        first = next(self._tokens)
        return list(range(first, first + num_tokens))
