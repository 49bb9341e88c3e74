"""The tables of agents: each way beside the others of its run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.throughput.agents.__main__ import ALONE, KEEP, NO_PAUSE, WITHOUT, Seen, rows_of, shown


def test_each_way_stands_beside_those_of_the_same_run() -> None:
    seen = {
        WITHOUT: Seen(first_s=[1.0, 2.0, 3.0], flood_per_s=[4.0], earlier=100, again=90),
        KEEP: Seen(first_s=[0.5], flood_per_s=[3.0, 5.0, 4.0], earlier=100, again=1),
        NO_PAUSE: Seen(first_s=[0.25], earlier=100),
        ALONE: Seen(flood_per_s=[5.0]),
    }
    by_way = {row.way: row for row in rows_of(seen)}
    kept, alone = by_way[KEEP], by_way[ALONE]
    assert (kept.of_without, kept.of_no_pause) == (0.25, 2.0)
    assert kept.of_alone == pytest.approx(0.8)
    assert (kept.hit, by_way[WITHOUT].hit) == (pytest.approx(0.99), pytest.approx(0.1))
    assert (alone.hit, alone.first_ms, alone.of_without) == (None, None, None)
    assert by_way[NO_PAUSE].flood_per_s is None
    assert shown(list(by_way.values())).count("\n") >= 5


def test_of_simulated_ways_figures_beside_ways_that_were_not_run_are_none() -> None:
    pytest.importorskip("vllm.v1.core.sched.scheduler")
    from tests.simulation.sessions.ways import Row
    from tests.throughput.agents.simulated import compared

    kept = Row(KEEP, 9, 0.99, 0.98, 100.0, 120.0, 9.0, 1.0, 2.0, 0, 0, 0, 0)
    alone = replace(kept, way=ALONE, turns=0, hit=None, first_ms=None, flood_per_s=10.0)
    first, second = compared([kept, alone])
    assert (first["flood_of_alone"], second["flood_of_alone"]) == (pytest.approx(0.9), 1.0)
    assert (first["of_without"], first["flood_of_hits_anyway"]) == (None, None)
    assert second["of_no_pause"] is None
