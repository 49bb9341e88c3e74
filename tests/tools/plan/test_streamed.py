"""What a followed pull leaves after prefill's last step: by hand, by token, and measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.tools.lab.model import write_model
from pdconn.tools.plan import streamed as streamed_module
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.forecast import Forecast, forecast
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.link import Link, parse_link
from pdconn.tools.plan.model_shape import ModelShape, sorts_of
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.streamed import forecast_streamed
from registration.references import AttentionKind
from tests.throughput.followed.__main__ import LONG

FOLLOWED = Path(__file__).parents[2] / "throughput" / "results" / "followed.json"
BLOCK, LAYERS, ROW = 16, 3, 1024
NBYTES = LAYERS * ROW
"""Bytes of a token."""
LINK = Link("test", 1e6, 0.0, "made up", round_trip_s=0.03)


def pull(prompt: int, hit: int = 0, link: Link = LINK) -> Forecast:
    engine = EngineShape(ModelShape("u", sorts_of([AttentionKind.FULL] * LAYERS, None, 1, ROW)))
    return forecast(engine, engine, prompt, hit, link)


def test_one_chunk_hides_the_claim_and_nothing_else() -> None:
    made = pull(1000)
    whole = forecast_streamed(made, 500.0, 1000)
    assert whole.visible_s == pytest.approx(made.seconds - LINK.round_trip_s)
    assert (whole.prefill_s, whole.early_bytes, whole.reads) == (2.0, 0, 1)


def test_the_last_chunk_is_left_and_what_the_link_could_not_carry_meanwhile() -> None:
    # 10 steps of 160 tokens, 0.49 MB each and 0.49 s on the link: whole blocks.
    made, step_s = pull(1600), 160 * NBYTES / 1e6
    last_s = 160 * NBYTES / 1e6 + 2 * LINK.round_trip_s
    slow_prefill = forecast_streamed(made, 100.0, 160)
    assert slow_prefill.visible_s == pytest.approx(last_s)
    assert slow_prefill.early_bytes == 9 * 160 * NBYTES
    assert slow_prefill.reads == 10
    fast_prefill = forecast_streamed(made, 1600.0, 160)
    # 1 s of prefill, of which the first step is 0.1; the link carries 1 MB a second.
    assert fast_prefill.early_bytes == 900_000
    assert fast_prefill.reads < 10
    assert fast_prefill.visible_s == pytest.approx(0.1 + 9 * step_s + last_s - 1.0)


def test_what_decode_has_cached_is_not_awaited() -> None:
    made = pull(1600, hit=800)
    assert forecast_streamed(made, 100.0, 160).early_bytes == 640 * NBYTES


def by_steps_of_time(made: Forecast, rate: float, chunk: int) -> float:
    """Seconds after prefill's last step, by a link that carries byte after byte when it may."""
    pulled = -(-(made.prompt_tokens - 1) // BLOCK) * BLOCK
    until = made.prompt_tokens / rate
    now, read = 0.0, 0
    for start in range(0, made.prompt_tokens, chunk):
        computed = min(start + chunk, made.prompt_tokens)
        is_last = computed == made.prompt_tokens
        written = pulled if is_last else computed // BLOCK * BLOCK
        now = max(now, computed / rate)
        for _ in range(read, written):
            now += NBYTES / LINK.bytes_per_s
        read = max(read, written)
    return now - until + 2 * LINK.round_trip_s


@given(st.integers(2, 400), st.integers(1, 300), st.floats(20.0, 2000.0))
def test_it_is_what_a_link_takes_token_by_token(prompt: int, chunk: int, rate: float) -> None:
    made = pull(prompt)
    found = forecast_streamed(made, rate, chunk)
    assert found.visible_s == pytest.approx(by_steps_of_time(made, rate, chunk))
    assert found.visible_s <= made.seconds + 1e-9


def test_that_notices_a_forecast_that_reads_before_a_step_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = streamed_module._steps
    early = lambda tokens, chunk: (each + chunk for each in real(tokens, chunk))  # noqa: E731
    monkeypatch.setattr(streamed_module, "_steps", early)
    made, expected = pull(400), by_steps_of_time(pull(400), 2000.0, 32)
    assert forecast_streamed(made, 2000.0, 32).visible_s != pytest.approx(expected)


def measured() -> list[dict[str, Any]]:
    runs = json.loads(FOLLOWED.read_text(encoding="utf-8"))["runs"]
    return list(runs["links"]["result"]["measured"])


@pytest.mark.parametrize("one", measured(), ids=lambda one: f"{one['mbits']:g}-{one['mode']}")
def test_it_is_within_a_quarter_of_what_was_measured(one: dict[str, Any], tmp_path: Path) -> None:
    """Over cables that ``tbf`` limits, between engines in namespaces (``docs/benchmarks.md``)."""
    folder = write_model(tmp_path / "long", LONG)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    engine = EngineShape(model_shape(config, "long", None, "auto"))
    # The lab's engines store float32, twice what the forecast takes a number for.
    link = parse_link(f"{one['mbits'] / 2:g}Mb/s")
    made = forecast(engine, engine, one["tokens"], 0, link)
    predicted = made.seconds
    if one["mode"] == "on":
        predicted = forecast_streamed(made, one["tokens"] / one["prefill_s"], 512).visible_s
    assert predicted == pytest.approx(one["visible_s"], rel=0.25)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ShapeError, match="prefill-rate: expected tokens per second, above 0"):
        forecast_streamed(pull(100), rate)


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(ShapeError, match="chunk: expected at least 1 token, got 0"):
        forecast_streamed(pull(100), 1.0, 0)
