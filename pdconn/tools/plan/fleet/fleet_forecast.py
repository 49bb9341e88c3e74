"""Which numbers of prefill and decode engines suit a load, and what following it gives.

Each phase of the load is served by each ratio, alone and from an idle fleet, and the whole load by
roles that follow it, all in virtual time (:mod:`pdconn.tools.plan.fleet.simulated_fleet`).
Goodput counts the requests that keep both targets.

The rates of an engine are those that the card gives, and the model's KV decides the rest::

    a stream more    bytes of KV that the busiest rank reads in a step / bytes a second of memory
    room             bytes for KV of a rank / the same bytes
    a pull           as :mod:`pdconn.tools.plan.forecast` predicts for the prompt
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdconn.router.roles.role_controller import RoleController, RoleTargets
from pdconn.tools.plan.fleet.fleet_load import EngineRates, LoadPhase, arrivals
from pdconn.tools.plan.fleet.simulated_fleet import FleetRun, SimulatedFleet
from pdconn.tools.plan.forecast import Forecast, forecast
from pdconn.tools.plan.plan_errors import ShapeError

MAX_ENGINES = 512
MOST_STREAMS = 256
"""vLLM's default max_num_seqs of a server on a large card."""
MOST_REQUESTS = 20_000
"""Of a phase that each ratio serves; more would only take longer."""
MOST_ALL = 24
"""Engines up to which every ratio is tried; of more, some, and those around the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRates:
    """What is known of an engine's cards.

    Attributes:
        prefill_tokens_per_s: that prefill computes.
        step_s: seconds of a decode step of one stream.
        memory_bytes_per_s: of one rank.
        kv_nbytes: memory of one rank for KV; None: unknown, then streams are limited by number.
    """

    prefill_tokens_per_s: float
    step_s: float
    memory_bytes_per_s: float
    kv_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class FleetQuestion:
    """A fleet and its load; the targets are those of the router's controller."""

    engines: int
    phases: tuple[LoadPhase, ...]
    targets: RoleTargets

    def __post_init__(self) -> None:
        if not 2 <= self.engines <= MAX_ENGINES:
            raise ShapeError("fleet", f"2 to {MAX_ENGINES} engines", self.engines)
        if not self.phases:
            raise ShapeError("load", "at least one phase, such as 3.5,8k,200", "none")


@dataclass(frozen=True, slots=True)
class RatioGoodput:
    """The share of each phase's requests that keep both targets, with this many prefill engines."""

    prefill: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FleetForecast:
    """The ratios of a fleet.

    Attributes:
        question: the fleet and its load.
        rates: of one engine.
        ratios: that were tried, by prefill engines.
        followed: the whole load, served by roles that follow it.
    """

    question: FleetQuestion
    rates: EngineRates
    ratios: tuple[RatioGoodput, ...]
    followed: FleetRun

    def best_of(self, phase: int) -> RatioGoodput:
        """The best ratio of a phase; of several, the one in their middle."""
        most = max(one.shares[phase] for one in self.ratios)
        alike = [one for one in self.ratios if one.shares[phase] >= most - 0.005]
        return alike[len(alike) // 2]

    @property
    def best_single(self) -> RatioGoodput:
        """The ratio with the most good requests over all phases."""
        return max(self.ratios, key=self.share_of)

    def share_of(self, ratio: RatioGoodput) -> float:
        """The share of all requests that a ratio serves within the targets."""
        weights = [phase.requests_per_s * phase.seconds for phase in self.question.phases]
        good = sum(w * share for w, share in zip(weights, ratio.shares, strict=True))
        return good / sum(weights)

    @property
    def followed_share(self) -> float:
        """The share of all requests that roles which follow serve within the targets."""
        return self.followed.good / max(1, self.followed.offered)


def engine_rates(made: Forecast, card: CardRates, phases: Sequence[LoadPhase]) -> EngineRates:
    """The rates of an engine for the mean context of a load.

    Args:
        made: a pull between the engines; its prompt does not matter.
        card: of each engine.
        phases: the load.

    Raises:
        ShapeError: a number is out of range, or one request does not fit into the memory.
    """
    weights = [phase.requests_per_s * phase.seconds for phase in phases]
    prompt = round(_mean([phase.prompt_tokens for phase in phases], weights))
    held = [weight * phase.answer_tokens for weight, phase in zip(weights, phases, strict=True)]
    context = _mean([one.prompt_tokens + one.answer_tokens / 2 for one in phases], held)
    nbytes = _pulled(made, max(2, round(context))).busiest.nbytes
    room = MOST_STREAMS if card.kv_nbytes is None else int(card.kv_nbytes // nbytes)
    if room < 1:
        raise ShapeError("kv-memory", f"{nbytes} bytes of a request of this load", card.kv_nbytes)
    return EngineRates(
        prefill_tokens_per_s=card.prefill_tokens_per_s,
        step_s=card.step_s,
        stream_s=nbytes / card.memory_bytes_per_s,
        most_streams=min(room, MOST_STREAMS),
        pull_s=_pulled(made, max(2, prompt)).seconds,
    )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _pulled(made: Forecast, prompt_tokens: int) -> Forecast:
    return forecast(
        made.prefill,
        made.decode,
        prompt_tokens,
        0,
        made.link,
        prefill_link=made.prefill_link,
        ids=made.ids,
        seed=made.seed,
    )


def forecast_fleet(question: FleetQuestion, rates: EngineRates, seed: int = 0) -> FleetForecast:
    """Serve a load by every ratio, and by roles that follow it."""
    targets = question.targets
    load = list(arrivals(question.phases, seed))
    fleet = SimulatedFleet(question.engines, rates, RoleController(targets))
    followed = fleet.serve(load, targets.ttft_s, targets.itl_s)
    tried = {number: _served(question, rates, number, seed) for number in _first(question.engines)}
    for phase in range(len(question.phases)):
        best = max(tried, key=lambda number: tried[number].shares[phase])
        for number in _around(best, question.engines):
            if number not in tried:
                tried[number] = _served(question, rates, number, seed)
    ratios = tuple(tried[number] for number in sorted(tried))
    return FleetForecast(question, rates, ratios, followed)


def _served(question: FleetQuestion, rates: EngineRates, prefill: int, seed: int) -> RatioGoodput:
    shares = []
    for phase in question.phases:
        seconds = min(phase.seconds, MOST_REQUESTS / phase.requests_per_s)
        alone = replace(phase, seconds=seconds, ramp_s=0.0)
        fleet = SimulatedFleet(question.engines, rates, num_prefill=prefill)
        targets = question.targets
        run = fleet.serve(list(arrivals([alone], seed)), targets.ttft_s, targets.itl_s)
        shares.append(run.good / max(1, run.offered))
    return RatioGoodput(prefill, tuple(shares))


def _first(engines: int) -> range:
    step = 1 if engines <= MOST_ALL else math.ceil(engines / MOST_ALL)
    return range(1, engines, step)


def _around(best: int, engines: int) -> range:
    """Ratios between the neighbours that were tried first."""
    step = _first(engines).step
    if step == 1:
        return range(0)
    return range(max(1, best - step + 1), min(engines, best + step))
