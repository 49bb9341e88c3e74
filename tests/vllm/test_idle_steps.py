"""When the scheduler's process sleeps: in idle steps, while nothing is expected, and no longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.vllm.idle_steps import IDLE_STEP_S, NOTICE_S, IdleSteps


class Engine:
    """Its time passes while it sleeps, and by a millisecond each step."""

    def __init__(self, quiet_s: float) -> None:
        self.now = 100.0
        self.quiet_until = self.now + quiet_s
        self.slept: list[float] = []
        self.steps = IdleSteps(lambda: self.quiet_until, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def step(self, num_tokens: int = 0) -> bool:
        self.now += 0.001
        return self.steps.rest(num_tokens)


@given(st.floats(0.0, 10.0), st.lists(st.integers(0, 1), max_size=60))
def test_it_never_sleeps_into_what_is_expected(quiet_s: float, steps: list[int]) -> None:
    engine, before = Engine(quiet_s), 1
    for num_tokens in steps:
        slept = len(engine.slept)
        has_slept = engine.step(num_tokens)
        assert has_slept == (len(engine.slept) > slept)
        assert not (has_slept and (num_tokens or before)), "a step with tokens may be in flight"
        assert not has_slept or engine.now <= engine.quiet_until - NOTICE_S + 1e-9
        before = num_tokens
    assert all(0 < seconds <= IDLE_STEP_S for seconds in engine.slept)


@pytest.mark.parametrize(("quiet_s", "sleeps"), [(0.0, 0), (NOTICE_S, 0), (0.1, 22)])
def test_it_sleeps_until_then(quiet_s: float, sleeps: int) -> None:
    engine = Engine(quiet_s)
    for _ in range(100):
        engine.step()
    assert len(engine.slept) == sleeps
