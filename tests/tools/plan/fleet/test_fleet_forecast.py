"""Which ratio suits a load: rates from the model, ratios by hand, and what following gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.router.roles.role_controller import RoleTargets
from pdconn.tools.cli.main import main
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.fleet.fleet_forecast import (
    MOST_STREAMS,
    CardRates,
    FleetQuestion,
    engine_rates,
    forecast_fleet,
)
from pdconn.tools.plan.fleet.fleet_forecast_report import FleetForecastReport
from pdconn.tools.plan.fleet.fleet_load import EngineRates, LoadPhase, arrivals
from pdconn.tools.plan.fleet.simulated_engine import SimulatedEngine, SimulatedRequest
from pdconn.tools.plan.forecast import Forecast, forecast
from pdconn.tools.plan.link import Link
from pdconn.tools.plan.model_shape import ModelShape, sorts_of
from pdconn.tools.plan.plan_errors import ShapeError
from registration.references import AttentionKind

TARGETS = RoleTargets(ttft_s=2.0, itl_s=0.05)
RATES = EngineRates(prefill_tokens_per_s=8000, step_s=0.015, stream_s=0.0005, most_streams=128)
PROMPTS, ANSWERS = LoadPhase(300, 3.5, 6000, 20), LoadPhase(300, 4.0, 200, 1000)
LAYERS, ROW = 4, 1024
NBYTES = LAYERS * ROW
"""KV of a token."""


def pull() -> Forecast:
    model = ModelShape("u", sorts_of([AttentionKind.FULL] * LAYERS, None, 1, ROW))
    engine = EngineShape(model)
    return forecast(engine, engine, 1000, 0, Link("test", 1e9, 0.0, "made up"))


def in_blocks(tokens: int) -> int:
    """Tokens of the blocks that hold so many."""
    return -(-tokens // 16) * 16


def test_a_stream_costs_what_reading_its_kv_takes() -> None:
    phase = LoadPhase(60, 1.0, 1001, 200)
    card = CardRates(prefill_tokens_per_s=5000, step_s=0.01, memory_bytes_per_s=1e9)
    rates = engine_rates(pull(), card, [phase])
    assert rates.stream_s == pytest.approx(in_blocks(1001 + 100 - 1) * NBYTES / 1e9)
    assert rates.pull_s == pytest.approx(in_blocks(1000) * NBYTES / 1e9)
    assert rates.most_streams == MOST_STREAMS
    small = engine_rates(pull(), replace(card, kv_nbytes=10 * in_blocks(1100) * NBYTES), [phase])
    assert small.most_streams == 10
    with pytest.raises(ShapeError, match="kv-memory"):
        engine_rates(pull(), replace(card, kv_nbytes=1000), [phase])


def test_the_ratio_of_each_phase_has_the_engines_that_its_work_takes() -> None:
    """3.5 prompts a second of 0.76 s each keep 2.7 engines busy, so two cannot serve them; 4000
    tokens a second at up to 2000 an engine need more than two of decode."""
    made = forecast_fleet(FleetQuestion(6, (PROMPTS, ANSWERS), TARGETS), RATES)
    shares = {one.prefill: one.shares for one in made.ratios}
    assert sorted(shares) == [1, 2, 3, 4, 5]
    assert shares[2][0] < 0.1
    assert made.best_of(0).prefill >= 4
    assert shares[4][1] < 0.5
    assert made.best_of(1).prefill <= 3
    assert made.best_of(0).shares[0] > 0.9 < made.best_of(1).shares[1]


def test_following_a_load_is_better_than_any_one_ratio_of_it() -> None:
    phases = (PROMPTS, ANSWERS, PROMPTS)
    made = forecast_fleet(
        FleetQuestion(5, tuple(replace(one, seconds=600) for one in phases), TARGETS), RATES
    )
    assert made.followed.unended == 0
    assert made.followed_share > made.share_of(made.best_single)
    page = FleetForecastReport(made).document()
    assert page["followed"]["changes"] == len(made.followed.moves) >= 2
    text = FleetForecastReport(made).text(100)
    best = made.best_of(1)
    assert f"phase 2: {best.prefill} prefill and {5 - best.prefill} decode" in text


def test_a_large_fleet_is_tried_around_its_best_ratio() -> None:
    phase = LoadPhase(20, 40.0, 6000, 20)
    made = forecast_fleet(FleetQuestion(60, (phase,), TARGETS), RATES)
    tried = [one.prefill for one in made.ratios]
    best = made.best_of(0).prefill
    assert len(tried) < 59
    assert {best - 1, best, best + 1} & set(tried) == {best - 1, best, best + 1} & set(range(1, 60))


def test_arrivals_have_the_rate_and_the_lengths_that_were_asked_for() -> None:
    drawn = list(arrivals([LoadPhase(2000, 5.0, 1000, 50)], seed=3))
    assert len(drawn) == pytest.approx(10_000, rel=0.05)
    assert sum(one.prompt_tokens for one in drawn) / len(drawn) == pytest.approx(1000, rel=0.05)
    assert sum(one.answer_tokens for one in drawn) / len(drawn) == pytest.approx(50, rel=0.05)
    assert drawn == list(arrivals([LoadPhase(2000, 5.0, 1000, 50)], seed=3))
    assert drawn != list(arrivals([LoadPhase(2000, 5.0, 1000, 50)], seed=4))


def test_a_ramp_passes_from_one_phase_to_the_next() -> None:
    phases = [LoadPhase(100, 5.0, 1000, 50), LoadPhase(1000, 5.0, 10, 50, ramp_s=1000)]
    ramp = [one for one in arrivals(phases) if one.phase == 1]
    early = [one.prompt_tokens > 100 for one in ramp if one.at_s < 350]
    late = [one.prompt_tokens > 100 for one in ramp if one.at_s > 850]
    assert sum(early) / len(early) > 0.75
    assert sum(late) / len(late) < 0.25


def test_streams_of_an_engine_share_its_steps() -> None:
    """Two streams, 0.02 s a step alone and 0.03 s together: by hand."""
    rates = EngineRates(8000, 0.02, 0.01, most_streams=2)
    engine = SimulatedEngine("e", rates)
    (drawn, *_) = arrivals([LoadPhase(100, 1.0, 10, 10)])
    requests = [SimulatedRequest(replace(drawn, answer_tokens=n)) for n in (11, 21, 5)]
    for number, request in enumerate(requests):
        engine.expect_stream(number, request)
    engine.start_stream(0, 0.0)
    engine.start_stream(1, 0.1)  # the first has 5 of its 10 further tokens
    engine.start_stream(2, 0.1)
    assert engine.num_waiting == 1  # there is room for two
    assert engine.next_end_s() == pytest.approx(0.1 + 5 * 0.03)
    assert engine.end_stream(0.25) is requests[0]
    assert (engine.num_waiting, engine.num_streams) == (0, 2)
    assert engine.next_end_s() == pytest.approx(0.25 + 4 * 0.03)


COMMAND = [
    "plan", "--model", "llama-3.1-8b", "--fleet", "3", "--load", "1.5,6k,100,120",
    "--prefill-rate", "8000", "--step-ms", "15", "--ttft-target", "2", "--itl-target", "0.05",
]  # fmt: skip


def test_the_command_shows_the_ratios(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main([*COMMAND, f"--json={path}"]) == 0
    fleet = json.loads(path.read_text("utf-8"))["fleet"]
    assert [one["prefill"] for one in fleet["ratios"]] == [1, 2]
    assert fleet["phases"][0]["best_prefill"] == 2
    assert main(COMMAND) == 0
    assert "2 prefill and 1 decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("without", "named"),
    [("--load", "--load"), ("--step-ms", "--step-ms"), ("--ttft-target", "--ttft-target")],
)
def test_what_is_missing_is_named(
    without: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = COMMAND.index(without)
    assert main([*COMMAND[:at], *COMMAND[at + 2 :]]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("load", ["1,2", "x,2k,3", "0,2k,3", "1,2k,3,-5", "1,2,3,4,5", "1,2kk,3"])
def test_a_malformed_load_is_refused(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = COMMAND.index("--load") + 1
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND[:at], load, *COMMAND[at + 1 :]])
    assert ended.value.code == 2
    assert "3.5,8k,200" in capsys.readouterr().err
