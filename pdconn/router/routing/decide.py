"""The decision for one request: tokens of its prompt, prefix hits, loads, then the policy.

    request ──► tokens ──► hashes ──► hits ──┐
                engines' metrics ──► loads ──┼──► policy ──► engines to try
              requests in flight ────────────┘

A policy that ignores prompts gets engines and loads only.  A request whose prompt cannot be
tokenized or looked up is routed without prefix hits; only a prompt longer than its model's length
is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from pdconn.router.events.caches import PrefixCaches, PrefixLookup, RankHit
from pdconn.router.fleet.engine_page import Load
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.loads import LoadPoller
from pdconn.router.fleet.member import Role
from pdconn.router.openai.requests import asking, count_ids, text
from pdconn.router.openai.session_orders import SessionName
from pdconn.router.prefix.hashing import BadInput
from pdconn.router.prefix.score import NO_HIT, Hit
from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.pulls.pull_choice import Holder
from pdconn.router.routing.decision_log import DecisionLog
from pdconn.router.routing.models import CannotTokenise
from pdconn.router.routing.policy import (
    TIE_TOKENS,
    TOKENS_PER_DECODE_REQUEST,
    Candidate,
    Decision,
    Policy,
    Ranking,
    RouteQuery,
)
from pdconn.router.routing.request_events import Failed
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.routing.session_table import SessionTable
from pdconn.router.routing.tokenize import Tokenised, Tokeniser

_BAD_REQUEST = 400
BYTES_A_TOKEN = 4
"""Bytes per token, to estimate the tokens of text that was not tokenized."""
MOST_GUESSED = 32_768
"""Limit of that estimate in tokens: a body with pictures is long, its prompt is not."""
MAX_REASON = 200
"""Maximum characters of the reason for no lookup, which may contain client data."""
BEGINNING_TOKENS = 256
"""Prompts with this prefix in common go to the same engine, all else being equal."""
LOAD_FOR_S = 5.0
"""Seconds for which an engine's reported load counts."""
TRUSTED_FROM = 0.9
"""An engine that reports at least this share of its predicted hits is fully trusted."""
TRUST_STEP = 0.2
"""Weight of one request in the trust in its engine."""
JUDGED_FROM = 64
"""Predicted tokens below which a difference does not change the trust."""


