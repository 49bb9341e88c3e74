"""Policies that rank engines for a request.  Pure: from known facts to an order of engines.

The router decides once per request and tries the engines of each role in that order, each once.
Engines that are down or draining are no candidates.

``PrefixAware`` computes the cost of each choice, in tokens that some engine has to compute before
this request is done, and takes the cheapest::

    prefill p            left(p) + queue(p) + 512 * others(p) + pressure(p) + keeping(p)
    decode d, hand-over  the cheapest prefill + 0.125 * pulled(d) + 64 * requests(d) + pressure(d)
    decode d, alone                       left(d) + 64 * requests(d) + pressure(d) + keeping(d)

    left      uncached tokens of the prompt, and a fraction of cached tokens on a slower medium,
              such as a store (by the hit's score per block); tokens that prefill would pull from
              another engine count as the tokens that it could compute in that time
    pulled    the same, except where states cut the hit: these are pulled in any case, so only
              tokens that full attention lacks count
    queue     tokens that this router sent there and that are not computed yet
    others    requests there that this router did not send
    requests  running and waiting: each request in a batch slows the others
    pressure  the engine runs out of blocks, lent blocks included: from 0 at a usage of 0.8 to four
              prompts at a usage of 1
    keeping   of a request that says ``keep``: left(p) once more, since it is what the engine keeps
              in addition: 0 times where nothing is kept, to four times where as much is kept as may
              be, so that older promises are broken.  A session grows where it is, so the price
              rises from the beginning.  Where decode breaks a promise, the next turn is pulled

The factors are the constants below, in that order.

Decode may serve a request alone if it holds a prefix, in its cache or a store, and has to compute
at most ``alone_below`` tokens.  Costs that differ by less than ``TIE_TOKENS`` count as equal.
Among equals, rendezvous hashing of the prompt's beginning decides: prompts that begin alike reach
the same engine before any event reports where they are cached, and routers agree without
communicating.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from typing import ClassVar, Protocol

from pdconn.router.events.caches import PrefixLookup
from pdconn.router.fleet.member import Role
from pdconn.router.prefix.score import NO_HIT, Hit
from pdconn.router.pulls.pull_choice import PullChoice

TOKENS_PER_FOREIGN_REQUEST = 512.0
"""Cost of a request at prefill from another router.  Guessed: a short prompt."""
TOKENS_PER_PULLED_TOKEN = 0.125
"""Cost of pulling a token; computing one costs 1.

Guessed, above the measured value: on two cores a hand-over of 3000 tokens took 0.07 to 0.08 of its
prefill (``docs/benchmarks.md``).
"""
TOKENS_PER_DECODE_REQUEST = 64.0
"""Cost of a request in decode's batch or queue.  Guessed."""
PRESSURE_FROM_USAGE = 0.8
"""Share of an engine's blocks in use above which pressure counts.  Guessed."""
PRESSURE_PROMPTS = 4.0
"""Prompts that pressure adds to the cost at a share of 1.  Guessed."""
TIE_TOKENS = 64.0
"""Costs that differ by less count as equal.  Guessed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could serve a request, with its state.

    Attributes:
        engine: base URL.
        hit: the hit of its best data-parallel rank.
        rank: that rank, if the request should name it; None leaves the choice to the engine.
        queued_tokens: prompt tokens that this router sent there and that are not computed yet.
        num_requests: running and waiting.
        num_others: of these, requests that this router did not send, by the engine's last report.
        kv_usage: share of its blocks in use, 0 to 1, lent blocks included.
        kept_share: of what it may keep for sessions, by its last report.
        pull: the planned pull of a part of the prefix from another engine.
    """

    engine: str
    hit: Hit = NO_HIT
    rank: int | None = None
    queued_tokens: int = 0
    num_requests: int = 0
    num_others: int = 0
    kv_usage: float = 0.0
    kept_share: float = 0.0
    pull: PullChoice | None = None

    @property
    def held_or_pulled(self) -> int:
        """Tokens of the prompt that the engine need not compute."""
        if self.pull is None or not self.pull.saved:
            return self.hit.tokens
        return self.hit.own_tokens + self.pull.saved


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """The facts about a request that a policy uses.

    Attributes:
        num_tokens: tokens of its prompt.
        is_guess: whether ``num_tokens`` is an estimate, as the prompt was not tokenized.
        beginning: equal for prompts that begin alike.
        can_hand_over: False for requests that decode has to serve alone, since they cannot use a
            ticket or no prefill engine is up.
        is_kept: whether it says ``keep``.
    """

    num_tokens: int
    beginning: bytes = b""
    can_hand_over: bool = True
    is_guess: bool = False
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate and the cost of choosing it, in tokens."""

    candidate: Candidate
    cost: float
    why: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """The engines to try, best first, and the reason.

    ``alone``: decode computes the rest of the prompt itself; prefill is skipped.
    """

    prefill: tuple[ScoredCandidate, ...]
    decode: tuple[ScoredCandidate, ...]
    alone: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for a request, and the facts that it used.

    Attributes:
        at: seconds since the epoch.
        policy: name of the policy.
        num_tokens: tokens of the prompt.
        is_guess: whether ``num_tokens`` is an estimate, as the prompt was not tokenized.
        ranking: the engines to try.
        lookup: the hits of its prefix; None without a lookup.
        unknown: the reason for no lookup.
        took_s: duration of the decision, tokenizing included.
    """

    request_id: str
    at: float
    policy: str
    num_tokens: int
    ranking: Ranking
    lookup: PrefixLookup | None = None
    unknown: str | None = None
    took_s: float = 0.0
    is_guess: bool = False

    @property
    def num_hashes(self) -> int:
        """Block hashes that the lookup keeps."""
        prompts = () if self.lookup is None else self.lookup.prompts.values()
        return sum(len(prompt.hashes) for prompt in prompts)

    def hit_tokens(self, engine: str | None) -> int:
        """The predicted hit in an engine's prefix cache."""
        best = None if self.lookup is None else self.lookup.best(engine)
        return 0 if best is None else best.hit.tokens

    def promised_tokens(self, prefill: str) -> int:
        """Tokens that ``prefill`` should report as cached; 0 if it chose among unequal ranks."""
        ranks = () if self.lookup is None else self.lookup.ranks.get(prefill, ())
        named = [
            one.candidate.rank for one in self.ranking.prefill if one.candidate.engine == prefill
        ]
        asked = [rank for rank in ranks if len(ranks) == 1 or rank.rank in named]
        return asked[0].hit.tokens if asked else 0


