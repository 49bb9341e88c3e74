"""Chooses whether a prefill engine computes a prompt's prefix or pulls it from a holder.  Pure.

All are seconds, as measured of engines and of pairs of engines::

    compute     compute(all tokens that it lacks)
    load        load(further tokens in its store) + compute(the rest)
    pull        pull(further tokens of the holder) + compute(the rest)

An engine with a store loads all it can unless it pulls.  A pull saves at least ``floor`` tokens.  A
holder lends to ``most_lent`` at a time, and to none while requests wait there: its own requests
have priority.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdconn.router.pulls.rates import Lines

FLOOR_TOKENS = 512
"""A pull that saves fewer tokens is not worth a request."""
MOST_LENT = 4
"""Concurrent pulls from one holder."""
LEAST_PATIENCE_S = 0.05
"""Least time for a holder to answer, however little a pull gains."""
BOLD = 1.0
"""Standard errors by which a pull is assumed faster than expected, since trying it gives data."""
GAIN = 0.97
"""Largest part of the time without a pull that a chosen pull may take."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An engine that holds the first ``tokens`` tokens of a prompt.

    Attributes:
        rank: the data-parallel rank that holds them; None leaves the choice to the engine.
        num_waiting: requests that wait there.
        num_lent: pulls from it in progress.
    """

    engine: str
    tokens: int
    rank: int | None = None
    num_waiting: int = 0
    num_lent: int = 0


@dataclass(frozen=True, slots=True)
class PullChoice:
    """The chosen way to obtain a prefix, and the reason.

    Attributes:
        holder: the engine to pull from; None if the prefix is computed.
        seconds: expected time, with the rest of the prompt.
        otherwise_s: expected time without a pull.
        why: the reason as a sentence.
        saved: tokens that are pulled instead of computed or loaded.
        cost: tokens that could be computed in the time of that pull.
        load_cost: the same for loading from the engine's store, if nothing is pulled.
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
        """Seconds without an answer of the holder after which not pulling is the better choice."""
        return max(LEAST_PATIENCE_S, self.otherwise_s - self.seconds)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses by measured times.

    Attributes:
        computing: times by prefill engine.
        pulling: times by holder and prefill engine.
        loading: times by prefill engine, from its store.
        floor: minimum tokens saved; default :data:`FLOOR_TOKENS`.
        most_lent: maximum pulls from one holder; default :data:`MOST_LENT`.
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
        """Choose for a prompt of ``num_tokens`` tokens, of which ``engine`` holds ``held``.

        Its store has ``stored`` tokens after those.  Of the holders that may lend, the one with the
        shortest expected time wins.
        """
        compute = self.computing.line_of(engine, now)
        token_s = compute.seconds_for(num_tokens - held) / max(1, num_tokens - held)
        load_s = self.loading.line_of(engine, now).seconds_for(stored) if stored else 0.0
        otherwise_s = load_s + compute.seconds_for(num_tokens - held - stored)
        without = "loading and computing take" if stored else "computing takes"
        without = f"{without} {otherwise_s:.3f} s"
        load_cost = load_s / token_s if token_s > 0 else 0.0
        best = PullChoice(
            None, otherwise_s, otherwise_s, "no engine holds more", load_cost=load_cost
        )
        for holder in holders:
            more = holder.tokens - held
            # 1. The holder has nothing that the engine lacks.
            if holder.engine == engine or more <= 0:
                continue
            pulling = self.pulling.line_of((holder.engine, engine), now)
            pull_s = max(0.0, pulling.seconds_for(more) - BOLD * pulling.doubt(more))
            seconds = pull_s + compute.seconds_for(num_tokens - holder.tokens)
            # 2. The holder may not lend now, or the pull would take longer than not pulling.
            against = self._why_not(holder, more)
            if against is None and seconds > GAIN * otherwise_s:
                against = f"would take {seconds:.3f} s, {without}"
            # 3. The fastest of the others wins; if there is none, the last reason is kept.
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
