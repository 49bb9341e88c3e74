"""A warmed lender's first pull is as quick as the next one, over real NIXL in two processes."""

from __future__ import annotations

import importlib.util

import pytest

from tests.throughput.warm import Turn, measure, median

if importlib.util.find_spec("nixl") is None:
    pytest.skip("nixl is not installed", allow_module_level=True)

KINDS = ("cold", "warmed", "elsewhere")
BATCHES = 3
"""Where the machine was busy, more turns are taken, and all of them count."""


@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_the_first_pull_from_a_warm_lender_has_a_fraction_of_a_cold_ones_overhead(
    path: str,
) -> None:
    taken: list[Turn] = []
    for _ in range(BATCHES):
        taken += measure([path], rounds=5, prompt=64, kinds=KINDS)
        cold, warmed, elsewhere = (median(taken, path, kind) for kind in KINDS)
        if warmed < 0.5 * cold < elsewhere:
            return
    assert cold > 0
    assert warmed < 0.5 * cold
    assert 0.5 * cold < elsewhere, "negative control: a warm-up of another peer helped"
