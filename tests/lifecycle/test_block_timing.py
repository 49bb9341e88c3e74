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
    SLACK,
    LenderRates,
    StreamPace,
)

TOKENS = st.integers(1, 1 << 20)
LONG = 1000
"""Tokens of the prompts of which a lender's pace is known, unless it says otherwise."""
SECONDS = st.floats(0.001, 1000.0)
RATES = st.floats(1.0, 1e12)


def known(tokens_per_s: float | None, bytes_per_s: float | None = None) -> LenderRates:
    each = {} if tokens_per_s is None else {LONG.bit_length(): 1 / tokens_per_s}
    return LenderRates(each, bytes_per_s)


def begun(rates: LenderRates, num_tokens: int, cached: int = 0, at: float = 0.0) -> StreamPace:
    pace = StreamPace(rates, num_tokens)
    pace.note_announced(cached, at)
    return pace


def test_nothing_is_asked_for_while_a_request_waits_at_its_lender() -> None:
    assert StreamPace(known(1e3, 1e9), LONG).blocks_due_at(1e6, 5.0) is None


@pytest.mark.parametrize("rates", [LenderRates(), known(1e3), known(None, 1e9)])
def test_an_unknown_lender_is_asked_at_once(rates: LenderRates) -> None:
    assert begun(rates, 1000).blocks_due_at(1e6, 5.0) == 5.0


@given(st.builds(known, RATES, RATES), TOKENS, st.floats(0, 1), st.floats(0, 1e12), SECONDS)
def test_what_is_read_at_the_links_pace_is_there_when_the_request_is_computed(
    rates: LenderRates, num_tokens: int, share: float, nbytes: float, at: float
) -> None:
    bytes_per_s, [each_s] = rates.bytes_per_s, rates.prefill_s.values()
    assert bytes_per_s is not None
    pace = begun(rates, num_tokens)
    done = int(share * num_tokens)
    pace.note_announced(done, at)
    due = pace.blocks_due_at(nbytes, at)
    assert due is not None
    end = at + (num_tokens - done) * each_s
    # Read from then on, it is there by the end; with half of the link, it would not be.
    assert due + nbytes / bytes_per_s <= end + 1e-6 * abs(end)
    assert due + 2 * nbytes / bytes_per_s + FIXED_S >= end - 1e-6 * abs(end - due) - 1e-6 * end
    assert SLACK < 2


@pytest.mark.parametrize("slack", [0.5, 4.0], ids=["too late", "too early"])
def test_that_law_notices_blocks_that_are_asked_for(
    slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(pace_module, "SLACK", slack)
    with pytest.raises(AssertionError):
        test_what_is_read_at_the_links_pace_is_there_when_the_request_is_computed()


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


@given(st.lists(st.tuples(st.integers(LEARNS_FROM_TOKENS, 1 << 20), SECONDS), min_size=1))
def test_what_is_learned_lies_between_what_was_seen(seen: list[tuple[int, float]]) -> None:
    rates = LenderRates()
    for num_tokens, seconds in seen:
        rates.learn_prefill(num_tokens, seconds)
        rates.learn_read(num_tokens << 16, seconds)
    assert rates.bytes_per_s is not None
    speeds = [num_tokens / seconds for num_tokens, seconds in seen]
    assert is_among(rates.bytes_per_s / (1 << 16), speeds)
    for num_tokens, _ in seen:
        alike = [s / n for n, s in seen if n.bit_length() == num_tokens.bit_length()]
        each_s = rates.seconds_per_token(num_tokens)
        assert each_s is not None
        assert is_among(each_s, alike)


def is_among(mean: float, seen: list[float]) -> bool:
    return min(seen) * (1 - 1e-9) <= mean <= max(seen) * (1 + 1e-9)


@given(st.dictionaries(st.integers(7, 20), SECONDS, min_size=1), st.integers(1, 1 << 20))
def test_a_prompt_is_expected_to_take_as_long_as_those_of_about_its_length(
    seconds: dict[int, float], num_tokens: int
) -> None:
    rates = LenderRates()
    for bits, each_s in seconds.items():
        rates.learn_prefill(1 << (bits - 1), each_s * (1 << (bits - 1)))
    away = min(abs(bits - num_tokens.bit_length()) for bits in seconds)
    nearest = [s for bits, s in seconds.items() if abs(bits - num_tokens.bit_length()) == away]
    expected = rates.seconds_per_token(num_tokens)
    assert any(expected == pytest.approx(each_s) for each_s in nearest)


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
        rates.learn_prefill(LONG, 1.0)
    assert rates.seconds_per_token(LONG) == pytest.approx(1e-3, rel=1e-3, abs=1e-3 / before)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_nothing_is_learned_from_what_says_little(seconds: float) -> None:
    rates = LenderRates()
    rates.learn_prefill(LEARNS_FROM_TOKENS - 1, 1.0)
    rates.learn_read(LEARNS_FROM_NBYTES - 1, 1.0)
    rates.learn_prefill(LEARNS_FROM_TOKENS, seconds)
    rates.learn_read(LEARNS_FROM_NBYTES, seconds)
    assert rates == LenderRates()


@given(st.integers(LEARNS_FROM_TOKENS, 1 << 16), st.integers(0, 1 << 16), SECONDS)
def test_cached_tokens_and_the_wait_are_no_part_of_the_pace(
    computed: int, cached: int, seconds: float
) -> None:
    rates = LenderRates()
    pace = begun(rates, cached + computed, cached, at=100.0)
    pace.note_announced(cached + computed, 100.0 + seconds)
    pace.note_completed(100.0 + seconds)
    assert rates.seconds_per_token(computed) == pytest.approx(seconds / computed, rel=1e-6)


def test_a_request_that_was_never_announced_teaches_nothing() -> None:
    rates = LenderRates()
    StreamPace(rates, 1000).note_completed(50.0)
    assert rates == LenderRates()
