"""Limits of prefill: several times what an engine takes for so many tokens, or none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.pulls import prefill_patience
from pdconn.router.pulls.prefill_patience import (
    FARTHEST,
    FLOOR_S,
    LEARNS_EVERY_S,
    LEAST_SEEN,
    MULTIPLE,
    PrefillPatience,
)

P, OTHER = "http://p", "http://q"


class Engine:
    """An engine that takes ``fixed_s`` and ``token_s`` a token, and a patience that sees it."""

    def __init__(self, fixed_s: float, token_s: float, timeout_s: float | None = None) -> None:
        self.fixed_s, self.token_s, self.now = fixed_s, token_s, 0.0
        self.patience = PrefillPatience(timeout_s, lambda: self.now)

    def takes_s(self, tokens: int) -> float:
        """Seconds for so many tokens in flight."""
        return self.fixed_s + self.token_s * tokens

    def serve(self, *tokens: int) -> None:
        """One prompt after another."""
        for count in tokens:
            self.now += LEARNS_EVERY_S + 0.01
            self.patience.learn(P, count, self.takes_s(count))


USUAL = (300, 8000, 1000, 4000) * 6


@given(st.floats(0.001, 2.0), st.floats(1e-6, 1e-2), st.integers(0, 20_000))
def test_a_limit_is_several_times_what_it_takes(fixed_s: float, token_s: float, asked: int) -> None:
    """And never so short that an engine which is as fast as before misses it.

    Below the shortest prompt that was seen the line is only extrapolated.
    """
    engine = Engine(fixed_s, token_s)
    engine.serve(*USUAL)
    limit_s, takes_s = engine.patience.limit_s(P, asked), engine.takes_s(asked)
    assert limit_s is not None
    times = 2 if asked >= min(USUAL) else 1
    assert limit_s >= max(FLOOR_S, times * takes_s)
    assert limit_s <= max(FLOOR_S, 2 * MULTIPLE * takes_s)


def test_what_waits_there_counts_as_well() -> None:
    engine = Engine(0.1, 1e-3)
    engine.serve(*USUAL)
    idle_s, busy_s = (engine.patience.limit_s(P, tokens) for tokens in (1000, 30_000))
    assert idle_s is not None
    assert busy_s is not None
    assert busy_s > 20 * idle_s


@given(st.integers(0, 4000), st.integers(0, 1_000_000))
def test_an_engine_has_the_time_for_what_it_was_wrongly_believed_to_hold(
    asked: int, held: int
) -> None:
    engine = Engine(0.02, 1 / 20_000)
    engine.serve(*USUAL)
    limit_s, usual_s = (engine.patience.limit_s(P, asked, each) for each in (held, 0))
    assert limit_s is not None
    assert usual_s is not None
    takes_s = engine.takes_s(asked + held)
    assert 1.5 * takes_s <= limit_s <= max(usual_s, 3 * takes_s)


def test_nothing_is_known_without_measurements_nor_far_beyond_them() -> None:
    engine = Engine(0.01, 1e-4)
    for _ in range(LEAST_SEEN - 1):
        engine.serve(1000)
        assert engine.patience.limit_s(P, 1000) is None
    engine.serve(1000)
    assert engine.patience.limit_s(P, int(FARTHEST * 1000)) is not None
    assert engine.patience.limit_s(P, int(FARTHEST * 1000) + 1) is None
    assert engine.patience.limit_s(OTHER, 1000) is None
    engine.now += 3600
    assert engine.patience.limit_s(P, 1000) is None, "it may be another by now"


def test_a_busy_engine_is_measured_now_and_then_and_a_slower_one_is_followed() -> None:
    engine = Engine(0.01, 1e-3)
    engine.serve(*USUAL)
    for _ in range(1000):
        engine.patience.learn(P, 1000, 100.0)  # all at once
    assert (engine.patience.limit_s(P, 1000) or 0.0) < 100.0
    engine.token_s *= 10
    engine.serve(*USUAL)
    assert (engine.patience.limit_s(P, 8000) or 0.0) >= 0.5 * MULTIPLE * engine.takes_s(8000)


@pytest.mark.parametrize(("given_s", "limit_s"), [(2.0, 2.0), (math.inf, None)])
def test_users_decide(given_s: float, limit_s: float | None) -> None:
    engine = Engine(0.01, 1e-3, given_s)
    engine.serve(*USUAL)
    assert engine.patience.limit_s(P, 10**9) == limit_s
    assert not engine.patience.is_learned


def test_engines_that_come_and_go_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(0.01, 1e-3)
    monkeypatch.setattr(engine.patience._lines, "most", 10)
    for number in range(100):
        engine.patience.learn(f"http://{number}", 10, 0.1)
    assert len(engine.patience._seen) == len(engine.patience._lines) == 10


def test_those_laws_notice_a_limit_that_ignores_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    lines = prefill_patience.Lines
    monkeypatch.setattr(
        lines, "add_measurement", lambda self, *_, add=lines.add_measurement: add(self, P, 0, 1, 0)
    )
    with pytest.raises(AssertionError):
        test_what_waits_there_counts_as_well()
