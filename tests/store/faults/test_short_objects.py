"""A shelf that reads zeros where a row is short, and says that all is well, as NIXL OBJ does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdconn.store.format.row import RowName
from pdconn.store.rank.shares import RowShare
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import SETTINGS, prompt

PAGE = 4096


class Zeros(MemoryShelf):
    """Rows are read as if they ended at an offset."""

    ends_at: int | None = None

    def read(self, namespace: str, name: RowName, ranges: Any) -> None:
        super().read(namespace, name, ranges)
        for offset, buffer in ranges:
            if self.ends_at is not None and offset + len(buffer) > self.ends_at:
                first = max(0, self.ends_at - offset)
                buffer[first:] = bytes(len(buffer) - first)


def loaded(monkeypatch: pytest.MonkeyPatch, ends_at: int | None) -> tuple[int, int]:
    """Tokens that are loaded of a stored prompt, and how many of them are wrong."""
    rows, tokens = MemoryRows(), prompt(1, 300)
    engine = FakeEngine(
        replace(SETTINGS, window_every="all"), Model(), Shape(tp=2), shelf=lambda: Zeros(rows)
    )
    try:
        engine.run(tokens)
        engine.settle()
        monkeypatch.setattr(Zeros, "ends_at", ends_at)
        outcome = engine.run(tokens)
        return outcome.loaded, outcome.wrong
    finally:
        engine.close()


@pytest.mark.parametrize("ends_at", [0, 1, PAGE, 2 * PAGE, 4 * PAGE, 5 * PAGE + 1])
def test_a_row_that_reads_as_zeros_is_computed(
    ends_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded(monkeypatch, ends_at) == (0, 0)


def test_a_whole_row_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    assert loaded(monkeypatch, None) == (256, 0)


def test_believing_what_the_shelf_says_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: nothing is compared with the checksums."""
    monkeypatch.setattr(RowShare, "verify_row", lambda self, data, footer, namespace, name: None)
    assert loaded(monkeypatch, PAGE)[1] > 0
