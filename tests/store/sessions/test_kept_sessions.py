"""A session's rows in a real store: threads, files, budget, and a restart between turns."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.lifecycle.promises import BreakReason, KeepShares
from pdconn.protocol.keep import KeepOrder, SessionKey
from pdconn.store.inspect import summarize
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from tests.store.encryption.key_files import KEYS, key_file
from tests.store.joined.rig import FakeEngine, Model, until_ready
from tests.store.joined.test_joined import SETTINGS, prompt

CAPACITY = 2 << 20
MODEL = Model(window=150, token_nbytes=16)
SESSION = SessionKey("a", "agent-7")
FIRST, MORE = prompt(1, 330), prompt(2, 40)
KEPT = (256, 320)
"""Tokens of ``FIRST`` that are kept: its last row finds no room while eviction lags behind."""


def settings(root: Path, **more: object) -> StoreSettings:
    return replace(SETTINGS, root=str(root), capacity=CAPACITY, **more)  # type: ignore[arg-type]


@contextmanager
def started(given: StoreSettings, writer: str = "writer") -> Iterator[FakeEngine]:
    made = FakeEngine(given, MODEL, budget=None, writer=writer)
    try:
        until_ready(made)
        yield made
    finally:
        made.close()


def becomes(engine: FakeEngine, true: Callable[[], object]) -> None:
    until = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < until
        engine.step()
        time.sleep(0.01)


def gauge(engine: FakeEngine, name: str = "store_kept_bytes") -> int:
    return engine.store.budget_gauges().get(name, 0)


def turn(engine: FakeEngine, tokens: list[int], seconds: float | None) -> int:
    """A turn of the session; returns the tokens that were loaded."""
    finished = engine.store.request_finished

    def ends(request: str) -> None:
        if seconds is not None:
            order = KeepOrder(SESSION, seconds)
            assert engine.store.keep_turn(request, order, len(tokens)) is True
        finished(request)

    engine.store.request_finished = ends  # type: ignore[method-assign]
    engine.store.turn_came(SESSION)
    outcome = engine.run(tokens)
    engine.store.request_finished = finished  # type: ignore[method-assign]
    assert outcome.wrong == 0
    engine.settle()
    if seconds is not None:
        becomes(engine, lambda: gauge(engine))
    return outcome.loaded


def flood(engine: FakeEngine, seed: int) -> None:
    """One-off prompts of twice the capacity."""
    row = sum(engine.store._keeper._row_nbytes.values())
    for number in range(2 * CAPACITY // (5 * row) + 1):
        engine.run(prompt(1000 * seed + number, 330))
        engine.settle()
        until_ready(engine)


def sealed(tmp_path: Path) -> dict[str, object]:
    return {"key_file": str(key_file(tmp_path / "keys", KEYS[0]))}


@pytest.mark.parametrize("how", ["plain", "encrypted", "quota"])
def test_a_kept_session_is_loaded_after_a_flood_and_a_restart(tmp_path: Path, how: str) -> None:
    more: dict[str, object] = {"plain": {}, "quota": {"tenant_quota": CAPACITY}}.get(how, {})
    if how == "encrypted":
        pytest.importorskip("cryptography")
        more = sealed(tmp_path)
    given = settings(tmp_path / "root", **more)
    with started(given, "first") as engine:
        assert turn(engine, FIRST, 600.0) == 0
        flood(engine, 1)
        assert gauge(engine, "store_kept_sessions") == 1
    with started(given, "second") as engine:
        flood(engine, 2)
        assert turn(engine, FIRST + MORE, 600.0) in KEPT


def test_a_session_that_is_not_kept_is_not(tmp_path: Path) -> None:
    """The control."""
    given = settings(tmp_path / "root")
    with started(given, "first") as engine:
        assert turn(engine, FIRST, None) == 0
        flood(engine, 1)
        assert turn(engine, FIRST + MORE, None) == 0


def test_what_is_released_is_evicted_as_all_else(tmp_path: Path) -> None:
    with started(settings(tmp_path / "root")) as engine:
        turn(engine, FIRST, 600.0)
        engine.store.release_session(SESSION)
        becomes(engine, lambda: not gauge(engine))
        flood(engine, 1)
        assert turn(engine, FIRST + MORE, None) == 0


def test_what_is_released_is_evicted_where_times_have_whole_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of file systems that note no parts of a second."""
    utime = os.utime

    def noted(path: Any, times: Any = None, **more: Any) -> None:
        at = time.time() if times is None else times[1]
        utime(path, (int(at), int(at)), **more)

    monkeypatch.setattr("pdconn.store.shelf.files_shelf.os.utime", noted)
    test_what_is_released_is_evicted_as_all_else(tmp_path)


def test_a_promise_whose_time_is_up_keeps_nothing(tmp_path: Path) -> None:
    with started(settings(tmp_path / "root", keep=KeepShares(seconds=0.3))) as engine:
        turn(engine, FIRST, 600.0)
        becomes(engine, lambda: not gauge(engine))
        flood(engine, 1)
        assert turn(engine, FIRST + MORE, None) == 0
        assert engine.store.take_broken(SESSION) is None


