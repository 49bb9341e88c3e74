"""When blocks for a followed request are asked for: as late as the link allows, and not later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.lifecycle import pace as pace_module
from pdconn.lifecycle.pace import (
    FIXED_S,
    LEARNS_FROM_NBYTES,
    LEARNS_FROM_TOKENS,
    LenderRates,
    StreamPace,
)

TOKENS = st.integers(1, 1 << 20)
LONG = 1000
"""Tokens of the prompts of which a lender's pace is known, unless it says otherwise."""
SECONDS = st.floats(0.001, 1000.0)
RATES = st.floats(1.0, 1e12)


def known(tokens_per_s: float | None, bytes_per_s: float | None = None) -> LenderRates:
    rates = LenderRates(bytes_per_s=bytes_per_s)
    if tokens_per_s is not None:
        rates.learn_prefill(0, LONG, LONG / tokens_per_s)
    return rates


def begun(rates: LenderRates, num_tokens: int, cached: int = 0, at: float = 0.0) -> StreamPace:
    pace = StreamPace(rates, num_tokens)
    pace.note_announced(cached, at)
    return pace


def test_nothing_is_asked_for_while_a_request_waits_at_its_lender() -> None:
    assert StreamPace(known(1e3, 1e9), LONG).blocks_due_at(1e6, 5.0) is None


@pytest.mark.parametrize("rates", [LenderRates(), known(1e3), known(None, 1e9)])
def test_an_unknown_lender_is_asked_at_once(rates: LenderRates) -> None:
    assert begun(rates, 1000).blocks_due_at(1e6, 5.0) == 5.0


PROGRESS = st.tuples(
    st.integers(0, 1 << 16),
    st.integers(0, 9),
    st.integers(LEARNS_FROM_TOKENS, 8192),
    st.integers(1, 1 << 18),
)
"""Cached tokens, steps that are over, tokens of a step, tokens that are left."""


@given(RATES, RATES, PROGRESS, st.floats(0, 1e12))
def test_all_but_the_last_step_can_be_read_by_the_end_at_the_links_pace(
    tokens_per_s: float, bytes_per_s: float, progress: tuple[int, int, int, int], nbytes: float
) -> None:
    cached, steps, step, left = progress
    num_tokens = cached + steps * step + left
    pace = begun(LenderRates(bytes_per_s=bytes_per_s), num_tokens, cached)
    for number in range(1, steps + 1):
        pace.note_announced(cached + number * step, float(number))
    pace.rates.prefill = known(tokens_per_s).prefill
    due = pace.blocks_due_at(nbytes, float(steps))
    assert due is not None
    end = steps + left / tokens_per_s
    last = step if steps else 0
    read_s = nbytes * (num_tokens - last) / num_tokens / bytes_per_s
    rounding = 1e-6 * (end + abs(due))
    # With half of the link, it could not be read by then: blocks are not held much too early.
    assert due + read_s <= end + rounding
    assert due + 2 * read_s + FIXED_S >= end - rounding