class Policy(Protocol):
    """Ranks the engines of both roles for one request."""

    name: ClassVar[str]
    looks_at_prompts: ClassVar[bool]
    """Whether prompts are tokenized and looked up in the engines' prefix caches."""

    def decide(
        self, query: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Ranking:
        """Every candidate of both roles, best first."""
        ...


def _unscored(candidates: Sequence[Candidate], why: str) -> tuple[ScoredCandidate, ...]:
    return tuple(ScoredCandidate(candidate, 0.0, why) for candidate in candidates)


@dataclass(slots=True)
class RoundRobin:
    """Engines take turns."""

    name: ClassVar[str] = "round-robin"
    looks_at_prompts: ClassVar[bool] = False
    _next: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))

    def decide(
        self, query: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Ranking:
        """The candidates of each role, rotated by one more than last time."""
        offered = prefill if query.can_hand_over else ()
        rotated = self._rotated(Role.PREFILL, offered), self._rotated(Role.DECODE, decode)
        return Ranking(*rotated, alone=not query.can_hand_over)

    def _rotated(self, role: Role, candidates: Sequence[Candidate]) -> tuple[ScoredCandidate, ...]:
        if not candidates:
            return ()
        first = self._next[role] % len(candidates)
        self._next[role] += 1
        return _unscored((*candidates[first:], *candidates[:first]), "round-robin")


@dataclass(slots=True)
class Random:
    """Random order: the baseline."""

    rng: random.Random = field(default_factory=random.Random)
    name: ClassVar[str] = "random"
    looks_at_prompts: ClassVar[bool] = False

    def decide(
        self, query: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Ranking:
        """The candidates of each role, shuffled."""
        offered = prefill if query.can_hand_over else ()
        return Ranking(
            self._shuffled(offered), self._shuffled(decode), alone=not query.can_hand_over
        )

    def _shuffled(self, candidates: Sequence[Candidate]) -> tuple[ScoredCandidate, ...]:
        return _unscored(self.rng.sample(candidates, len(candidates)), "random")


@dataclass(frozen=True, slots=True)
class PrefixAware:
    """The engine that holds the prompt's prefix, unless that costs more than it saves.

    ``alone_below``: a decode engine that lacks at most this many tokens serves alone.
    """

    alone_below: int = 256
    name: ClassVar[str] = "prefix"
    looks_at_prompts: ClassVar[bool] = True

    def decide(
        self, query: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Ranking:
        """The candidates of each role, cheapest first."""
        # 1. No ticket can serve it, or no prefill engine is up: decode computes the prompt.
        if not query.can_hand_over:
            decode_order = self._order(query, [_alone_cost(query, one) for one in decode])
            why = "decode has to serve it alone" if prefill else "no prefill engine is up"
            return Ranking((), decode_order, alone=True, why=why)
        prefill_order = self._order(query, [_prefill_cost(query, one) for one in prefill])
        prefill_cost = prefill_order[0].cost if prefill_order else 0.0
        decode_order = self._order(
            query,
            [
                _alone_cost(query, one)
                if self._may_serve_alone(query, one)
                else _hand_over_cost(query, one, prefill_cost)
                for one in decode
            ],
        )
        # 2. The cheapest decode engine holds nearly all of the prompt.
        if decode_order and self._may_serve_alone(query, decode_order[0].candidate):
            best = decode_order[0].candidate
            left = query.num_tokens - best.hit.tokens
            why = f"{best.engine} holds {best.hit.tokens} tokens and lacks {left}"
            return Ranking(prefill_order, decode_order, alone=True, why=why)
        # 3. Prefill computes the prompt.
        return Ranking(prefill_order, decode_order, why="handed over")

    def _may_serve_alone(self, query: RouteQuery, candidate: Candidate) -> bool:
        held = candidate.hit.tokens
        return held > 0 and query.num_tokens - held <= self.alone_below

    def _order(
        self, query: RouteQuery, scored: list[ScoredCandidate]
    ) -> tuple[ScoredCandidate, ...]:
        """Cheapest first; rendezvous hashing decides between equals.

        Equal means within ``TIE_TOKENS`` of the cheapest remaining one, so ties do not add up.
        """
        left = sorted(scored, key=lambda one: one.cost)
        if len(left) < 2:
            return tuple(left)
        # A key has 64 bytes, and prompts with one chat template agree in them: hash them first.
        key = blake2b(query.beginning).digest()
        affinity = cache(partial(_affinity, key))
        ordered: list[ScoredCandidate] = []
        while left:
            ties = [one for one in left if one.cost < left[0].cost + TIE_TOKENS]
            chosen = max(ties, key=lambda one: affinity(one.candidate.engine))
            ordered.append(chosen)
            left.remove(chosen)
        return tuple(ordered)


def _uncached(query: RouteQuery, candidate: Candidate) -> float:
    """Uncached tokens of the prompt; cached ones on a slower medium count in part."""
    return max(0.0, query.num_tokens - candidate.hit.weighed_tokens)


def _pulled(query: RouteQuery, candidate: Candidate) -> float:
    """Tokens that a pull brings."""
    return max(0.0, query.num_tokens - candidate.hit.weighed_beside_a_pull)


def _parts(query: RouteQuery, candidate: Candidate) -> dict[str, float]:
    """The uncached tokens, and the cost of loading or pulling the others, if any."""
    hit, pull = candidate.hit, candidate.pull
    if pull is not None and pull.saved:
        left = max(0.0, query.num_tokens - candidate.held_or_pulled)
        return {"uncached": left, "to pull": pull.cost}
    left = _uncached(query, candidate)
    loaded = min(left, max(0.0, hit.tokens - hit.weighed_tokens))
    parts = {"uncached": left - loaded}
    if loaded:
        parts["to load"] = loaded if pull is None or not hit.loaded_tokens else pull.load_cost
    return parts


def _pressure(query: RouteQuery, candidate: Candidate) -> float:
    over = max(0.0, candidate.kv_usage - PRESSURE_FROM_USAGE) / (1 - PRESSURE_FROM_USAGE)
    return PRESSURE_PROMPTS * over * query.num_tokens


def _keeping(query: RouteQuery, candidate: Candidate, lacked: float) -> dict[str, float]:
    """The cost of keeping what it lacks there, which others' promises may have to make room for."""
    cost = PRESSURE_PROMPTS * candidate.kept_share * lacked if query.is_kept else 0.0
    return {"to keep": cost} if cost else {}


def _sum(candidate: Candidate, parts: dict[str, float]) -> ScoredCandidate:
    why = " + ".join(f"{tokens:.0f} {what}" for what, tokens in parts.items())
    return ScoredCandidate(candidate, sum(parts.values()), why)


def _prefill_cost(query: RouteQuery, candidate: Candidate) -> ScoredCandidate:
    parts = {
        **_parts(query, candidate),
        "queued": candidate.queued_tokens,
        "of others": TOKENS_PER_FOREIGN_REQUEST * candidate.num_others,
        "pressure": _pressure(query, candidate),
        **_keeping(query, candidate, _uncached(query, candidate)),
    }
    return _sum(candidate, parts)


def _hand_over_cost(
    query: RouteQuery, candidate: Candidate, prefill_cost: float
) -> ScoredCandidate:
    parts = {
        "at prefill": prefill_cost,
        "pulled": TOKENS_PER_PULLED_TOKEN * _pulled(query, candidate),
        "in the batch": TOKENS_PER_DECODE_REQUEST * candidate.num_requests,
        "pressure": _pressure(query, candidate),
    }
    return _sum(candidate, parts)


def _alone_cost(query: RouteQuery, candidate: Candidate) -> ScoredCandidate:
    parts = {
        **_parts(query, candidate),
        "in the batch": TOKENS_PER_DECODE_REQUEST * candidate.num_requests,
        "pressure": _pressure(query, candidate),
        **_keeping(query, candidate, _uncached(query, candidate)),
    }
    return _sum(candidate, parts)


def _affinity(key: bytes, engine: str) -> bytes:
    return blake2b(engine.encode(), key=key, digest_size=8).digest()


POLICIES = {kind.name: kind for kind in (PrefixAware, RoundRobin, Random)}
"""Policies by the names of ``--policy``."""
