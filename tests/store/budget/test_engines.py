"""Two whole stores on one small root: it stays within its capacity, and what is read is right."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from pdconn.store.budget.accounts import recorded_usage
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from tests.store.joined.rig import FakeEngine

CAPACITY = 40 * (36 << 10)
PATIENCE_S = 30.0


def listed_nbytes(root: Path) -> int:
    """Of rows and parts."""
    with FilesShelf(root) as shelf:
        return sum(row.nbytes for row in shelf.rows()) + sum(part.nbytes for part in shelf.parts())


def wait_until_ready(root: Path, num_writers: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while (usage := recorded_usage(root)) is None or (
        usage.num_writers < num_writers or not usage.reserved
    ):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_engines_share_a_small_root(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    settings = StoreSettings(
        root=str(tmp_path), capacity=CAPACITY, staging=8 << 20, block_tokens=64, min_tokens=1
    )
    engines = [FakeEngine(settings, writer=f"w{number}", budget=None) for number in (1, 2)]
    counts = dict.fromkeys(("store_rows_committed", "store_rows_evicted"), 0)
    loaded = 0
    try:
        wait_until_ready(tmp_path, 2)
        for number in range(12):
            tokens = [number % 3, *map(int, rng.integers(10, 50_000, 330))]
            for engine in engines:
                for _ in range(2):
                    outcome = engine.run(tokens)
                    assert not outcome.wrong
                    loaded += outcome.loaded
                    engine.settle()
                assert listed_nbytes(tmp_path) <= CAPACITY
                for name, amount in engine.store.take_store_counts().items():
                    if name in counts:
                        counts[name] += amount
    finally:
        for engine in engines:
            engine.close()
    assert loaded > 0
    assert counts["store_rows_evicted"] > 0
    assert counts["store_rows_committed"] * (36 << 10) > CAPACITY
    usage = recorded_usage(tmp_path)
    assert usage is not None
    assert usage.committed == listed_nbytes(tmp_path)
