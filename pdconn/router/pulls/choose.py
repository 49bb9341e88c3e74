"""Whether a prefill engine computes a prompt's prefix or pulls it from who holds it.  Pure.

All are seconds, as engines and pairs of engines were seen to take them::

    compute     compute(all that it lacks)
    load        load(what its store has more) + compute(the rest)
    pull        pull(what the holder has more) + compute(the rest)

An engine with a store loads what it can unless it pulls.  A pull saves at least so many tokens as
the floor says, and a holder lends to a few at a time, and to none while requests wait there: its
own requests go first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdconn.router.pulls.rates import Lines

FLOOR_TOKENS = 512
"""A pull that saves fewer tokens is not worth a request."""
MOST_LENT = 4
"""Pulls from one holder at a time."""
LEAST_PATIENCE_S = 0.05
"""A holder that is asked has so long to answer, however little a pull gains."""
BOLD = 1.0
"""A pull counts as faster than expected by so many standard errors: of what is tried is learned,"""
GAIN = 0.97
"""and it is taken if it then takes at most this part of the time."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An engine that holds the first ``tokens`` tokens of a prompt.

    Attributes:
        rank: the data-parallel rank that does; None leaves it to the engine.
        num_waiting: requests that wait there.
        num_lent: pulls from it under way.
    """

    engine: str
    tokens: int
    rank: int | None = None
    num_waiting: int = 0
    num_lent: int = 0


@dataclass(frozen=True, slots=True)
class PullChoice:
    """What is done about a prefix, and why.

    Attributes:
        holder: None if it is computed.
        seconds: that it takes, with the rest of the prompt.
        otherwise_s: that it would take without a pull.
        why: a sentence.
        saved: tokens that are pulled instead of computed or loaded.
        cost: how many tokens could be computed in the time that pulling those takes.
        load_cost: the same of what a store has, which is loaded where nothing is pulled.
    """

    holder: Holder | None
    seconds: float
    otherwise_s: float
    why: str
    saved: int = 0
    cost: float = 0.0
    load_cost: float = 0.0

    @property
    def patience_s(self) -> float:
        """After so many seconds without the holder's answer, doing without is the better choice."""
        return max(LEAST_PATIENCE_S, self.otherwise_s - self.seconds)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses by what was seen.

    Attributes:
        computing: by prefill engine.
        pulling: by holder and prefill engine.
        loading: by prefill engine, from its store.
        floor: see :data:`FLOOR_TOKENS`.
        most_lent: see :data:`MOST_LENT`.
    """

    computing: Lines
    pulling: Lines
    loading: Lines
    floor: int = FLOOR_TOKENS
    most_lent: int = MOST_LENT

    def choose(
        self,
        engine: str,
        num_tokens: int,
        held: int,
        holders: Iterable[Holder],
        now: float,
        *,
        stored: int = 0,
    ) -> PullChoice:
        """For a prompt of ``num_tokens`` tokens, of which ``engine`` holds ``held``.

        Its store has ``stored`` tokens behind those.  Holders are tried in order of what they
        would take; the best of those that may lend wins.
        """
        compute = self.computing.of(engine, now)
        token_s = compute.at(num_tokens - held) / max(1, num_tokens - held)
        load_s = self.loading.of(engine, now).at(stored) if stored else 0.0
        otherwise_s = load_s + compute.at(num_tokens - held - stored)
        without = "loading and computing take" if stored else "computing takes"
        without = f"{without} {otherwise_s:.3f} s"
        load_cost = load_s / token_s if token_s > 0 else 0.0
        best = PullChoice(
            None, otherwise_s, otherwise_s, "no engine holds more", load_cost=load_cost
        )
        for holder in holders:
            more = holder.tokens - held
            # 1. It has nothing that the engine lacks.
            if holder.engine == engine or more <= 0:
                continue
            pulling = self.pulling.of((holder.engine, engine), now)
            pull_s = max(0.0, pulling.at(more) - BOLD * pulling.doubt(more))
            seconds = pull_s + compute.at(num_tokens - holder.tokens)
            # 2. It may not lend now, or the pull would take longer than doing without.
            against = self._why_not(holder, more)
            if against is None and seconds > GAIN * otherwise_s:
                against = f"would take {seconds:.3f} s, {without}"
            # 3. The fastest of the others wins; without any, the last reason is kept.
            if against is None and (best.holder is None or seconds < best.seconds):
                gain = f"{holder.engine} holds {more} tokens more: {seconds:.3f} s, {without}"
                cost = pull_s / token_s if token_s > 0 else 0.0
                best = replace(
                    best, holder=holder, seconds=seconds, why=gain, saved=more, cost=cost
                )
            elif best.holder is None and against is not None:
                best = replace(best, why=f"{holder.engine} {against}")
        return best

    def _why_not(self, holder: Holder, more: int) -> str | None:
        if more < self.floor:
            return f"holds {more} tokens more, of at least {self.floor}"
        if holder.num_lent >= self.most_lent:
            return f"lends to {holder.num_lent} already"
        if holder.num_waiting > 0:
            return f"has {holder.num_waiting} requests waiting"
        return None
