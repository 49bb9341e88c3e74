"""A shelf that hangs costs one request its wait, and the others nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdconn.lifecycle.load import FETCH_S, LOOKUP_S
from pdconn.store.breaker import LoadPatience
from pdconn.store.format.row import RowName
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import SETTINGS, prompt

PATIENCE_S = 30.0
MOST_S = {"has": LOOKUP_S, "read": FETCH_S}


class Hanging(MemoryShelf):
    """One call does not come back until it is let go."""

    call = ""
    let_go = threading.Event()

    def has(self, namespace: str, name: RowName) -> bool:
        self._hang("has")
        return super().has(namespace, name)

    def read(self, namespace: str, name: RowName, ranges: Any) -> None:
        self._hang("read")
        super().read(namespace, name, ranges)

    def _hang(self, call: str) -> None:
        if call == self.call:
            assert self.let_go.wait(PATIENCE_S)


class Hung:
    """An engine over a shelf that hangs, and its time."""

    def __init__(self, call: str, patch: pytest.MonkeyPatch) -> None:
        self.now, rows = 0.0, MemoryRows()
        self.engine = FakeEngine(
            replace(SETTINGS, window_every="all"), Model(), Shape(),
            shelf=lambda: Hanging(rows), clock=lambda: self.now,
        )  # fmt: skip
        self.stored = prompt(1, 300)
        self.engine.run(self.stored)
        self.engine.settle()
        patch.setattr(Hanging, "let_go", threading.Event())
        patch.setattr(Hanging, "call", call)

    def ask(self, name: str, seed: int | None = None) -> None:
        """A request arrives: of the stored prompt, or of another."""
        tokens = self.stored if seed is None else prompt(seed, 300)
        store = self.engine.store
        store.on_new_request(name, tokens, 300, lambda: (), may_load=True, reads_files=False)

    def matched(self, name: str) -> int | None:
        self.engine.step()
        return self.engine.store.get_num_new_matched_tokens(name, 300, 0)

    def until_known(self, name: str) -> int:
        end = time.monotonic() + PATIENCE_S
        while (found := self.matched(name)) is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        return found


@pytest.fixture
def hung(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
    made = Hung(request.param, monkeypatch)
    yield made
    Hanging.let_go.set()
    made.engine.close()


@pytest.mark.parametrize("hung", MOST_S, indirect=True)
def test_a_shelf_that_hangs_costs_one_request_its_wait(hung: Hung) -> None:
    """Each uncached prompt waited 5 or 10 s, one after the other."""
    call = Hanging.call
    seed = 7 if call == "has" else None  # what is known is not asked for
    for name in ("first", "second"):
        hung.ask(name, seed)
        assert hung.matched(name) is None
    began = time.monotonic()
    while call == "read" and len(hung.engine.store.loads) < 2:
        assert hung.matched("first") is None
        assert hung.matched("second") is None
        assert time.monotonic() < began + PATIENCE_S
    hung.now += MOST_S[call] + 0.1
    assert hung.matched("first") == 0
    assert hung.matched("second") == 0
    for number in range(20):
        hung.ask(f"later-{number}", 100 + number)
        assert hung.matched(f"later-{number}") == 0
        hung.now += 0.1
    Hanging.let_go.set()
    hung.now += 5.0
    hung.ask("tries")
    assert hung.until_known("tries") == 256
    hung.ask("again")
    assert hung.until_known("again") == 256


@pytest.mark.parametrize("hung", MOST_S, indirect=True)
def test_waiting_anew_each_time_is_caught(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: as it was, each request waits for itself."""
    monkeypatch.setattr(LoadPatience, "admits", lambda self, request, now: True)
    monkeypatch.setattr(
        LoadPatience, "is_over", lambda self, request, waited_s, most_s, now: waited_s > most_s
    )
    with pytest.raises(AssertionError):
        test_a_shelf_that_hangs_costs_one_request_its_wait(hung)
