"""Turns of a busy lender are spaced; a lender that few readers use never waits."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdconn.lender.server import TurnPacer

PERIOD_S = 0.25
SPARE = 4


def turns(arrivals: list[float], spare: int = SPARE) -> list[tuple[float, float]]:
    """Each message's arrival and the turn that handles it, of a thread that heeds the pacer."""
    pacer = TurnPacer(PERIOD_S, spare)
    handled, free_at, at = [], 0.0, 0
    while at < len(arrivals):
        now = max(arrivals[at], free_at)
        while at < len(arrivals) and arrivals[at] <= now:
            handled.append((arrivals[at], now))
            at += 1
        free_at = now + pacer.took(now)
    return handled


def longest_wait_s(handled: list[tuple[float, float]]) -> float:
    return max(turn - arrived for arrived, turn in handled)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=80))
def test_no_message_waits_longer_than_a_period(gaps: list[int]) -> None:
    arrivals = [gap / 64 for gap in itertools.accumulate(gaps)]
    assert longest_wait_s(turns(arrivals)) <= PERIOD_S


@given(st.lists(st.integers(0, 40), min_size=1, max_size=80))
def test_turns_in_any_time_are_bounded(gaps: list[int]) -> None:
    taken = sorted({turn for _, turn in turns([gap / 64 for gap in itertools.accumulate(gaps)])})
    for first, last in itertools.combinations(range(len(taken)), 2):
        assert last - first <= SPARE + (taken[last] - taken[first]) / PERIOD_S


def test_messages_further_apart_than_a_period_never_wait() -> None:
    assert longest_wait_s(turns([PERIOD_S * number for number in range(100)])) == 0.0


def test_a_few_messages_after_a_pause_never_wait_and_more_do() -> None:
    """A pull's claim and its confirmation shortly after are such; without spare turns they wait."""
    close = [number / 1024 for number in range(SPARE)]
    assert longest_wait_s(turns(close)) == 0.0
    assert longest_wait_s(turns(close, spare=0)) > 0.0
    flood = [number / 1024 for number in range(200)]
    assert len({turn for _, turn in turns(flood)}) < len(flood) / 20
