"""Scoring is linear and far from a list scan; memory is bounded.  Ratios in one run only.

Absolute times: ``python -m tests.throughput.routing --check``.
"""

from __future__ import annotations

import pytest

from pdconn.router.prefix.index import Index
from pdconn.router.prefix.score import Scorer
from tests.throughput.routing import WINDOW, Fleet, fleet, hash_nbytes, list_scan, timed


def score_s(world: Fleet) -> float:
    scorer = Scorer(world.index)
    return timed(lambda: scorer.score(world.prompt), 50)


@pytest.mark.parametrize("window_held", [True, False], ids=["full hit", "no window"])
def test_scoring_beats_a_list_scan_by_far(window_held: bool) -> None:
    world = fleet(32, 512, 16, window_held)
    scan_s = timed(lambda: list_scan(world, -(-(WINDOW - 1) // 16)), 5)
    assert score_s(world) < scan_s / 5


def test_scoring_is_linear_in_blocks() -> None:
    short, long = fleet(32, 500, 16, True), fleet(32, 8000, 16, True)
    assert score_s(long) < 16 * 1.5 * score_s(short)


def test_the_list_scan_is_slower_still_in_pods() -> None:
    """The control: what grows with pods is noticed by such a ratio."""
    few, many = fleet(8, 512, 16, True), fleet(64, 512, 16, True)
    need = -(-(WINDOW - 1) // 16)
    assert timed(lambda: list_scan(many, need), 5) > 3 * timed(lambda: list_scan(few, need), 5)
    assert score_s(many) < 3 * score_s(few)


def test_a_hash_takes_as_many_bytes_as_we_say() -> None:
    assert hash_nbytes(50_000) < 250


def test_a_pod_is_believed_to_hold_so_many_blocks_and_no_more() -> None:
    index = Index(max_blocks=100)
    index.store("liar", 0, "gpu", range(1000))
    index.store("liar", 1, "gpu", range(1000))
    index.store("honest", 0, "gpu", range(50))
    liar = index.pods["liar"]
    assert (liar.num_blocks, liar.refused) == (100, 1900)
    assert index.num_hashes == 100
    assert index.pods["honest"].num_blocks == 50
    index.remove("liar", 0, "gpu", range(1000))
    assert (liar.num_blocks, liar.unknown_removals) == (0, 900)
    assert index.num_hashes == 50
    index.drop("honest")
    assert index.num_hashes == 0
