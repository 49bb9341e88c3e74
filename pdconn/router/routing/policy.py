"""Which engines serve a request.  Pure: it is given what is known and returns an order.

The router decides once per request, tries the engines of each role in the order given,
and asks nobody twice.  An engine that is down or draining is not offered.

``PrefixAware`` counts what each choice costs, in tokens that some engine has to compute
before this request is done, and takes the cheapest::

    prefill p            left(p) + queue(p) + OTHERS * others(p) + pressure(p)
    decode d, handed     the cheapest prefill + PULL * left(d) + TURN * requests(d) + pressure(d)
    decode d, alone                                    left(d) + TURN * requests(d) + pressure(d)

    left      what is left of the prompt behind the engine's hit, which counts less on a slower
              medium (the hit's score beside its blocks)
    queue     tokens that this router gave it to compute and that are not done
    others    requests there that this router did not send
    requests  running and waiting: a request in a batch slows the others
    pressure  blocks run short, lent ones among them: up to PRESSURE prompts

Decode may serve alone where it holds a prefix and lacks no more than ``alone_below`` tokens.
Costs that differ by less than ``TIE`` tokens are equal; among those, a prompt goes where its
beginning always goes (rendezvous hashing), so prompts that begin alike meet before any event
tells where they lie, and routers that know of no other agree.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import ClassVar, Protocol

from pdconn.router.prefix.score import NO_HIT, Hit

TURN = 64.0
"""Tokens that a request in decode's batch or queue costs the next one."""
PULL = 0.125
"""What pulling a token costs beside computing it."""
OTHERS = 512.0
"""Tokens of a prompt that somebody else gave to prefill."""
TIE = 64.0
"""Tokens that are not worth another engine."""
PRESSURE_FROM = 0.8
"""Share of an engine's blocks in use from which it is avoided."""
PRESSURE = 4.0
"""How often a prompt's tokens are added at a share of 1."""


