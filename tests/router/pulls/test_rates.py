"""Lines over tokens: what was true comes out, and what is true now soon does."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.pulls.rates import Line, Lines

TOKENS = (300, 1000, 4000, 12_000)


def seen(line: Line, fixed_s: float, token_s: float, rng: Random, count: int) -> Line:
    """After ``count`` observations that are up to 10 % off."""
    for _ in range(count):
        tokens = rng.randint(100, 16_000)
        line.add_measurement(tokens, (fixed_s + token_s * tokens) * rng.uniform(0.9, 1.1))
    return line


def worst(line: Line, fixed_s: float, token_s: float) -> float:
    """The largest relative error at some lengths."""
    right = {tokens: fixed_s + token_s * tokens for tokens in TOKENS}
    return max(abs(line.seconds_for(tokens) / true - 1) for tokens, true in right.items())


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_found_whatever_was_assumed(seed: int) -> None:
    rng = Random(seed)
    fixed_s, token_s = rng.uniform(0.005, 0.1), 10 ** rng.uniform(-6, -3)
    line = seen(Line(0.02, 1e-4), fixed_s, token_s, rng, 60)
    assert worst(line, fixed_s, token_s) < 0.6
    exact = Line(0.02, 1e-4)
    for tokens in TOKENS * 20:
        exact.add_measurement(tokens, fixed_s + token_s * tokens)
    assert worst(exact, fixed_s, token_s) < 0.01


def test_a_link_that_becomes_slow_is_followed() -> None:
    """Negative control: not by a line that forgets nothing."""
    errors = []
    for kept in (0.9, 1.0):
        line, rng = Line(0.02, 1e-4, kept=kept), Random(1)
        seen(line, 0.02, 1e-6, rng, 300)
        seen(line, 0.02, 1e-4, rng, 20)
        errors.append(worst(line, 0.02, 1e-4))
    assert errors[0] < 0.4 < errors[1]


def test_one_that_waited_for_something_else_counts_little() -> None:
    line = Line(0.02, 1e-4)
    for tokens in TOKENS * 10:
        line.add_measurement(tokens, 0.02 + 1e-4 * tokens)
    before = line.seconds_for(4000)
    line.add_measurement(4000, 30.0)
    assert line.seconds_for(4000) < 3 * before


@given(
    st.lists(
        st.tuples(st.integers(0, 10**7), st.floats(0, 1e4, allow_subnormal=False)), max_size=60
    )
)
def test_it_never_says_less_than_nothing(observed: list[tuple[int, float]]) -> None:
    line = Line(0.02, 1e-4)
    for tokens, seconds in observed:
        line.add_measurement(tokens, seconds)
        assert 0 <= line.seconds_for(0) <= line.seconds_for(1000) <= line.seconds_for(10**6)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(-1, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))]
)
def test_what_cannot_be_is_refused(tokens: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Line(0.02, 1e-4).add_measurement(tokens, seconds)


def test_what_was_not_seen_is_as_assumed_and_the_oldest_is_forgotten() -> None:
    lines = Lines(0.02, 1e-4, most=2)
    for now, key in enumerate(("a", "b", "a", "c")):
        lines.add_measurement(key, 1000, 5.0, now)
    assert len(lines) == 2
    assert lines.line_of("b", 4.0).seconds_for(1000) == pytest.approx(0.12)
    assert lines.line_of("a", 4.0).seconds_for(1000) > 1
    assert lines.line_of("c", 4.0).num_seen == 1


def test_what_was_slow_is_tried_again() -> None:
    lines = Lines(0.02, 1e-4, stale_s=60.0)
    lines.add_measurement("a", 1000, 5.0, now=100.0)
    assert lines.line_of("a", 160.0).seconds_for(1000) > 1
    assert lines.line_of("a", 160.1).seconds_for(1000) == pytest.approx(0.12)
    lines.add_measurement("a", 1000, 0.12, now=200.0)
    assert lines.line_of("a", 200.0).num_seen == 1


def test_what_is_as_it_was_when_tried_again_is_known_again_and_for_longer() -> None:
    """Negative control: not one that has become another."""
    for then_s, num_seen, is_known_later in ((4.0, 3, True), (0.12, 1, False)):
        lines = Lines(0.02, 1e-4, stale_s=60.0)
        for now in (0.0, 1.0):
            lines.add_measurement("a", 1000, 5.0, now)
        assert lines.line_of("a", 90.0).seconds_for(1000) == pytest.approx(0.12)  # to be tried
        lines.add_measurement("a", 1000, then_s, 90.0)
        assert lines.line_of("a", 90.0).num_seen == num_seen
        assert (lines.line_of("a", 90.0 + 119.0).num_seen > 0) is is_known_later


def test_what_is_tried_in_vain_is_left_alone_ever_longer_but_not_for_ever() -> None:
    lines, now, waits = Lines(0.02, 1e-4, stale_s=60.0), 0.0, []
    for _ in range(8):
        lines.add_measurement("a", 1000, 5.0, now)
        since = now
        while lines.line_of("a", now).num_seen:
            now += 1.0
        waits.append(now - since)
    assert waits == [61, 121, 241, 481, 961, 961, 961, 961]


def test_a_line_is_in_doubt_where_little_was_seen() -> None:
    line = Line(0.02, 1e-4)
    assert line.doubt(1000) == 0.0  # what is assumed is believed
    line.add_measurement(600, 0.08)
    once = line.doubt(8000)
    rng = Random(1)
    for _ in range(30):
        line.add_measurement(rng.randint(500, 900), 0.02 + 1e-4 * 700)
    assert line.doubt(700) < 0.05 * line.seconds_for(700)
    assert line.doubt(8000) > 3 * line.doubt(700)
    for _ in range(10):
        line.add_measurement(8000, 0.82)
    assert line.doubt(8000) < once


def test_what_is_in_doubt_covers_what_is_true() -> None:
    """Of lines found from few observations: mostly within two standard errors."""
    within = 0
    for seed in range(200):
        rng = Random(seed)
        line = Line(0.03, 2e-4)  # assumed rightly: what is left is scatter
        for _ in range(12):
            tokens = rng.randint(300, 6000)
            line.add_measurement(tokens, (0.03 + 2e-4 * tokens) * rng.uniform(0.92, 1.08))
        within += abs(line.seconds_for(3000) - 0.63) <= 2 * line.doubt(3000)
    assert within >= 180