def test_a_later_turn_is_kept_instead_of_the_earlier_one(tmp_path: Path) -> None:
    given = settings(tmp_path / "root")
    with started(given) as engine:
        turn(engine, FIRST, 600.0)
        before = gauge(engine)
        turn(engine, FIRST + MORE + prompt(3, 90), 600.0)
        becomes(engine, lambda: gauge(engine) > before)
        assert gauge(engine, "store_kept_sessions") == 1
        counts = engine.store.take_store_counts()
        assert (counts["store_promises_made"], counts["store_promises_used"]) == (2, 1)
        engine.settle()
        with FilesShelf(given.root) as shelf:
            [found] = summarize(given.root, shelf, time.time()).namespaces
        assert found.kept.nbytes == gauge(engine)


@pytest.mark.parametrize("seconds", [600.0, None], ids=["kept", "the control"])
def test_another_engine_that_evicts_passes_over_what_this_one_keeps(
    tmp_path: Path, seconds: float | None
) -> None:
    given = settings(tmp_path / "root")
    with started(given, "evictor") as other, started(given, "ours") as ours:
        assert turn(ours, FIRST, seconds) == 0
        flood(other, 1)
        assert other.store.take_store_counts()["store_rows_evicted"] > 0
        assert turn(ours, FIRST + MORE, None) in ((0,) if seconds is None else KEPT)
        assert ours.store.take_broken(SESSION) is None


def test_a_session_whose_rows_somebody_removes_is_told_once(tmp_path: Path) -> None:
    given = settings(tmp_path / "root")
    with started(given) as engine:
        turn(engine, FIRST, 600.0)
        with FilesShelf(given.root) as shelf:
            kept = [row for row in shelf.rows() if row.used_at > time.time() + 60]
            shelf.remove_row(kept[0].namespace, kept[0].name)
        told: list[BreakReason] = []

        def is_told() -> bool:
            engine.store.turn_came(SESSION)
            why = engine.store.take_broken(SESSION)
            told.extend([why] if why is not None else [])
            return bool(told)

        becomes(engine, is_told)
        assert told == [BreakReason.ROOM]
        assert engine.store.take_broken(SESSION) is None
        becomes(engine, lambda: not gauge(engine))


def refused(root: Path, share: float) -> list[BreakReason | None]:
    """What is told of a turn whose answer has promised its rows, before the next one and then."""
    given = settings(root, keep=KeepShares(share, share, 60.0))
    with started(given) as engine:
        order = KeepOrder(SESSION, 600.0)
        assert engine.store.keep_cut_to_s(order) == 60.0
        assert engine.store.keep_cut_to_s(replace(order, seconds=60.0)) is None
        turn(engine, FIRST, None)
        turned = counted_turn(engine, FIRST)
        told: list[BreakReason | None] = []
        becomes(engine, lambda: turned() > 0)
        for _ in range(2):
            engine.step()
            told.append(engine.store.take_broken(SESSION))
        return told


def counted_turn(engine: FakeEngine, tokens: list[int]) -> Callable[[], int]:
    """A turn that is to be kept; returns how often a promise was made or refused since."""
    finished, counts = engine.store.request_finished, Counter[str]()

    def ends(request: str) -> None:
        assert engine.store.keep_turn(request, KeepOrder(SESSION, 600.0), len(tokens)) is True
        finished(request)

    engine.store.request_finished = ends  # type: ignore[method-assign]
    engine.run(tokens)
    engine.store.request_finished = finished  # type: ignore[method-assign]
    engine.settle()

    def ended() -> int:
        counts.update(engine.store.take_store_counts())
        return counts["store_promises_made"] + counts["store_promises_refused"]

    return ended


def test_a_session_whose_rows_are_more_than_may_be_kept_is_told_once(tmp_path: Path) -> None:
    assert refused(tmp_path / "root", 0.001) == [BreakReason.SHARE, None]


def test_a_session_whose_rows_are_kept_is_told_nothing(tmp_path: Path) -> None:
    """The control."""
    assert refused(tmp_path / "root", 0.5) == [None, None]


def test_a_reset_of_the_cache_breaks_what_is_kept(tmp_path: Path) -> None:
    with started(settings(tmp_path / "root")) as engine:
        turn(engine, FIRST, 600.0)
        engine.store.clear_rows("other")
        becomes(engine, lambda: not gauge(engine))
        becomes(engine, lambda: engine.store.take_broken(SESSION) is BreakReason.RESET)


@pytest.mark.parametrize("more", [{"keep": None}, {"read_only": True}])
def test_a_store_that_keeps_nothing_says_so(tmp_path: Path, more: dict[str, object]) -> None:
    with started(settings(tmp_path / "root")):
        pass
    made = FakeEngine(settings(tmp_path / "root", **more), MODEL, budget=None, writer="w")
    try:
        made.store.on_new_request(
            "r", FIRST, len(FIRST), lambda: (), may_load=True, reads_files=False
        )
        assert not made.store.keep_turn("r", KeepOrder(SESSION, 9.0), len(FIRST))
    finally:
        made.close()
