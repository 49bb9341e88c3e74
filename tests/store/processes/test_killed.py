"""kill -9 of a whole saving engine at every step: what it left is whole, counted and used."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import cache
from pathlib import Path

import pytest

from pdconn.store.budget.accounts import recorded_usage
from pdconn.store.engine.build import build_scheduler  # noqa: F401 - what the child has, too
from pdconn.store.format.prompt_rows import Chain, find_boundary
from pdconn.store.format.row import RowKind
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.verify import RowState, check_rows
from tests.store.budget.forest import nbytes_there
from tests.store.joined.rig import FakeEngine, until_ready
from tests.store.processes.dying import (
    MODELS,
    SHAPE,
    prompts,
    save_until_killed,
    settings,
)

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["tests.store.processes.dying"])
EVERY = os.environ.get("PDCONN_KILLS") == "all"
SAMPLE = 14 if EVERY else 6
"""Tests; each kills once, or at every step of its share."""


def killed(
    root: Path, die_at: int | None, mutant: str | None = None, compression: str = "none"
) -> bool:
    """Run the engine; whether it was killed."""
    child = CHILDREN.Process(
        target=save_until_killed, args=(str(root), die_at, mutant, compression)
    )
    child.start()
    child.join(120.0)
    assert child.exitcode in (0, -9)
    return child.exitcode == -9


@cache
def num_steps(directory: Path, compression: str) -> int:
    root = directory / compression
    assert not killed(root, None, compression=compression)
    return int(Path(f"{root}.steps").read_text(encoding="utf-8"))


def check_what_is_left(root: Path, compression: str = "none") -> None:
    """All laws of a root whose only writer is dead."""
    wanted, model = settings(str(root), compression), MODELS[compression]
    reading = settings(str(root), compression, read_only=True)
    reader = FakeEngine(reading, model, SHAPE, budget=None)
    try:
        with FilesShelf(root) as shelf:
            rows = list(shelf.rows())
            states = {one.state for one in check_rows(shelf, rows, {"ns": reader.layout})}
        assert states <= {RowState.GOOD}, "a row that is not whole has a name"
        assert nbytes_there(root) <= wanted.capacity, "more than the budget"
        names = {row.name for row in rows}
        for tokens in prompts():
            chain = Chain(64).extended(tokens)
            limit = (len(tokens) - 1) // 64 * 64

            def has(kind: RowKind, index: int, chain: Chain = chain) -> bool:
                return chain.name(kind, index) in names

            found = reader.run(tokens)
            assert found.wrong == 0
            assert found.loaded == find_boundary(reader.layout, limit, has), "all of what is there"
    finally:
        reader.close()
    writer = FakeEngine(wanted, model, SHAPE, budget=None, writer="second")
    try:
        until_ready(writer)
        with FilesShelf(root) as shelf:
            until = time.monotonic() + 30.0
            while any(part.writer == "first" for part in shelf.parts()):
                assert time.monotonic() < until, "parts of a dead writer stay"
                time.sleep(0.01)
            for tokens in prompts():
                assert writer.run(tokens).wrong == 0
                writer.settle()
    finally:
        writer.close()
    usage = recorded_usage(root)
    assert usage is not None
    with FilesShelf(root) as shelf:  # no process evicts any more
        assert usage.committed == sum(row.nbytes for row in shelf.rows())
    assert usage.committed + usage.reserved <= wanted.capacity


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.mark.parametrize("compression", MODELS)
@pytest.mark.parametrize("number", range(SAMPLE))
def test_an_engine_that_is_killed_leaves_whole_rows_that_count(
    number: int, compression: str, directory: Path
) -> None:
    """``PDCONN_KILLS=all`` kills at every step; else at one of each sixth of them."""
    steps = num_steps(directory, compression)
    assert steps > 100
    first, last = number * steps // SAMPLE, (number + 1) * steps // SAMPLE
    for step in range(first, last) if EVERY else [first + (7 * number) % (last - first)]:
        root = directory / f"{compression}-at-{step}"
        killed(root, step, compression=compression)
        check_what_is_left(root, compression)


@pytest.mark.parametrize(
    ("mutant", "broken"), [("no footers", "has a name"), ("no budget", "more than the budget")]
)
def test_an_engine_that_breaks_a_law_is_caught(mutant: str, broken: str, directory: Path) -> None:
    """Negative controls: rows are committed without footers; more is written than there is room.

    They run to their end: at one step or another, no row might have a name.
    """
    root = directory / mutant
    assert not killed(root, None, mutant)
    with pytest.raises(AssertionError, match=broken):
        check_what_is_left(root)