@pytest.mark.parametrize("slack", [0.5, 4.0], ids=["too late", "too early"])
def test_that_law_notices_blocks_that_are_asked_for(
    slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(pace_module, "SLACK", slack)
    with pytest.raises(AssertionError):
        test_all_but_the_last_step_can_be_read_by_the_end_at_the_links_pace()


@given(RATES, RATES, TOKENS, st.floats(1, 1e9), st.floats(1.01, 10))
def test_a_slower_link_asks_earlier_and_a_slower_engine_later(
    tokens_per_s: float, bytes_per_s: float, num_tokens: int, nbytes: float, by: float
) -> None:
    def due(tokens: float, link: float) -> float:
        found = begun(known(tokens, link), num_tokens).blocks_due_at(nbytes, 0.0)
        assert found is not None
        return found

    as_known = due(tokens_per_s, bytes_per_s)
    assert due(tokens_per_s, bytes_per_s / by) <= as_known <= due(tokens_per_s / by, bytes_per_s)


SEEN = st.tuples(st.integers(0, 1 << 16), st.integers(1, 1 << 16), SECONDS)


@given(st.lists(SEEN, min_size=1), st.integers(0, 1 << 18), st.integers(1, 1 << 18))
def test_what_is_learned_lies_between_what_was_seen(
    seen: list[tuple[int, int, float]], begin: int, count: int
) -> None:
    rates = LenderRates()
    for first, tokens, seconds in seen:
        rates.learn_prefill(first, first + tokens, seconds)
        rates.learn_read(tokens << 16, seconds)
    assert rates.bytes_per_s is not None
    assert is_among(rates.bytes_per_s / (1 << 16), [n / s for _, n, s in seen])
    expected = rates.prefill_seconds(begin, begin + count)
    assert expected is not None
    assert is_among(expected / count, [s / n for _, n, s in seen])


def is_among(mean: float, seen: list[float]) -> bool:
    return min(seen) * (1 - 1e-9) <= mean <= max(seen) * (1 + 1e-9)


@given(st.floats(1e-6, 1), st.floats(0, 1e-3), st.integers(10, 14), st.sampled_from([256, 512]))
def test_later_tokens_are_expected_to_cost_what_they_cost_before(
    each_s: float, more_s: float, bits: int, step: int
) -> None:
    """A lender whose tokens cost more at later positions; half of the prompt is computed."""

    def computed_by(position: int) -> float:
        return each_s * position + more_s * position**2 / 2

    num_tokens = 1 << bits
    rates = LenderRates()
    for _ in range(3):
        pace = begun(rates, num_tokens)
        for done in range(step, num_tokens, step):
            pace.note_announced(done, computed_by(done))
        pace.note_completed(computed_by(num_tokens))
    pace = begun(rates, num_tokens)
    pace.note_announced(num_tokens // 2, computed_by(num_tokens // 2))
    whole_s = computed_by(num_tokens)
    assert pace.expected_end(0.0) == pytest.approx(whole_s, rel=0.05, abs=1e-9)


def test_that_law_notices_a_lender_whose_pace_is_taken_for_the_same_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    monkeypatch.setattr(pace_module, "_LEAST_BITS", 20)
    with pytest.raises(AssertionError):
        test_later_tokens_are_expected_to_cost_what_they_cost_before()


def test_positions_of_which_nothing_is_known_are_taken_for_the_nearest() -> None:
    rates = LenderRates()
    rates.learn_prefill(128, 256, 128 * 1.0)
    rates.learn_prefill(2048, 4096, 2048 * 3.0)
    assert rates.prefill_seconds(0, 128) == pytest.approx(128 * 1.0)
    assert rates.prefill_seconds(256, 512) == pytest.approx(256 * 1.0)
    assert rates.prefill_seconds(1024, 2048) == pytest.approx(1024 * 3.0)
    assert rates.prefill_seconds(1 << 15, 1 << 16) == pytest.approx((1 << 15) * 3.0)


def test_a_request_that_waits_is_expected_when_it_could_be_computed_at_the_earliest() -> None:
    pace = StreamPace(known(1e3), LONG)
    assert pace.expected_end(5.0) == pytest.approx(6.0)
    pace.note_announced(400, 7.0)
    assert pace.expected_end(9.0) == pytest.approx(7.6)
    assert StreamPace(LenderRates(), LONG).expected_end(5.0) is None


@given(RATES)
def test_a_lender_that_changes_its_pace_is_known_by_the_new_one_after_some_requests(
    before: float,
) -> None:
    rates = known(before)
    for _ in range(20):
        rates.learn_prefill(0, LONG, 1.0)
    assert rates.prefill_seconds(0, LONG) == pytest.approx(1.0, rel=1e-3, abs=1 / before)


def test_nothing_is_learned_from_what_says_little() -> None:
    rates = LenderRates()
    rates.learn_read(LEARNS_FROM_NBYTES - 1, 1.0)
    rates.learn_read(LEARNS_FROM_NBYTES, 0.0)
    pace = begun(rates, LONG)
    pace.note_announced(LEARNS_FROM_TOKENS - 1, 1.0)
    pace.note_announced(LONG, 0.0)
    assert rates == LenderRates()
    # What was too little counts with what comes next.
    pace.note_announced(LEARNS_FROM_TOKENS, 2.0)
    assert rates.prefill_seconds(0, LEARNS_FROM_TOKENS) == pytest.approx(2.0)


@given(st.integers(LEARNS_FROM_TOKENS, 1 << 16), st.integers(0, 1 << 16), SECONDS)
def test_cached_tokens_and_the_wait_are_no_part_of_the_pace(
    computed: int, cached: int, seconds: float
) -> None:
    rates = LenderRates()
    pace = begun(rates, cached + computed, cached, at=100.0)
    pace.note_announced(cached + computed, 100.0 + seconds)
    pace.note_completed(100.0 + seconds)
    assert rates.prefill_seconds(cached, cached + computed) == pytest.approx(seconds, rel=1e-6)


def test_a_request_that_was_never_announced_teaches_nothing() -> None:
    rates = LenderRates()
    StreamPace(rates, 1000).note_completed(50.0)
    assert rates == LenderRates()
