"""How many engines each role needs to keep its target.  Pure: time is an argument.

::

    prefill   tokens to compute a second / tokens of an engine a second
    decode    streams / streams at which an engine's latency reaches its target,
              or KV blocks in use / blocks of an engine, if that is more
    both      and spare engines for bursts

Both costs are measured and fitted as lines: the time to a ticket over the tokens in front of it,
and the inter-token latency over the streams of an engine.
The needs of both are real numbers, independent of how many engines serve the role now, so
they tell which ratio would be right as well as whether the present one is.

A model of cost may be wrong.  So a role whose requests are late needs more than it has, whatever
its line says: see ``_Lateness``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdconn.router.fleet.member import Role
from pdconn.router.roles.role_reports import EngineReport, FleetReport

SPARE = {Role.PREFILL: 0.5, Role.DECODE: 0.3}
"""Spare engines of a role per square root of the busy ones: what bursts need (the square-root rule
of queues).  A share of a large fleet would be far more than that."""
KV_SHARE = 0.9
LATE_SHARE = 0.1
"""Share of late requests from which on a role counts as short: targets are of nine in ten."""
LEAST_SAMPLES = 5
LEAST_S = 1e-3
"""Shorter times scatter as this one does."""
CATCH_UP = 0.5
"""Periods in which a queue of prompts should be gone."""
SMOOTHING = 0.25
"""Periods over which rates are averaged."""
LEAD = 0.5
"""Periods ahead for which streams are expected to grow as now: they take long to pile up, and
latency shows it when it is too late."""
LATE_FOR = 0.5
"""Periods for which a late request counts."""
KEPT = 0.97
"""Weight of a measurement of cost after the next one."""
MOST_FITTED = 4
"""Prompts of one step that are fitted: a sample is enough, and fitting costs time."""
NARROW = 0.05
"""Points whose amounts deviate by less than this share of their mean tell no slope."""
PREFILL_ASSUMED = (0.01, 1 / 20_000)
"""Seconds for a prompt and for each of its tokens, before anything is measured."""
GROWS = {Role.PREFILL: 0.9, Role.DECODE: 0.5}
"""Share of a time that is taken to grow with the amount while all amounts are alike."""
USUAL_STREAMS = 64
"""Streams at which an engine reaches its target, before anything is measured."""
MOST_SHORT = 2.0
"""A role that is late needs at most this many times the engines that it has."""


@dataclass(frozen=True, slots=True)
class RoleNeeds:
    """Engines that each role needs, as real numbers; ``why`` names the larger term of each."""

    prefill: float
    decode: float
    why: Mapping[Role, str]

    def pressure(self, prefill: int, decode: int) -> float:
        """The larger ratio of need and engines; 1: the targets are just kept."""
        return max(self.pressure_of(Role.PREFILL, prefill), self.pressure_of(Role.DECODE, decode))

    def pressure_of(self, role: Role, engines: int) -> float:
        """The ratio of need and engines of a role."""
        need = self.of(role)
        if need <= 0:
            return 0.0
        return need / engines if engines else math.inf

    def of(self, role: Role) -> float:
        """The need of a role."""
        return self.prefill if role is Role.PREFILL else self.decode


def _with_spare(role: Role, busy: float) -> float:
    return busy + SPARE[role] * math.sqrt(busy)


class CostLine:
    """Seconds over an amount, fitted by least squares of relative errors; older points fade.

    While all amounts are alike, the points tell no slope: then ``grows`` of the time is taken to
    grow with the amount.  :class:`pdconn.router.pulls.rates.Line` is exact for few points, and
    takes all of it as fixed then.

    Args:
        assumed: seconds for nothing and for each unit, before the first point.
        grows: the share.

    >>> line = CostLine((0.01, 0.0001), grows=0.9)
    >>> for amount in 50 * (10, 20):
    ...     line.add_point(amount, 0.5 + 0.01 * amount)
    >>> round(line.seconds_for(15), 2), round(line.coefficients()[1], 2)
    (0.65, 0.01)
    """

    def __init__(self, assumed: tuple[float, float], grows: float) -> None:
        self._assumed, self._grows = assumed, grows
        self._sums: tuple[float, ...] = (0.0,) * 5

    def add_point(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        weight = 1 / max(seconds, LEAST_S) ** 2
        terms = (1.0, amount, seconds, amount * amount, amount * seconds)
        self._sums = tuple(
            KEPT * one + weight * term for one, term in zip(self._sums, terms, strict=True)
        )

    def coefficients(self) -> tuple[float, float]:
        """Seconds for nothing, and for each unit; neither is negative."""
        weight, x, y, xx, xy = self._sums
        if not weight or not x:
            return self._assumed
        x, y, xx, xy = x / weight, y / weight, xx / weight, xy / weight
        narrow = (NARROW * x) ** 2
        each = (xy - x * y + narrow * self._grows * y / x) / (max(0.0, xx - x * x) + narrow)
        fixed = y - max(0.0, each) * x
        return (fixed, max(0.0, each)) if fixed >= 0 else (0.0, xy / xx)

    def amount_in(self, seconds: float) -> float:
        """The amount that takes so long; infinite if it does not grow."""
        fixed, each = self.coefficients()
        if fixed < seconds:
            return (seconds - fixed) / each if each else math.inf
        # The points are longer, and alike: as if all of the time grew.
        _, x, y, _, _ = self._sums
        return x * seconds / y

    def seconds_for(self, amount: float) -> float:
        """Expected seconds."""
        fixed, each = self.coefficients()
        return fixed + each * amount


class _Lateness:
    """The share of requests that were late in a window of time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, bool]] = deque(maxlen=4096)

    def note_requests(self, late: Iterable[bool], now: float) -> float:
        """Note requests; returns the share, 0 while there are too few."""
        self._seen.extend((now, one) for one in late)
        while self._seen and self._seen[0][0] < now - self._window_s:
            self._seen.popleft()
        if len(self._seen) < LEAST_SAMPLES:
            return 0.0
        return sum(one for _, one in self._seen) / len(self._seen)


