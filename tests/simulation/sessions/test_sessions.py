"""What agents gain that say ``keep``, and what others lose, over a fleet in virtual time.

The same as ``python -m tests.throughput.agents.simulated``, at a size of seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from pdconn.router.fleet.loads import LoadReading
from pdconn.router.routing.session_table import SessionTable
from pdconn.vllm.keeps.keeping import Keeping
from pdconn.vllm.values import KeepShares
from tests.simulation.sessions.engine import CacheSize, Speed
from tests.simulation.sessions.fleet import Fleet, Load, Shape
from tests.simulation.sessions.ways import (
    ALONE,
    KEEP,
    NO_PAUSE,
    PREFETCH,
    ROOMY,
    WITHOUT,
    Row,
    run_way,
)

SIZE = CacheSize(16, 600, chunk_tokens=2048, longest=4096)
SHAPE = Shape(
    2, 1, SIZE, replace(SIZE, num_blocks=1800), Speed(6000.0, 200_000.0, 0.005), alone_below=32
)
LOAD = Load(
    6, 5, 1000, 60, 10, (1.0, 7.0), one_off=100, at_once=4, spread_s=4.0, most_s=60.0
)  # fmt: skip
TIGHT = replace(SHAPE, prefill_cache=replace(SIZE, num_blocks=240, shares=KeepShares(0.9, 0.9)))
"""Three sessions fill nine tenths of a cache, and what is left has no room for a large prompt."""
LARGE = {"one_off": 500, "at_once": 1}
SOME_MOVE = 2
"""A seed with which some sessions come back at another engine, as with most."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def row(way: str) -> Row:
    """Of a way at this size."""
    return run_way(way, SHAPE, LOAD, lead_s=1.0)


def ran(shape: Shape, seed: int = 0, **changed: Any) -> Fleet:
    """A fleet whose turns say ``keep``, after its run."""
    fleet = Fleet(shape, replace(LOAD, keeps=True, **changed), seed)
    try:
        fleet.run()
    finally:
        fleet.close()
    return fleet


# Laws


def test_what_is_kept_is_hit_and_the_next_first_token_takes_a_part_of_the_time() -> None:
    kept, without = row(KEEP), row(WITHOUT)
    assert kept.flood_caches is not None
    assert kept.flood_caches >= 2, "the flood would have evicted the sessions"
    assert kept.turns == LOAD.sessions * (LOAD.turns - 1)
    assert kept.broken == 0
    assert kept.moved == 0
    assert kept.least_hit is not None
    assert kept.least_hit >= 0.95
    assert kept.first_ms is not None
    assert without.first_ms is not None
    # The rest is its wait for a prompt of the flood, beside 170 ms for 1000 tokens.
    assert kept.first_ms <= 0.4 * without.first_ms


@pytest.mark.matrix
@pytest.mark.parametrize("other", [ALONE, ROOMY])
def test_the_flood_loses_little_to_what_is_kept(other: str) -> None:
    kept, beside = row(KEEP), row(other)
    assert kept.flood_per_s is not None
    assert beside.flood_per_s is not None
    assert kept.flood_per_s >= 0.9 * beside.flood_per_s
    assert kept.preempted == 0


def test_no_prompt_of_the_flood_waits_longer_because_sessions_are_kept() -> None:
    assert row(KEEP).flood_worst_s <= 1.2 * row(ROOMY).flood_worst_s


@pytest.mark.matrix
def test_a_turn_that_was_prefetched_is_like_one_without_a_pause() -> None:
    prefetched, hot = row(PREFETCH), row(NO_PAUSE)
    assert prefetched.first_ms is not None
    assert hot.first_ms is not None
    assert prefetched.first_ms <= 1.2 * hot.first_ms


def missed_untold(fleet: Fleet) -> tuple[int, int]:
    """Later turns that missed what was kept for them, and those that were not told why."""
    assert fleet.is_over
    missed = [turn for turn in fleet.turns if turn.hit < 0.95]
    return len(missed), sum(not turn.broken for turn in missed)


def test_where_promises_do_not_fit_they_give_way_and_each_session_that_misses_is_told() -> None:
    fleet = ran(TIGHT, SOME_MOVE, **LARGE)
    broken = fleet.count("promises_broken_room") + fleet.count("promises_broken_share")
    assert broken > 0
    missed, untold = missed_untold(fleet)
    assert missed > 0
    assert any(turn.moved for turn in fleet.turns), "some were told by another engine's answer"
    assert untold == 0
    assert max(fleet.waits) <= 2.0, "nothing starves"


def hits_without_events() -> list[float]:
    """Of later turns, where the router does not see what caches hold."""
    fleet = ran(replace(SHAPE, prefill=3, publishes=False), sessions=4)
    assert fleet.is_over
    return [turn.hit for turn in fleet.turns]


@pytest.mark.matrix
def test_without_events_later_turns_go_to_the_engine_that_keeps_them() -> None:
    assert min(hits_without_events()) >= 0.95


# Negative controls


@pytest.mark.matrix
def test_without_events_and_without_the_table_they_go_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SessionTable, "tokens_kept_at", lambda self, session, engine: 0)
    assert min(hits_without_events()) < 0.5


def test_without_keep_the_flood_has_evicted_the_sessions() -> None:
    without = row(WITHOUT)
    assert without.hit is not None
    assert without.hit <= 0.5


def test_without_reports_in_answers_to_others_sessions_that_go_elsewhere_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SessionTable, "note_broken", lambda self, engine, reports: None)
    _, untold = missed_untold(ran(TIGHT, SOME_MOVE, **LARGE))
    assert untold > 0


def test_promises_that_do_not_give_way_starve_the_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeping, "make_room", lambda self, num_blocks: None)
    fleet = ran(TIGHT, **LARGE, most_s=30.0)
    assert not fleet.is_over


def all_busy(reading: LoadReading) -> int:
    """As if no request were this router's own."""
    return (reading.load.running or 0) + (reading.load.waiting or 0)


@pytest.mark.matrix
def test_own_requests_that_count_as_those_of_others_bring_prompts_in_waves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wants: Callable[[LoadReading], int] = all_busy
    monkeypatch.setattr(LoadReading, "num_others", property(wants))
    waves = run_way(ALONE, SHAPE, LOAD, lead_s=1.0)
    assert waves.flood_per_s is not None
    assert waves.flood_per_s <= 0.9 * (row(ALONE).flood_per_s or 0.0)