class Role(Enum):
    """What an engine is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could serve a request, and what is known of it.

    Attributes:
        engine: base URL.
        hit: what its prefix cache could serve, of its best data-parallel rank.
        rank: that rank; None where the engine has one only.
        queued_tokens: prompt tokens that this router gave it to compute and that are not done.
        num_requests: running and waiting there, as it says or as this router knows, if more.
        num_others: of those, requests that this router did not send.
        kv_usage: share of its blocks in use, 0 to 1; lent blocks are in use.
    """

    engine: str
    hit: Hit = NO_HIT
    rank: int | None = None
    queued_tokens: int = 0
    num_requests: int = 0
    num_others: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A request as a policy sees it.

    Attributes:
        num_tokens: of its prompt; an estimate where nobody has counted them.
        beginning: what prompts that begin alike have in common.
        can_hand_over: False for requests that decode has to serve alone anyway.
    """

    num_tokens: int
    beginning: bytes = b""
    can_hand_over: bool = True


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate and what choosing it costs, in tokens."""

    candidate: Candidate
    cost: float
    why: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Who is to be tried, best first, and why.

    ``alone``: decode computes what it lacks itself; prefill is not asked.
    """

    prefill: tuple[ScoredCandidate, ...]
    decode: tuple[ScoredCandidate, ...]
    alone: bool = False
    why: str = ""


class Policy(Protocol):
    """Orders the engines of both roles for one request."""

    name: ClassVar[str]
    looks_at_prompts: ClassVar[bool]
    """Whether it wants to know what each engine holds of the prompt."""

    def decide(
        self, question: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Decision:
        """Every candidate of both roles, best first."""
        ...


def _as_they_come(candidates: Sequence[Candidate], why: str) -> tuple[ScoredCandidate, ...]:
    return tuple(ScoredCandidate(candidate, 0.0, why) for candidate in candidates)


@dataclass(slots=True)
class RoundRobin:
    """Each engine in turn, whatever the request is."""

    name: ClassVar[str] = "round-robin"
    looks_at_prompts: ClassVar[bool] = False
    _turns: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))

    def decide(
        self, question: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Decision:
        """The candidates of each role, rotated by one more than last time."""
        given = prefill if question.can_hand_over else ()
        turns = self._turn(Role.PREFILL, given), self._turn(Role.DECODE, decode)
        return Decision(*turns, alone=not question.can_hand_over)

    def _turn(self, role: Role, candidates: Sequence[Candidate]) -> tuple[ScoredCandidate, ...]:
        if not candidates:
            return ()
        first = self._turns[role] % len(candidates)
        self._turns[role] += 1
        return _as_they_come((*candidates[first:], *candidates[:first]), "its turn")


@dataclass(slots=True)
class Random:
    """Any engine; what a router that knows nothing is compared with."""

    rng: random.Random = field(default_factory=random.Random)
    name: ClassVar[str] = "random"
    looks_at_prompts: ClassVar[bool] = False

    def decide(
        self, question: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Decision:
        """The candidates of each role, shuffled."""
        given = prefill if question.can_hand_over else ()
        return Decision(self._draw(given), self._draw(decode), alone=not question.can_hand_over)

    def _draw(self, candidates: Sequence[Candidate]) -> tuple[ScoredCandidate, ...]:
        return _as_they_come(self.rng.sample(candidates, len(candidates)), "drawn")


@dataclass(frozen=True, slots=True)
class PrefixAware:
    """Where the prompt's prefix is, unless that costs more than it saves.

    ``alone_below``: uncached tokens up to which decode that holds the others computes them.
    """

    alone_below: int = 256
    name: ClassVar[str] = "prefix"
    looks_at_prompts: ClassVar[bool] = True

    def decide(
        self, question: RouteQuery, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Decision:
        """The candidates of each role, cheapest first."""
        if not question.can_hand_over:
            decoding = self._order(question, [_alone_cost(question, one) for one in decode])
            return Decision((), decoding, alone=True, why="decode has to serve it alone")
        filling = self._order(question, [_prefill_cost(question, one) for one in prefill])
        before = filling[0].cost if filling else 0.0
        decoding = self._order(
            question,
            [
                _alone_cost(question, one)
                if self._may_serve_alone(question, one)
                else _handed_cost(question, one, before)
                for one in decode
            ],
        )
        if decoding and self._may_serve_alone(question, decoding[0].candidate):
            best = decoding[0].candidate
            left = question.num_tokens - best.hit.tokens
            why = f"{best.engine} holds {best.hit.tokens} tokens and lacks {left}"
            return Decision(filling, decoding, alone=True, why=why)
        return Decision(filling, decoding, why="handed over")

    def _may_serve_alone(self, question: RouteQuery, candidate: Candidate) -> bool:
        held = candidate.hit.tokens
        return held > 0 and question.num_tokens - held <= self.alone_below

    def _order(
        self, question: RouteQuery, weighed: list[ScoredCandidate]
    ) -> tuple[ScoredCandidate, ...]:
        """Cheapest first; of those within a tie the one where such prompts always go.

        The tie is with the cheapest that is left, so it does not add up along the list.
        """
        left = sorted(weighed, key=lambda one: one.cost)
        ordered: list[ScoredCandidate] = []
        while left:
            ties = [one for one in left if one.cost < left[0].cost + TIE]
            chosen = max(ties, key=lambda one: _affinity(question.beginning, one.candidate.engine))
            ordered.append(chosen)
            left.remove(chosen)
        return tuple(ordered)


def _left(question: RouteQuery, candidate: Candidate) -> float:
    """Tokens of the prompt that are left, those on a slower medium in part."""
    hit = candidate.hit
    worth = hit.score / hit.blocks if hit.blocks else 1.0
    return max(0.0, question.num_tokens - worth * hit.tokens)


def _pressure(question: RouteQuery, candidate: Candidate) -> float:
    over = max(0.0, candidate.kv_usage - PRESSURE_FROM) / (1 - PRESSURE_FROM)
    return PRESSURE * over * question.num_tokens


def _sum(candidate: Candidate, parts: dict[str, float]) -> ScoredCandidate:
    why = " + ".join(f"{tokens:.0f} {what}" for what, tokens in parts.items())
    return ScoredCandidate(candidate, sum(parts.values()), why)


def _prefill_cost(question: RouteQuery, candidate: Candidate) -> ScoredCandidate:
    parts = {
        "uncached": _left(question, candidate),
        "queued": candidate.queued_tokens,
        "of others": OTHERS * candidate.num_others,
        "pressure": _pressure(question, candidate),
    }
    return _sum(candidate, parts)


def _handed_cost(question: RouteQuery, candidate: Candidate, before: float) -> ScoredCandidate:
    parts = {
        "at prefill": before,
        "pulled": PULL * _left(question, candidate),
        "in the batch": TURN * candidate.num_requests,
        "pressure": _pressure(question, candidate),
    }
    return _sum(candidate, parts)


def _alone_cost(question: RouteQuery, candidate: Candidate) -> ScoredCandidate:
    parts = {
        "uncached": _left(question, candidate),
        "in the batch": TURN * candidate.num_requests,
        "pressure": _pressure(question, candidate),
    }
    return _sum(candidate, parts)


def _affinity(beginning: bytes, engine: str) -> bytes:
    # A key takes 64 bytes, and those are the same for all who share a chat template.
    return blake2b(engine.encode(), key=blake2b(beginning).digest(), digest_size=8).digest()


POLICIES = {kind.name: kind for kind in (PrefixAware, RoundRobin, Random)}
"""By the names of ``--policy``."""
