"""A whole engine's store in a process that kills itself at one step of its saves.

The steps are calls of the shelf that change something, by any of its threads; each is two: before
it and after it.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.root_budget import Evictor
from pdconn.store.format.footer import row_nbytes
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.threads import AmountBox
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready

STEPS = ("begin", "write", "put_note", "commit", "remove_row", "discard")
SHAPE = Shape(tp=2)
MODELS = {
    "none": Model(window=40),
    # One head of four does not fit when it is packed.
    "exponents": Model(window=40, token_nbytes=256, like_bfloat16=(0, 1, 3)),
}
"""By the compression of rows."""
NUM_ROWS = 9
"""Rows that the root has room for: fewer than are saved, so that some are evicted."""


def prompts() -> list[list[int]]:
    """The second parts from the first after three rows; the third is another."""
    drawn = np.random.default_rng(5).integers(10, 50_000, 900)
    first, rest, other = (drawn[:300], drawn[300:450], drawn[450:770])
    return [[*map(int, first)], [*map(int, first[:192]), *map(int, rest)], [*map(int, other)]]


def settings(root: str, compression: Any = "none", **more: Any) -> StoreSettings:
    """Of an engine over ``root``."""
    engine = FakeEngine(
        StoreSettings("", 1, staging=1 << 20, block_tokens=64),
        MODELS[compression],
        SHAPE,
        shelf=lambda: MemoryShelf(MemoryRows()),
    )
    try:
        assert engine.layout.wa is not None
        largest = max(row_nbytes(engine.layout.fa), row_nbytes(engine.layout.wa))
    finally:
        engine.close()
    capacity = NUM_ROWS * largest
    return StoreSettings(
        root, capacity, staging=8 << 20, block_tokens=64, min_tokens=1, direct_io=False,
        compression=compression, **more,
    )  # fmt: skip


def save_until_killed(
    root: str, die_at: int | None, mutant: str | None, compression: str = "none"
) -> None:
    """Save all prompts; the number of steps is left beside the root."""
    counter = itertools.count()

    def step() -> None:
        if next(counter) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60.0)

    class Dying(FilesShelf):
        """Kills its process."""

    def watched(name: str) -> Any:
        calling = getattr(FilesShelf, name)

        def call(self: FilesShelf, *args: Any) -> Any:
            step()
            if name == "write" and mutant == "no footers" and args[2][0][0] > 0:
                made = None
            else:
                made = calling(self, *args)
            step()
            return made

        return call

    for name in STEPS:
        setattr(Dying, name, watched(name))
    if mutant == "no budget":
        AmountBox.take_amount = lambda self, amount: True  # type: ignore[method-assign]
        Accounts._check_covered = lambda self, row: None  # type: ignore[method-assign]
        Evictor.evict_rows = lambda self, shelf: []  # type: ignore[method-assign]
    engine = FakeEngine(
        settings(root, compression), MODELS[compression], SHAPE,
        shelf=lambda: Dying(root), budget=None, writer="first",
    )  # fmt: skip
    until_ready(engine)
    for tokens in prompts():
        assert engine.run(tokens).wrong == 0
        engine.settle()
    engine.close()
    Path(f"{root}.steps").write_text(str(next(counter)), encoding="utf-8")
    os._exit(0)
