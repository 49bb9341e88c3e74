"""What a planner chose for prompts, judged by what both ways took.  Pure.

For each prompt the planner chooses, then both ways are timed.  The planner learns what its own
choice took, as in the router, and nothing of the other; its clock stands still meanwhile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from pdconn.router.pulls.pull_choice import Holder, PullChoice

PREFILL, HOLDER = "prefill", "holder"
ALIKE = 0.05
"""Ways that differ by no more of the slower one's time are both right."""
WARM_UP = 10
"""Requests after which the planner should know the engine and the link."""
PAUSE_S = 0.1
"""Between one request's end and the next one, as the planner sees the time."""


class Planner(Protocol):
    """What a planner must do: see :class:`pdconn.router.pulls.planner.PullPlanner`."""

    def choose(
        self, engine: str, num_tokens: int, held: int, holders: Iterable[Holder], now: float
    ) -> PullChoice:
        """Choose."""

    def note_computed(self, engine: str, tokens: int, seconds: float, now: float) -> None:
        """Learn."""

    def note_pulled(
        self, engine: str, choice: PullChoice, rest: int, seconds: float, now: float
    ) -> None:
        """Learn."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of ``num_tokens`` tokens: prefill holds ``held`` of them, the holder ``there``."""

    held: int
    there: int
    num_tokens: int

    @property
    def rest(self) -> int:
        """Tokens that are computed in any case."""
        return self.num_tokens - self.there


@dataclass(frozen=True, slots=True)
class Drawn:
    """Bounds of drawn requests, in tokens: of what a pull saves, what is held, what is left."""

    saved: tuple[int, int] = (512, 4096)
    held: tuple[int, int] = (0, 1024)
    rest: tuple[int, int] = (16, 1024)

    @property
    def most(self) -> int:
        """Tokens that a holder may have."""
        return self.held[1] + self.saved[1]

    def request(self, rng: Random) -> Request:
        """One more: short ones are as likely as long ones, and half find nothing held."""
        held = rng.choice([0, rng.randint(*self.held)])
        there = held + _logarithmic(rng, *self.saved)
        return Request(held, there, there + _logarithmic(rng, *self.rest))


def _logarithmic(rng: Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


@dataclass(frozen=True, slots=True)
class Engine:
    """How long engines compute; each time is drawn up to ``scatter`` above or below the line."""

    rng: Random
    tokens_per_s: float
    fixed_s: float
    scatter: float

    def takes_s(self, tokens: int) -> float:
        """Seconds that one prompt takes of which ``tokens`` are not held."""
        line_s = self.fixed_s + tokens / self.tokens_per_s
        return line_s * self.rng.uniform(1 - self.scatter, 1 + self.scatter)


@dataclass(frozen=True, slots=True)
class Judged:
    """One request: both ways in seconds, and which was chosen."""

    saved: int
    num_tokens: int
    is_pulled: bool
    pull_s: float
    compute_s: float
    why: str

    @property
    def taken_s(self) -> float:
        """What the choice took."""
        return self.pull_s if self.is_pulled else self.compute_s

    @property
    def regret(self) -> float:
        """What the choice took beyond the better one, as a part of that."""
        return self.taken_s / min(self.pull_s, self.compute_s) - 1

    @property
    def is_right(self) -> bool:
        """It was the faster one, or both are alike."""
        apart_s = abs(self.pull_s - self.compute_s)
        return self.regret == 0 or apart_s <= ALIKE * max(self.pull_s, self.compute_s)


def judge(
    planner: Planner,
    requests: Iterable[Request],
    engine: Engine,
    pull: Callable[[Request], float],
    now: float = 0.0,
) -> list[Judged]:
    """Choose for each request, do both, learn from what was chosen.

    ``pull`` moves the KV of a request from the holder, and tells the seconds that it took.  Before
    it the holder computes one token, as it does when it is asked; after it prefill computes the
    rest.
    """
    judged = []
    for request in requests:
        holders = [Holder(HOLDER, request.there)]
        choice = planner.choose(PREFILL, request.num_tokens, request.held, holders, now)
        asked_s = engine.takes_s(1)
        pull_s = asked_s + pull(request) + engine.takes_s(request.rest)
        computed = request.num_tokens - request.held
        one = Judged(
            request.there - request.held,
            request.num_tokens,
            choice.holder is not None,
            pull_s,
            engine.takes_s(computed),
            choice.why,
        )
        judged.append(one)
        now += one.taken_s
        if one.is_pulled:
            planner.note_pulled(PREFILL, choice, request.rest, one.taken_s, now)
        else:
            planner.note_computed(PREFILL, computed, one.taken_s, now)
        now += PAUSE_S
    return judged


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests over one link.  Shares and regrets are parts of 1.

    Attributes:
        pull_better: where pulling was the faster one.
        right: of all; ``right_warm`` without the first :data:`WARM_UP`.
        over_best: time of all choices beyond that of the better ones.
    """

    requests: int
    pull_better: float
    pulled: float
    right: float
    right_warm: float
    worst_regret: float
    mean_regret: float
    over_best: float


def outcome_of(judged: Sequence[Judged]) -> Outcome:
    """Summarise."""
    best_s = sum(min(one.pull_s, one.compute_s) for one in judged)
    regrets = [one.regret for one in judged]
    return Outcome(
        len(judged),
        statistics.fmean(one.pull_s < one.compute_s for one in judged),
        statistics.fmean(one.is_pulled for one in judged),
        share_right(judged),
        share_right(judged[WARM_UP:] or judged),
        max(regrets),
        statistics.fmean(regrets),
        sum(one.taken_s for one in judged) / best_s - 1,
    )


def share_right(judged: Sequence[Judged]) -> float:
    """The part for which the better one was chosen."""
    return statistics.fmean(one.is_right for one in judged)
