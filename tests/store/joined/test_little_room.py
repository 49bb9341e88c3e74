"""Sizes in which nothing fits are said at the start: else they show as misses alone."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from pdconn.store.settings import StoreSettings
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape

ENOUGH = StoreSettings(root="", capacity=4 << 20, staging=1 << 20, block_tokens=64, min_tokens=1)
PROMPT = list(range(200))
"""Of three rows of 64 tokens; a row of either kind has 36 KiB."""


def loaded(settings: StoreSettings) -> int:
    """Tokens of a prompt that its second run finds."""
    rows = MemoryRows()
    made = FakeEngine(settings, Model(), Shape(), shelf=lambda: MemoryShelf(rows))
    try:
        made.run(PROMPT)
        made.settle()
        return made.run(PROMPT).loaded
    finally:
        made.close()


def test_sizes_with_room_are_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert loaded(ENOUGH)
    assert not caplog.records


def test_a_staging_area_without_room_for_a_boundary_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not loaded(replace(ENOUGH, staging=4096))
    assert "staging has no room for a boundary" in caplog.text
    assert "staging=4096" in caplog.text


@pytest.mark.parametrize(("rows", "tokens"), [(2, 64), (3, 128), (4, 192), (5, 192)])
def test_a_prefix_that_staging_cuts_is_counted_each_time_and_said_once(
    rows: int, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Three FA rows and one of windows, 32 KiB each in staging."""
    settings = replace(ENOUGH, staging=rows * (32 << 10), window_every="all")
    rows_kept = MemoryRows()
    made = FakeEngine(settings, Model(), Shape(), shelf=lambda: MemoryShelf(rows_kept))
    try:
        made.run(PROMPT)
        made.settle()
        made.store.take_store_counts()
        assert [made.run(PROMPT).loaded for _ in range(3)] == [tokens] * 3
        counts = made.store.take_store_counts()
    finally:
        made.close()
    is_cut = tokens < 192
    assert counts.get("store_cut", 0) == 3 * is_cut
    said = [r.getMessage() for r in caplog.records if "less than a stored prefix" in r.getMessage()]
    assert len(said) == is_cut
    if is_cut:
        assert f"tokens={tokens} needed={4 * (32 << 10)} staging={settings.staging}" in said[0]


def test_a_capacity_of_a_few_rows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loaded(replace(ENOUGH, capacity=100_000))
    assert "capacity is less than" in caplog.text


def test_of_an_engine_that_saves_nothing_the_capacity_is_not_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded(replace(ENOUGH, capacity=100_000, read_only=True))
    assert "capacity" not in caplog.text