@dataclass(slots=True)
class _Smoothed:
    """An average in which older values have less weight, by time."""

    tau_s: float
    value: float | None = None

    def note_value(self, value: float, dt_s: float) -> float:
        if self.value is None:
            self.value = value
        else:
            self.value += (value - self.value) * -math.expm1(-dt_s / self.tau_s)
        return self.value


@dataclass(slots=True)
class NeedsEstimator:
    """Measures needs, step by step.

    Attributes:
        ttft_target_s, itl_target_s: the targets.
        period_s: the controller's period.
        prefill_line: seconds to a ticket over the tokens until it.
        itl_line: inter-token latency over the streams of an engine.
    """

    ttft_target_s: float
    itl_target_s: float
    period_s: float
    prefill_line: CostLine = field(
        default_factory=lambda: CostLine(PREFILL_ASSUMED, GROWS[Role.PREFILL])
    )
    itl_line: CostLine = field(init=False)
    _rates: dict[str, _Smoothed] = field(init=False)
    _late: dict[Role, _Lateness] = field(init=False)

    def __post_init__(self) -> None:
        half_s = self.itl_target_s / 2
        self.itl_line = CostLine((half_s, half_s / USUAL_STREAMS), GROWS[Role.DECODE])
        tau_s, late_s = SMOOTHING * self.period_s, LATE_FOR * self.period_s
        names = ("tokens", "prompts", "streams", "growth", "kv")
        self._rates = {name: _Smoothed(tau_s) for name in names}
        self._late = {role: _Lateness(late_s) for role in Role}

    @property
    def streams_per_engine(self) -> float | None:
        """Streams at which an engine's latency reaches its target; None if one alone misses it."""
        fit = self.itl_line.amount_in(self.itl_target_s)
        return fit if fit >= 1 else None

    def measure(
        self,
        report: FleetReport,
        serving: Mapping[Role, Sequence[EngineReport]],
        *,
        now: float,
        dt_s: float,
    ) -> RoleNeeds:
        """The needs now.

        Args:
            report: of the fleet.
            serving: engines that are up, by the role that they serve; one that stops decoding
                counts as decode until it has.
            now: seconds that never go back.
            dt_s: seconds since the report before.
        """
        for one in report.prefilled[:MOST_FITTED]:
            self.prefill_line.add_point(one.ahead + one.tokens, one.seconds)
        prefill, why_prefill = self._prefill_needs(report, len(serving[Role.PREFILL]), now, dt_s)
        decode, why_decode = self._decode_needs(report, serving[Role.DECODE], now, dt_s)
        return RoleNeeds(prefill, decode, {Role.PREFILL: why_prefill, Role.DECODE: why_decode})

    def _expected_streams(self, number: int, dt_s: float) -> float:
        """Streams in a while, if they grow as they do now."""
        slow = self._rates["streams"]
        before = slow.value
        streams = slow.note_value(number, dt_s)
        grows = 0.0 if before is None else max(0.0, (streams - before) / dt_s)
        grows = self._rates["growth"].note_value(grows, dt_s)
        return streams + grows * LEAD * self.period_s

    def _prefill_needs(
        self, report: FleetReport, num_engines: int, now: float, dt_s: float
    ) -> tuple[float, str]:
        fixed_s, token_s = self.prefill_line.coefficients()
        tokens_per_s = self._rates["tokens"].note_value(report.sent_tokens / dt_s, dt_s)
        prompts_per_s = self._rates["prompts"].note_value(report.sent_prompts / dt_s, dt_s)
        # What an engine computes in half of the target is no queue.
        usual = num_engines * self.ttft_target_s / 2 / token_s if token_s else math.inf
        queue_per_s = max(0.0, report.backlog_tokens - usual) / (CATCH_UP * self.period_s)
        used = (tokens_per_s + queue_per_s) * token_s + prompts_per_s * fixed_s
        need, why = _with_spare(Role.PREFILL, used), f"{tokens_per_s:.0f} tokens/s to compute"
        # A prompt that takes longer than the target by itself is late under every ratio.
        late = self._late[Role.PREFILL].note_requests(
            (
                one.seconds > self.ttft_target_s
                for one in report.prefilled
                if fixed_s + token_s * one.tokens <= self.ttft_target_s
            ),
            now,
        )
        if late > LATE_SHARE and num_engines * (1 + late) > need:
            return min(num_engines * (1 + late), MOST_SHORT * num_engines), (
                f"{late:.0%} of tickets come after the target"
            )
        return need, why

    def _decode_needs(
        self, report: FleetReport, engines: Sequence[EngineReport], now: float, dt_s: float
    ) -> tuple[float, str]:
        trusted = [one for one in engines if one.is_trusted]
        timed = sorted(
            (one for one in trusted if one.itl_s and one.num_requests),
            key=lambda one: one.itl_s or 0.0,
        )
        if timed:  # the median, so that few engines cannot bend the line
            middle = timed[len(timed) // 2]
            running = max(1, middle.num_requests - middle.num_waiting)
            self.itl_line.add_point(running, middle.itl_s or 0.0)
        streams = self._expected_streams(sum(one.num_requests for one in engines), dt_s)
        in_use = sum(one.kv_usage or 0.0 for one in trusted) * len(engines) / max(1, len(trusted))
        blocks = self._rates["kv"].note_value(in_use, dt_s) / KV_SHARE
        fit = self.streams_per_engine
        need, why = blocks, f"{in_use:.1f} caches of KV in use"
        busy = 0.0 if fit is None else _with_spare(Role.DECODE, streams / fit)
        if busy > need:
            need, why = busy, f"{streams:.1f} streams, {fit:.0f} an engine"
        late = self._late[Role.DECODE].note_requests(
            (
                one.seconds > self.ttft_target_s and one.prefill_s < one.seconds / 2
                for one in report.first_tokens
            ),
            now,
        )
        # Pulls over a slow network are late too, and no ratio helps: only queues at decode count.
        is_queueing = any(one.num_waiting for one in trusted)
        if late > LATE_SHARE and is_queueing and len(engines) * (1 + late) > need:
            most = MOST_SHORT * len(engines)
            why = f"{late:.0%} of first tokens wait for decode"
            return min(len(engines) * (1 + late), most), why
        return need, why
