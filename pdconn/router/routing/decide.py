"""Deciding for one request: its tokens, where its prefix is, how busy everybody is.

    request ──► tokens ──► hashes ──► hits ──┐
                engines' metrics ──► loads ──┼──► policy ──► who to try
                  what we sent ──► flights ──┘

A policy that does not look at prompts is given names and loads at once.  Nothing here
refuses a request: what cannot be found out about its prompt is routed without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdconn.router.events.caches import PrefixCaches, PrefixLookup, RankHit
from pdconn.router.fleet.loads import Load, LoadPoller
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.openai.requests import Exchange
from pdconn.router.prefix.hashing import BadInput
from pdconn.router.prefix.score import NO_HIT, Hit
from pdconn.router.routing.decision_log import DecisionLog, RouteRecord
from pdconn.router.routing.inflight import InflightTracker
from pdconn.router.routing.kv_usage import KvUsage
from pdconn.router.routing.metrics import RoutingMetrics
from pdconn.router.routing.policy import TIE, TURN, Candidate, Policy, Role, RouteQuery
from pdconn.router.routing.tokenize import CannotTokenise, Tokenised, Tokeniser

log = logging.getLogger(__name__)

BYTES_A_TOKEN = 4
"""Of a body whose tokens nobody has counted."""
MOST_GUESSED = 32_768
"""Tokens that a body is taken for at most: one with pictures is long and its prompt is not."""
MAX_REASON = 200
"""Characters of why a prompt is not known: what clients send may be in it."""
BEGINNING_TOKENS = 256
"""Prompts that agree in these go to the same engine, all else being equal."""
LOAD_FOR_S = 5.0
"""How long an engine's word about its load is believed."""
TRUSTED_FROM = 0.9
"""An engine whose cache holds this share of what it said is believed as if it were all."""
TRUST_STEP = 0.2
"""How much one request changes the trust in its engine."""
JUDGED_FROM = 64
"""Predicted tokens below which a difference says nothing of an engine."""


@dataclass(slots=True)
class RequestRouter:
    """Decides, and remembers what it decided.

    Attributes:
        trust: by engine the share of its predicted hits that it reported as found, lately;
            an engine whose events promise what it does not hold is believed that much less.
        since: by engine when it came, in seconds since the epoch: what was decided before
            says nothing of it.
    """

    engines: EngineRegistry
    policy: Policy
    caches: PrefixCaches
    tokeniser: Tokeniser
    loads: LoadPoller
    metrics: RoutingMetrics
    flights: InflightTracker = field(default_factory=InflightTracker)
    decisions: DecisionLog = field(default_factory=DecisionLog)
    trust: dict[str, float] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    usage: KvUsage = field(default_factory=KvUsage)

    async def decide(self, exchange: Exchange) -> RouteRecord:
        """Who is to be tried for a request."""
        began = time.perf_counter()
        tokenised, looked, unknown = None, None, None
        if not self.policy.looks_at_prompts:
            unknown = f"{self.policy.name} does not look at prompts"
        elif not self.caches.feeds:
            unknown = "no engine tells what its prefix cache holds"
        else:
            try:
                tokenised = await self.tokeniser.tokenise(exchange)
                looked = self.caches.look_for(tokenised.tokens, tokenised.extras)
            except (CannotTokenise, BadInput) as error:
                unknown = str(error)[:MAX_REASON]
        question = _question(exchange, tokenised)
        loads = self.loads.fresh(LOAD_FOR_S)
        decision = self.policy.decide(
            question,
            [self._candidate(name, looked, loads) for name in self.engines.live(Role.PREFILL)],
            [self._candidate(name, looked, loads) for name in self.engines.live(Role.DECODE)],
        )
        course = RouteRecord(
            exchange.request_id,
            time.time(),
            self.policy.name,
            question.num_tokens,
            decision,
            looked,
            unknown,
            time.perf_counter() - began,
        )
        self.decisions.add(course)
        self.metrics.decided(course)
        return course

    def fleet_changed(self) -> None:
        """Forget engines that are gone."""
        now = time.time()
        self.since = {engine: self.since.get(engine, now) for engine in self.engines.names}
        self.usage.keep(self.engines.names)
        for engine in [engine for engine in self.trust if engine not in self.engines]:
            del self.trust[engine]

    def reported(self, course: RouteRecord) -> None:
        """Prefill has said what its cache held of a prompt."""
        self.metrics.reported(course)
        engine, promised = course.prefill, course.promised_tokens()
        if engine is None or course.cached_tokens is None or promised < JUDGED_FROM:
            return
        kept = min(1.0, course.cached_tokens / promised)
        before = self.trust.get(engine, 1.0)
        self.trust[engine] = before + TRUST_STEP * (kept - before)

    def _believed(self, engine: str, hit: Hit) -> Hit:
        trust = self.trust.get(engine, 1.0)
        if trust >= TRUSTED_FROM:
            return hit
        return Hit(int(hit.blocks * trust), int(hit.tokens * trust), hit.score * trust)

    def _candidate(
        self, engine: str, looked: PrefixLookup | None, loads: Mapping[str, Load]
    ) -> Candidate:
        ranks = () if looked is None else looked.ranks.get(engine, ())
        hit, rank = self._best_rank(engine, ranks)
        load = loads.get(engine) or Load()
        busy = (load.running or 0) + (load.waiting or 0)
        ours = self.flights.num_requests(engine)
        usage = load.kv_usage or 0.0
        return Candidate(
            engine,
            self._believed(engine, hit),
            rank,
            self.flights.num_tokens(engine),
            max(busy, ours),
            max(0, busy - ours),
            self.usage.hear(engine, usage, idle=max(busy, ours) == 0, now=time.monotonic()),
        )

    def _best_rank(self, engine: str, ranks: tuple[RankHit, ...]) -> tuple[Hit, int | None]:
        """A hit of an engine, and the rank to name for it.

        A rank is named only where that gains something: the engine knows better than we do
        which of its ranks has time.
        """
        if not ranks:
            return NO_HIT, None
        best = max(
            ranks,
            key=lambda one: one.hit.tokens - TURN * self.flights.at_rank(engine, one.rank),
        )
        gained = best.hit.tokens - ranks[-1].hit.tokens
        return best.hit, best.rank if len(ranks) > 1 and gained >= TIE else None


def _question(exchange: Exchange, tokenised: Tokenised | None) -> RouteQuery:
    request = exchange.request
    can_hand_over = request.direct is None
    if tokenised is None:
        prompt = memoryview(request.fields.get(request.route.prompt) or b"")
        guess = min(len(prompt) // BYTES_A_TOKEN, MOST_GUESSED)
        return RouteQuery(guess, bytes(prompt[:BEGINNING_TOKENS]), can_hand_over)
    beginning = repr((tokenised.tokens[:BEGINNING_TOKENS], tokenised.extras)).encode()
    return RouteQuery(len(tokenised.tokens), beginning, can_hand_over)
