"""The load of a fleet: phases of requests, and the rates of one engine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdconn.tools.plan.plan_errors import ShapeError

LENGTHS_VARY = 0.5
"""Standard deviation of the logarithm of prompts' and answers' lengths."""


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """Requests that arrive at random, at one rate.

    Attributes:
        seconds: duration.
        requests_per_s: mean rate.
        prompt_tokens, answer_tokens: means.
        ramp_s: in which it takes over from the phase before, request by request.

    Raises:
        ShapeError: a number is not positive.
    """

    seconds: float
    requests_per_s: float
    prompt_tokens: int
    answer_tokens: int
    ramp_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.ramp_s <= self.seconds:
            raise ShapeError("load", "a ramp of at most the phase's seconds", self.ramp_s)
        for name, value in (
            ("seconds", self.seconds),
            ("requests per second", self.requests_per_s),
            ("prompt tokens", self.prompt_tokens),
            ("answer tokens", self.answer_tokens),
        ):
            if not (math.isfinite(value) and value > 0):
                raise ShapeError("load", f"{name} above 0", value)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request; ``phase`` is the number of its phase."""

    at_s: float
    phase: int
    prompt_tokens: int
    answer_tokens: int


def arrivals(phases: Sequence[LoadPhase], seed: int = 0) -> Iterator[Arrival]:
    """The requests of some phases, one after the other: the same ones for the same seed."""
    drawn = random.Random(seed)
    began_s = 0.0
    before: LoadPhase | None = None
    for number, phase in enumerate(phases):
        most = max(phase.requests_per_s, 0.0 if before is None else before.requests_per_s)
        at_s = 0.0
        while (at_s := at_s + drawn.expovariate(most)) < phase.seconds:
            share = 1.0 if before is None or at_s >= phase.ramp_s else at_s / phase.ramp_s
            pick = drawn.random() * most
            if pick < share * phase.requests_per_s:
                like = phase
            elif (
                before is not None
                and pick < share * phase.requests_per_s + (1 - share) * before.requests_per_s
            ):
                like = before
            else:
                continue  # fewer arrive now than at the peak of the ramp
            yield _draw(drawn, like, number, began_s + at_s)
        began_s += phase.seconds
        before = phase


def _draw(drawn: random.Random, like: LoadPhase, phase: int, at_s: float) -> Arrival:
    shift = LENGTHS_VARY**2 / 2  # so that the mean is the given one
    prompt, answer = (
        max(2, round(mean * math.exp(drawn.gauss(-shift, LENGTHS_VARY))))
        for mean in (like.prompt_tokens, like.answer_tokens)
    )
    return Arrival(at_s, phase, prompt, answer)


@dataclass(frozen=True, slots=True)
class EngineRates:
    """What one engine does in a second.

    ::

        ticket     prefill_fixed_s + tokens / prefill_tokens_per_s, one prompt after the other
        a token    step_s + (streams - 1) x stream_s, of every stream at a time

    Attributes:
        prefill_tokens_per_s, prefill_fixed_s: of prefill.
        step_s: between two tokens of one stream alone.
        stream_s: that each further stream adds.
        most_streams: for which its KV cache has room; more wait.
        pull_s: from a ticket to decode.

    Raises:
        ShapeError: a number is out of range.
    """

    prefill_tokens_per_s: float
    step_s: float
    stream_s: float
    most_streams: int = 256
    prefill_fixed_s: float = 0.01
    pull_s: float = 0.02

    def __post_init__(self) -> None:
        for name, value, least in (
            ("prefill-rate", self.prefill_tokens_per_s, 1.0),
            ("step-ms", self.step_s, 1e-6),
            ("stream-ms", self.stream_s, 0.0),
            ("streams", self.most_streams, 1.0),
            ("pull seconds", self.pull_s, 0.0),
        ):
            if not (math.isfinite(value) and value >= least):
                raise ShapeError(name, f"a number of at least {least:g}", value)

    def itl_s(self, streams: int) -> float:
        """Seconds between two tokens of each of so many streams."""
        return self.step_s + max(0, streams - 1) * self.stream_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute a prompt."""
        return self.prefill_fixed_s + tokens / self.prefill_tokens_per_s