@dataclass(slots=True)
class RequestRouter:
    """Decides where requests go, and keeps the last decisions.

    Attributes:
        trust: by engine, the share of its predicted hits that it recently reported as cached; the
            predicted hits of an engine with less trust count less.
        since: by engine, when it joined the fleet, in seconds since the epoch: earlier decisions do
            not apply to it.
        decodes_alone: whether decode computes prompts while no prefill engine answers; False: such
            requests are refused.
        pulls: plans pulls of prefixes between engines; None: prefill computes uncached tokens.
        turn: position in the rotation of equally loaded engines in ``by_load``.
        sessions: that clients have named.
    """

    engines: EngineRegistry
    policy: Policy
    caches: PrefixCaches
    tokeniser: Tokeniser
    loads: LoadPoller
    decisions: DecisionLog = field(default_factory=DecisionLog)
    trust: dict[str, float] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    decodes_alone: bool = True
    pulls: PullPlanner | None = None
    turn: int = -1
    sessions: SessionTable = field(default_factory=SessionTable)

    async def decide(self, request: RoutedRequest) -> Decision:
        """Choose the engines to try for a request.

        Raises:
            BadBody: the prompt is longer than the model's length.
        """
        began = time.perf_counter()
        tokenised, lookup, unknown = await self._look_up(request)
        prefill = self.eligible(Role.PREFILL, request)
        decode = self.eligible(Role.DECODE, request)
        query = _query(request, tokenised, bool(prefill) or not self.decodes_alone)
        loads = self.loads.fresh(LOAD_FOR_S)
        computing = [self._candidate(name, lookup, loads) for name in prefill]
        if lookup is None and request.session is not None:
            computing = self._hinted(request.session.session, query.num_tokens, computing)
        if tokenised is not None and query.can_hand_over:
            changing = self.engines.between_roles(request.serving)
            holders = self._holders(lookup, loads, dict.fromkeys((*prefill, *decode, *changing)))
            computing = self._with_pulls(request, tokenised, computing, holders)
        ranking = self.policy.decide(
            query, computing, [self._candidate(name, lookup, loads) for name in decode]
        )
        if ranking.alone:
            request.tokens = None
        decision = Decision(
            request.request_id,
            time.time(),
            self.policy.name,
            query.num_tokens,
            ranking,
            lookup,
            unknown,
            time.perf_counter() - began,
            query.is_guess,
        )
        self.decisions.add_decision(decision)
        return decision

    def eligible(self, role: Role, request: RoutedRequest) -> tuple[str, ...]:
        """The engines that may get a request now; resting ones only if there is no other.

        Decode computes a prompt rather than wait for a resting prefill engine, if allowed.
        """
        # 1. Engines that are up, do not rest, and have not failed this request.
        serving = request.may_serve(role)
        awake = self.engines.awake(role, serving, time.monotonic())
        found = _not_failed(role, request, awake)
        if found or (role is Role.PREFILL and self.decodes_alone):
            return found
        # 2. Resting ones too, since there is no other.
        return _not_failed(role, request, self.engines.live(role, serving))

    async def is_shorter(self, engine: str, status: int, request: RoutedRequest) -> bool:
        """Whether an engine may have refused a prompt for its length that another one accepts."""
        if status != _BAD_REQUEST:
            return False
        models = await self.tokeniser.models.view_for(asking(request.headers))
        name = text(request.body.fields.get("model"))
        ours, longest = models.max_tokens_at(engine, name), models.max_tokens(name)
        return ours is not None and longest is not None and ours < longest

    def by_load(self, engines: Iterable[str]) -> list[str]:
        """Engines with the fewest requests first, for requests not routed by their prompt.

        Equally loaded engines take turns, and resting ones come last.
        """
        names, now = list(engines), time.monotonic()
        if names:
            self.turn = (self.turn + 1) % len(names)
            names = names[self.turn :] + names[: self.turn]
        is_resting = partial(self.engines.rests.is_resting, now=now)
        busy = self.loads.requests_at
        return sorted(names, key=lambda name: (is_resting(name), busy(name, LOAD_FOR_S)[0]))

    def not_found(self, engine: str) -> int | None:
        """Prompt tokens that an engine's cache did not hold; None while its page is unknown."""
        load = self.loads.fresh(LOAD_FOR_S).get(engine)
        return None if load is None else load.not_found

    def no_choice(self, request: RoutedRequest, why: str) -> Decision:
        """The record of a request that needs no choice."""
        query = _query(request, None, False)
        decision = Decision(
            request.request_id,
            time.time(),
            self.policy.name,
            query.num_tokens,
            Ranking((), (), why=why),
            unknown=why,
            is_guess=query.is_guess,
        )
        self.decisions.add_decision(decision)
        return decision

    async def _look_up(
        self, request: RoutedRequest
    ) -> tuple[Tokenised | None, PrefixLookup | None, str | None]:
        """The prompt's tokens and hits, or the reason why there are none."""
        if not self.policy.looks_at_prompts:
            return None, None, f"{self.policy.name} does not look at prompts"
        if not self.caches.feeds:
            return None, None, "no engine publishes KV events"
        tokenised = None
        try:
            tokenised = await self.tokeniser.tokenise(request)
            lookup = await self.caches.lookup_in_turns(tokenised.tokens, tokenised.extras)
        except (CannotTokenise, BadInput) as error:
            return tokenised, None, str(error)[:MAX_REASON]
        return tokenised, lookup, None

    def fleet_changed(self) -> None:
        """Forget engines that left the fleet."""
        now = time.time()
        self.tokeniser.models.fleet_changed()
        self.since = {engine: self.since.get(engine, now) for engine in self.engines.names}
        if self.pulls is not None:
            self.pulls.keep_engines(self.engines.names)
        for engine in [engine for engine in self.trust if engine not in self.engines]:
            del self.trust[engine]

    def prefill_reported(self, decision: Decision, prefill: str, cached_tokens: int) -> None:
        """Update the trust: prefill has reported how many prompt tokens its cache held."""
        promised = decision.promised_tokens(prefill)
        if promised >= JUDGED_FROM:
            kept = min(1.0, cached_tokens / promised)
            before = self.trust.get(prefill, 1.0)
            self.trust[prefill] = before + TRUST_STEP * (kept - before)

    def _trusted(self, engine: str, hit: Hit) -> Hit:
        trust = self.trust.get(engine, 1.0)
        if trust >= TRUSTED_FROM:
            return hit
        counts = (hit.blocks, hit.tokens, hit.kept_tokens, hit.loaded_tokens)
        blocks, tokens, kept, loaded = (int(n * trust) for n in counts)
        return Hit(blocks, tokens, hit.score * trust, kept, loaded)

    def _candidate(
        self, engine: str, lookup: PrefixLookup | None, loads: Mapping[str, Load]
    ) -> Candidate:
        ranks = () if lookup is None else lookup.ranks.get(engine, ())
        hit, rank = self._best_rank(engine, ranks)
        hit = self._trusted(engine, hit)
        load = loads.get(engine) or Load()
        _, our_tokens = self.loads.inflight.requests_at(engine)
        num_requests, num_others = self.loads.requests_at(engine, LOAD_FOR_S)
        usage, idle = load.kv_usage or 0.0, num_requests == 0
        return Candidate(
            engine,
            hit,
            rank,
            our_tokens,
            num_requests,
            num_others,
            self.loads.usage.note_share(engine, usage, idle=idle, now=time.monotonic()),
            kept_share=load.kept_share or 0.0,
        )

    def _hinted(
        self, session: SessionName, num_tokens: int, candidates: list[Candidate]
    ) -> list[Candidate]:
        """The candidates; those that keep the session count as if they held that much of it."""
        # Only where caches are unknown: a session's name proves nothing about its prompt.
        hinted = []
        for one in candidates:
            kept = min(self.sessions.tokens_kept_at(session, one.engine), num_tokens)
            hinted.append(replace(one, hit=Hit(0, kept, float(kept), kept)) if kept else one)
        return hinted

    def _holders(
        self, lookup: PrefixLookup | None, loads: Mapping[str, Load], live: Iterable[str]
    ) -> list[Holder]:
        """The tokens of the prefix in each engine's own memory, for the planner of pulls."""
        if lookup is None or self.pulls is None:
            return []
        found = []
        for engine in live:
            ranks = lookup.ranks.get(engine, ())
            best = max(ranks, key=lambda one: one.hit.own_tokens, default=None)
            if best is None or self.trust.get(engine, 1.0) < TRUSTED_FROM:
                continue
            waiting = (loads.get(engine) or Load()).waiting or 0
            rank = best.rank if self.caches.has_several_ranks(engine) else None
            found.append(Holder(engine, best.hit.own_tokens, rank, waiting))
        return found

    def _with_pulls(
        self,
        request: RoutedRequest,
        tokenised: Tokenised,
        candidates: list[Candidate],
        holders: list[Holder],
    ) -> list[Candidate]:
        """The candidates with their pulls; the request keeps its tokens if any would pull."""
        if self.pulls is None or not holders:
            return candidates
        num_tokens, now = len(tokenised.tokens), time.monotonic()
        choose = partial(self.pulls.choose, num_tokens=num_tokens, holders=holders, now=now)
        planned = []
        for one in candidates:
            pull = choose(one.engine, held=one.hit.own_tokens, stored=one.hit.loaded_tokens)
            planned.append(replace(one, pull=pull))
        if any(one.pull is not None and one.pull.holder is not None for one in planned):
            request.tokens = tokenised.tokens
        return planned

    def _best_rank(self, engine: str, ranks: tuple[RankHit, ...]) -> tuple[Hit, int | None]:
        """The hit of an engine's best rank, and the rank that the request should name.

        A rank is named only if its hit is longer than the worst one's: otherwise the engine chooses
        better by the load of its ranks.
        """
        if not ranks:
            return NO_HIT, None
        best = max(
            ranks,
            key=lambda one: (
                one.hit.weighed_tokens
                - TOKENS_PER_DECODE_REQUEST * self.loads.inflight.at_rank(engine, one.rank)
            ),
        )
        gained = best.hit.weighed_tokens - ranks[-1].hit.weighed_tokens
        return best.hit, best.rank if len(ranks) > 1 and gained >= TIE_TOKENS else None


def _not_failed(role: Role, request: RoutedRequest, engines: tuple[str, ...]) -> tuple[str, ...]:
    if request.last(Failed) is None:  # nearly all requests
        return engines
    return tuple(name for name in engines if not request.has_failed_at(name, role))


def _query(request: RoutedRequest, tokenised: Tokenised | None, has_prefill: bool) -> RouteQuery:
    body, order = request.body, request.session
    can_hand_over = has_prefill and body.direct is None
    is_kept = order is not None and bool(order.keep_s)
    if tokenised is None:
        prompt = memoryview(body.fields.get(body.route.prompt) or b"")
        counted = count_ids(prompt)
        guess = min(len(prompt) // BYTES_A_TOKEN, MOST_GUESSED)
        return RouteQuery(
            guess if counted is None else counted,
            bytes(prompt[:BEGINNING_TOKENS]),
            can_hand_over,
            is_guess=counted is None,
            is_kept=is_kept,
        )
    first = list(tokenised.tokens[:BEGINNING_TOKENS])
    beginning = msgspec.json.encode(first) + repr(tokenised.extras).encode()
    return RouteQuery(len(tokenised.tokens), beginning, can_hand_over, is_kept=is_kept)
