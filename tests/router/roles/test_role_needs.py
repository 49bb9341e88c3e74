"""Needs of roles, against numbers by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.fleet.member import Role
from pdconn.router.roles.role_needs import SPARE, CostLine, NeedsEstimator
from pdconn.router.roles.role_reports import (
    EngineReport,
    FirstTokenSample,
    FleetReport,
    PrefillSample,
)

TTFT_S, ITL_S, PERIOD_S = 2.0, 0.05, 60.0
RATE = 5000.0


@given(
    st.floats(0.001, 1.0),
    st.floats(1e-5, 1e-2),
    st.lists(st.integers(1, 20_000), min_size=40, max_size=80),
)
def test_a_line_finds_what_made_its_points(fixed: float, each: float, amounts: list[int]) -> None:
    line = CostLine((0.01, 0.001), grows=0.9)
    for amount in [*amounts, *(100, 5000) * 40]:
        line.add_point(amount, fixed + each * amount)
    for amount in (100, 5000):
        assert line.seconds_for(amount) == pytest.approx(fixed + each * amount, rel=0.05)


def test_points_that_are_alike_tell_no_slope() -> None:
    line = CostLine((0.01, 0.001), grows=0.5)
    for _ in range(100):
        line.add_point(200, 0.1)
    assert line.coefficients() == pytest.approx((0.05, 0.05 / 200))
    assert line.amount_in(0.06) == pytest.approx(40)
    assert line.amount_in(0.04) == pytest.approx(80)  # shorter than what would be fixed


def test_before_the_first_point_a_line_is_the_assumed_one() -> None:
    line = CostLine((0.01, 0.001), grows=0.5)
    assert line.coefficients() == (0.01, 0.001)
    assert line.amount_in(0.11) == pytest.approx(100)


def estimator() -> NeedsEstimator:
    return NeedsEstimator(TTFT_S, ITL_S, PERIOD_S)


def report(engines: list[EngineReport], **facts: object) -> FleetReport:
    samples = tuple(PrefillSample(n, 0, n / RATE) for n in (500, 4000))
    known = {"prefilled": samples, "engines": {one.engine: one for one in engines}}
    return FleetReport(**{**known, **facts})  # type: ignore[arg-type]


def engines(role: Role, count: int, **facts: object) -> list[EngineReport]:
    given = {"roles": frozenset({role}), "age_s": 0.0, **facts}
    return [EngineReport(engine=f"{role.value}-{n}", **given) for n in range(count)]  # type: ignore[arg-type]


def with_spare(role: Role, busy: float) -> float:
    return busy + SPARE[role] * math.sqrt(busy)


def test_prefill_needs_the_engines_that_its_tokens_keep_busy() -> None:
    one, serving = estimator(), {Role.PREFILL: engines(Role.PREFILL, 4), Role.DECODE: []}
    for now in range(200):
        needs = one.measure(report([], sent_tokens=15_000), serving, now=float(now), dt_s=1.0)
    assert needs.prefill == pytest.approx(with_spare(Role.PREFILL, 3.0), rel=0.05)
    assert needs.decode == 0


def test_decode_needs_the_engines_that_its_streams_fill() -> None:
    """0.01 s and 0.0005 s a stream: 80 streams reach the target."""
    one = estimator()
    for now in range(400):
        streams = 40 if now % 2 else 60
        decode = engines(
            Role.DECODE, 4, num_ours=streams, itl_s=0.01 + 0.0005 * streams, kv_usage=0.1
        )
        serving = {Role.PREFILL: [], Role.DECODE: decode}
        needs = one.measure(report(decode), serving, now=float(now), dt_s=1.0)
    assert one.streams_per_engine == pytest.approx(80, rel=0.1)
    assert needs.decode > with_spare(Role.DECODE, 4 * 40 / 80)
    assert needs.decode < with_spare(Role.DECODE, 4 * 60 / 80) + 1


def test_decode_needs_the_engines_whose_blocks_are_in_use() -> None:
    one = estimator()
    decode = engines(Role.DECODE, 4, num_ours=1, itl_s=0.01, kv_usage=0.9)
    for now in range(200):
        serving = {Role.PREFILL: [], Role.DECODE: decode}
        needs = one.measure(report(decode), serving, now=float(now), dt_s=1.0)
    assert needs.decode == pytest.approx(4.0, rel=0.05)


def test_late_tickets_raise_the_need_unless_no_ratio_could_keep_them() -> None:
    serving = {Role.PREFILL: engines(Role.PREFILL, 2), Role.DECODE: []}

    def needed(sample: PrefillSample) -> float:
        one = estimator()
        for now in range(60):
            known = report([], sent_tokens=100)
            late = (*known.prefilled, *[sample] * 4)
            needs = one.measure(report([], prefilled=late), serving, now=float(now), dt_s=1.0)
        return needs.prefill

    assert needed(PrefillSample(1000, 14_000, 3.0)) > 2
    assert needed(PrefillSample(20_000, 0, 4.0)) < 1  # it takes four seconds by itself


def test_late_first_tokens_are_decodes_only_if_requests_wait_there() -> None:
    def needed(num_waiting: int) -> float:
        one = estimator()
        decode = engines(
            Role.DECODE, 2, num_ours=5, itl_s=0.01, kv_usage=0.2, num_waiting=num_waiting
        )
        serving = {Role.PREFILL: [], Role.DECODE: decode}
        late = (FirstTokenSample(5.0, 0.5),) * 10
        for now in range(60):
            needs = one.measure(report(decode, first_tokens=late), serving, now=float(now), dt_s=1)
        return needs.decode

    assert needed(3) > 2
    assert needed(0) < 1  # a slow network is no want of engines
