"""Whether a prefill engine computes a prompt's prefix or pulls it from who holds it.  Pure.

Both are seconds, as engines and pairs of engines were seen to take them::

    compute     compute(all that it lacks)
    pull        pull(what the holder has more) + compute(the rest)

A pull saves at least so many tokens as the floor says, and a holder lends to a few at a time, and
to none while requests wait there: its own requests go first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdconn.router.pulls.rates import Lines

FLOOR_TOKENS = 512
"""A pull that saves fewer tokens is not worth a request."""
MOST_LENT = 4
"""Pulls from one holder at a time."""
LEAST_PATIENCE_S = 0.05
"""A holder that is asked has so long to answer, however little a pull gains."""
GAIN = 0.9
"""A pull is taken if it takes at most this part of the time: what is gained must be sure."""


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
        computed_s: that it would take to compute all.
        why: a sentence.
        saved: tokens that are pulled instead of computed.
        cost: how many tokens could be computed in the time that pulling those takes.
    """

    holder: Holder | None
    seconds: float
    computed_s: float
    why: str
    saved: int = 0
    cost: float = 0.0

    @property
    def patience_s(self) -> float:
        """After so many seconds without the holder's answer, computing is the better choice."""
        return max(LEAST_PATIENCE_S, self.computed_s - self.seconds)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses by what was seen.

    Attributes:
        computing: by prefill engine.
        pulling: by holder and prefill engine.
        floor: see :data:`FLOOR_TOKENS`.
        most_lent: see :data:`MOST_LENT`.
    """

    computing: Lines
    pulling: Lines
    floor: int = FLOOR_TOKENS
    most_lent: int = MOST_LENT

    def choose(
        self, engine: str, num_tokens: int, held: int, holders: Iterable[Holder], now: float
    ) -> PullChoice:
        """For a prompt of ``num_tokens`` tokens, of which ``engine`` holds ``held``.

        Holders are tried in order of what they would take; the best of those that may lend wins.
        """
        compute = self.computing.of(engine, now)
        computed_s = compute.at(num_tokens - held)
        token_s = computed_s / max(1, num_tokens - held)
        best = PullChoice(None, computed_s, computed_s, "nobody holds more")
        for holder in holders:
            more = holder.tokens - held
            if holder.engine == engine or more <= 0:
                continue
            pull_s = self.pulling.of((holder.engine, engine), now).at(more)
            seconds = pull_s + compute.at(num_tokens - holder.tokens)
            why = self._why_not(holder, more, seconds, computed_s)
            if why is None and (best.holder is None or seconds < best.seconds):
                told = f"{holder.engine} holds {more} tokens more: {seconds:.3f} s, "
                told += f"computing takes {computed_s:.3f} s"
                cost = pull_s / token_s if token_s > 0 else 0.0
                best = PullChoice(holder, seconds, computed_s, told, more, cost)
            elif best.holder is None and why is not None:
                best = PullChoice(None, computed_s, computed_s, f"{holder.engine} {why}")
        return best

    def _why_not(self, holder: Holder, more: int, seconds: float, computed_s: float) -> str | None:
        if more < self.floor:
            return f"holds {more} tokens more, of at least {self.floor}"
        if holder.num_lent >= self.most_lent:
            return f"lends to {holder.num_lent} already"
        if holder.num_waiting > 0:
            return f"has {holder.num_waiting} requests waiting"
        if seconds > GAIN * computed_s:
            return f"would take {seconds:.3f} s, computing {computed_s:.3f} s"
        return None
