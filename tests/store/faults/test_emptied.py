"""A root that is emptied, replaced or full under a running engine is filled again, by itself."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdconn.store.budget import locks, root_budget
from pdconn.store.budget.accounts import Accounts, recorded_usage
from pdconn.store.engine import keeper_thread as keeper
from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import prompt
from tests.store.shelves.system import mounted

CAPACITY = 4 << 20
PATIENCE_S = 30.0


def rm(path: Path) -> None:
    """As ``rm -rf`` does; what the engine makes meanwhile stays."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


def emptied(root: Path) -> None:
    for path in root.iterdir():
        rm(path)


def removed(root: Path) -> None:
    rm(root)


def replaced(root: Path) -> None:
    rm(root.with_name("before"))
    root.rename(root.with_name("before"))


def without_rows(root: Path) -> None:
    rm(root / "rows")


def without_this_namespace(root: Path) -> None:
    rm(root / "rows" / "ns")


def without_parts(root: Path) -> None:
    for path in (root / "parts").iterdir():
        rm(path)


def without_parts_and_budget(root: Path) -> None:
    rm(root / "parts")
    rm(root / "budget")


LOSSES = [
    emptied, removed, replaced, without_rows, without_this_namespace, without_parts,
    without_parts_and_budget,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at every few seconds is looked at in each step."""
    monkeypatch.setattr(root_budget, "_LOOK_S", 0.0)
    monkeypatch.setattr(root_budget, "_RECOUNT_SOON_S", 0.3)
    monkeypatch.setattr(keeper, "_FAULT_S", 0.05)
    monkeypatch.setattr(keeper, "NOTES_S", 1.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    made = opened(tmp_path / "root")
    yield made
    made.close()


def opened(root: Path) -> FakeEngine:
    settings = StoreSettings(
        str(root), CAPACITY, staging=8 << 20, block_tokens=64, min_tokens=1, window_every="all"
    )
    made = FakeEngine(settings, Model(), Shape(tp=2), budget=None)
    until(lambda: ready(made) > 0)
    return made


def ready(engine: FakeEngine) -> int:
    """Bytes that it may save at once."""
    room = engine.store._keeper._room
    return 0 if room is None else room.amount


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.01)


def check_works(engine: FakeEngine, root: Path, seed: int) -> None:
    """A prompt is saved and found again, nothing is left over, and the accounts are right."""
    tokens = prompt(seed, 300)
    for _ in range(2):  # of the first, parts may be gone that were on their way
        assert engine.run(tokens).wrong == 0
        engine.settle()
    found = engine.run(tokens)
    assert (found.loaded, found.wrong) == (256, 0)
    engine.settle()

    def is_right() -> bool:
        with FilesShelf(root) as shelf:
            there = sum(row.nbytes for row in shelf.rows())
        usage = recorded_usage(root)
        said = engine.store.budget_gauges()
        return (
            usage is not None
            and usage.committed == there == said["store_committed_bytes"]
            and usage.reserved == ready(engine)
            and usage.num_writers == 1
        )

    until(is_right)
    assert (root / "format").exists()
    assert (root / "rows" / "ns" / "layout.json").exists()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_store_goes_on_after_its_root_was_lost(
    tmp_path: Path, engine: FakeEngine, loss: Callable[[Path], None]
) -> None:
    """70 of 70 saves failed until a restart, and the gauge said that the root was full."""
    root = tmp_path / "root"
    check_works(engine, root, 1)
    for number in range(2):
        loss(root)
        until(lambda: settled_after(engine, root))
        check_works(engine, root, 10 + number)
        assert engine.run(prompt(100 + number, 300)).wrong == 0  # lost while it is saved


def settled_after(engine: FakeEngine, root: Path) -> bool:
    """Whether the keeper has seen what became of the root, and nothing is on its way any more."""
    engine.step()
    if not engine.store.is_settled() or ready(engine) <= 0:
        return False
    if not (root / "budget" / "writers" / "writer").exists():
        return False
    with FilesShelf(root) as shelf:
        there = sum(row.nbytes for row in shelf.rows())
    return engine.store.budget_gauges().get("store_committed_bytes") == there


def test_rows_that_went_are_saved_again_without_being_missed_first(
    tmp_path: Path, engine: FakeEngine
) -> None:
    """They stayed known: a prompt that the engine's own cache holds was never saved again."""
    root, tokens = tmp_path / "root", prompt(1, 300)
    check_works(engine, root, 1)
    emptied(root)
    until(lambda: settled_after(engine, root))
    engine.step()
    assert engine.store._keeper.is_wanted(named(tokens))


def named(tokens: list[int]) -> RowName:
    return Chain(64).extended(tokens, 64, ()).name(RowKind.FA, 0)


def test_ranks_show_anew_that_the_writer_lives(tmp_path: Path, engine: FakeEngine) -> None:
    """Of a removed account their locks said nothing, and others removed parts under way."""
    root = tmp_path / "root"
    emptied(root)
    until(lambda: settled_after(engine, root))
    check_works(engine, root, 1)
    engine.store.close()
    other = Accounts(root, "other", CAPACITY)
    with FilesShelf(root) as shelf:
        assert other.recount(shelf).forgotten == []
        for rank in engine.rank_stores:
            rank.close()
        assert other.recount(shelf).forgotten == ["writer"]
    other.close()


def test_a_file_system_that_is_mounted_anew_is_filled_again(tmp_path: Path) -> None:
    with mounted(tmp_path / "root", "tmpfs") as root:
        engine = opened(root)
        try:
            check_works(engine, root, 1)
            subprocess.run(["umount", "-l", str(root)], check=True)
            again = ["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(root)]
            subprocess.run(again, check=True)
            until(lambda: settled_after(engine, root))
            check_works(engine, root, 2)
        finally:
            engine.close()


def test_a_full_file_system_costs_a_few_lines_of_log_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of a few prompts fit.  Each row that was not saved cost a line, 120 for 12 prompts."""
    caplog.set_level(logging.WARNING)
    with mounted(tmp_path / "root", "tmpfs", "size=1m") as root:
        engine = opened(root)
        try:
            for seed in range(20):
                assert engine.run(prompt(seed, 300)).wrong == 0
                engine.settle()
            failures = engine.store.take_store_counts()["store_save_failures"]
            texts = [re.sub(r"row=\S+", "", one.getMessage()) for one in caplog.records]
            assert failures > 20
            assert any("No space left on device" in text for text in texts)
            assert sum("not saved: " in text for text in texts) < failures / 4, texts
            emptied(root)
            until(lambda: settled_after(engine, root))
            check_works(engine, root, 100)
        finally:
            engine.close()


def test_believing_what_was_opened_once_is_caught(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: locks and accounts are those that were opened at the start."""
    root = tmp_path / "root"
    check_works(engine, root, 1)
    monkeypatch.setattr(locks, "is_at", lambda fd, path: True)
    emptied(root)
    assert engine.run(prompt(2, 300)).wrong == 0
    engine.settle()
    assert engine.run(prompt(2, 300)).loaded == 0
    engine.settle()
    failures = engine.store.take_store_counts()["store_save_failures"]
    assert failures > 0
