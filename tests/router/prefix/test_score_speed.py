"""Scoring is linear and far from a list scan; memory is bounded.  Ratios in one run only.

Absolute times: ``python -m tests.throughput.routing --check``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import pytest

from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.score import Scorer
from tests.throughput.routing import WINDOW, Fleet, fleet, hash_nbytes, list_scan


def took_s(act: Callable[[], object], calls: int = 1) -> float:
    """The least processor time of a call: on a busy machine a long one waits for a core, too."""
    took = []
    gc.collect()
    gc.disable()
    for _ in range(calls):
        began = time.thread_time()
        act()
        took.append(time.thread_time() - began)
    gc.enable()
    return min(took)


def score_s(world: Fleet) -> float:
    scorer = Scorer(world.index)
    return took_s(lambda: scorer.score(world.prompt), 10)


def ratio(one_s: Callable[[], float], other_s: Callable[[], float]) -> float:
    """The median of three rounds: a busy machine slows one side of some of them."""
    return statistics.median(one_s() / other_s() for _ in range(3))


def is_below(limit: float, one_s: Callable[[], float], other_s: Callable[[], float]) -> bool:
    """Whether the ratio is, in one of three tries: a machine may be busy for a while."""
    return any(ratio(one_s, other_s) < limit for _ in range(3))


@pytest.mark.parametrize("window_held", [True, False], ids=["full hit", "no window"])
def test_scoring_beats_a_list_scan_by_far(window_held: bool) -> None:
    world = fleet(32, 512, 16, window_held)
    need = -(-(WINDOW - 1) // 16)
    scan_s = partial(took_s, lambda: list_scan(world, need))
    assert is_below(1 / 5, lambda: score_s(world), scan_s)


def test_scoring_is_linear_in_blocks() -> None:
    short, long = fleet(32, 500, 16, True), fleet(32, 8000, 16, True)
    assert is_below(16 * 1.5, lambda: score_s(long), lambda: score_s(short))


@pytest.mark.matrix
def test_the_list_scan_is_slower_still_in_pods() -> None:
    """The control: what grows with pods is noticed by such a ratio."""
    few, many = fleet(8, 512, 16, True), fleet(64, 512, 16, True)
    need = -(-(WINDOW - 1) // 16)
    many_s, few_s = (partial(took_s, partial(list_scan, one, need)) for one in (many, few))
    assert not is_below(3, many_s, few_s)
    assert is_below(3, lambda: score_s(many), lambda: score_s(few))


def test_a_hash_takes_as_many_bytes_as_we_say() -> None:
    assert hash_nbytes(50_000) < 250


def test_a_pod_is_believed_to_hold_so_many_blocks_and_no_more() -> None:
    index = Index(max_blocks=100)
    index.store_blocks("liar", 0, "gpu", range(1000))
    index.store_blocks("liar", 1, "gpu", range(1000))
    index.store_blocks("honest", 0, "gpu", range(50))
    liar = index.pods["liar"]
    assert (liar.num_blocks, liar.refused) == (100, 1900)
    assert index.num_hashes == 100
    assert index.pods["honest"].num_blocks == 50
    index.remove_blocks("liar", 0, "gpu", range(1000))
    assert (liar.num_blocks, liar.unknown_removals) == (0, 900)
    assert index.num_hashes == 50
    index.drop_pod("honest")
    assert index.num_hashes == 0
