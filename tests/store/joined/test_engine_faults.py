"""Whatever fails in a store, requests are answered, with right bytes or computed anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdconn.store.engine import keeper_thread
from pdconn.store.store_errors import RowMissing, ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import SETTINGS, prompt

CALLS = (
    "has",
    "read",
    "rows",
    "touch",
    "remove_row",
    "begin",
    "write",
    "put_note",
    "notes",
    "commit",
)


class FailingShelf:
    """Fails in one call, as often as ``times`` says."""

    def __init__(self, shelf: MemoryShelf, call: str, fail: Callable[[], Exception | None]) -> None:
        self._shelf, self._call, self._fail = shelf, call, fail

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shelf, name)
        if name != self._call:
            return found

        def fails(*args: Any) -> Any:
            error = self._fail()
            if error is not None:
                raise error
            return found(*args)

        return fails

    def __enter__(self) -> FailingShelf:
        return self

    def __exit__(self, *_: object) -> None:
        self._shelf.close()


def engine(rows: MemoryRows, call: str, fail: Callable[[], Exception | None]) -> FakeEngine:
    return FakeEngine(
        replace(SETTINGS, window_every="all"),
        Model(),
        Shape(tp=2),
        shelf=lambda: FailingShelf(MemoryShelf(rows), call, fail),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [ShelfFailure("EIO"), RowMissing("gone"), OSError(5, "EIO")])
def test_a_shelf_that_fails_in_any_call_costs_no_request(call: str, error: Exception) -> None:
    rows, tokens = MemoryRows(), prompt(1, 300)
    healthy = engine(rows, "none", lambda: None)
    healthy.run(tokens)
    healthy.settle()
    healthy.close()
    broken = engine(rows, call, lambda: error)
    try:
        for wanted in (tokens, tokens[:128] + prompt(2, 200)):
            outcome = broken.run(wanted)
            assert outcome.wrong == 0
            assert outcome.loaded + outcome.computed == len(wanted)
        if call == "read":
            assert outcome.loaded == 0
    finally:
        broken.close()


@pytest.mark.parametrize("call", ["write", "notes", "commit"])
def test_after_a_failure_rows_are_saved_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_thread, "_FAULT_S", 0.05)
    rows, tokens = MemoryRows(), prompt(3, 300)
    left = [3]

    def fails_at_first() -> Exception | None:
        left[0] -= 1
        return ShelfFailure("ENOSPC") if left[0] >= 0 else None

    store = engine(rows, call, fails_at_first)
    try:
        store.run(tokens)
        store.settle()
        store.run(tokens)
        store.settle()
        again = store.run(tokens)
        assert (again.loaded, again.wrong) == (256, 0)
    finally:
        store.close()


@pytest.mark.parametrize("call", ["begin", "put_note"])
def test_a_row_without_a_note_holds_up_no_other(call: str) -> None:
    rows, left = MemoryRows(), [2]

    def fails_at_first() -> Exception | None:
        left[0] -= 1
        return ShelfFailure("ENOSPC") if left[0] >= 0 else None

    store = engine(rows, call, fails_at_first)
    try:
        store.run(prompt(3, 100))
        tokens = prompt(4, 300)
        store.run(tokens)
        give_up = time.monotonic() + 60
        while len(rows.rows) < 8 and time.monotonic() < give_up:
            store.step()
        again = store.run(tokens)
        assert (again.loaded, again.wrong) == (256, 0)
    finally:
        store.close()


def test_a_request_whose_rows_do_not_come_is_computed() -> None:
    rows, tokens = MemoryRows(), prompt(5, 300)
    first = engine(rows, "none", lambda: None)
    first.run(tokens)
    first.settle()
    first.close()
    late = [0.0]
    store = FakeEngine(
        replace(SETTINGS, window_every="all"),
        shelf=lambda: MemoryShelf(rows),
        clock=lambda: late[0],
    )
    try:
        store.drops_results = True
        outcome = store.run(tokens, on_step=lambda: late.__setitem__(0, late[0] + 1.0))
        assert (outcome.loaded, outcome.wrong) == (0, 0)
        store.drops_results = False
    finally:
        store.close()


def test_a_request_that_leaves_while_its_rows_are_fetched_leaves_nothing_behind() -> None:
    rows, tokens = MemoryRows(), prompt(6, 300)
    store = engine(rows, "none", lambda: None)
    try:
        store.run(tokens)
        store.settle()
        store.store.on_new_request(
            "gone", tokens, len(tokens), lambda: (), may_load=True, reads_files=False
        )
        while not len(store.store.loads):
            store.store.get_num_new_matched_tokens("gone", len(tokens), 0)
        store.store.request_finished("gone")
        store.settle()
        again = store.run(tokens)
        assert (again.loaded, again.wrong) == (256, 0)
    finally:
        store.close()
