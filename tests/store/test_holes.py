"""Rows that no prompt could reach are not saved, and those at a prompt's end count as used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.store.engine import saves
from pdconn.store.engine.saves import Saving, rows_to_save
from pdconn.store.engine.store_scheduler import StoreScheduler
from pdconn.store.format.prompt_rows import Chain, Spacing
from pdconn.store.format.row import RowKind, RowName
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.property.scale import drawn
from tests.store.joined.rig import FakeEngine, Model
from tests.store.joined.test_joined import SETTINGS, prompt
from tests.tools.cli.stored_rows import BLOCK, LAYOUT

BLOCKS = 12
CHAIN = Chain(BLOCK).extended(list(range(BLOCKS * BLOCK)))
Passes = list[tuple[int, int, frozenset[int]]]
"""Rows that a pass completes, rows that there is room for, and FA rows that are not held."""

passes = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(0, 8), st.frozensets(st.integers(0, BLOCKS - 1), max_size=1)
    ),
    max_size=8,
)


def saved_by(drawn_passes: Passes, there: set[RowName]) -> tuple[set[RowName], Saving]:
    """What is there after a prompt's passes, of which each finds so much room."""
    saving, after = Saving(CHAIN, BLOCKS * BLOCK), 0
    for count, room, lacking in drawn_passes:
        after = min(BLOCKS, after + count)
        names = wanted_of(saving, after, there)
        if names:
            lacks = {CHAIN.name(RowKind.FA, index) for index in lacking}
            held = saves.reachable(names, lambda name, lacks=lacks: name not in lacks)
            saving.note_admitted(names, held[:room])
            there |= set(held[:room])
    return there, saving


def wanted_of(saving: Saving, until: int, there: set[RowName]) -> list[RowName]:
    return rows_to_save(saving, LAYOUT, Spacing(1), until * BLOCK, lambda name: name not in there)


def unreached(there: set[RowName]) -> list[RowName]:
    """Rows behind one of full attention that is not there."""
    full = {name.index for name in there if name.kind is RowKind.FA}
    first = next(at for at in range(BLOCKS + 1) if at not in full)
    return [name for name in there if name.index >= first]


@drawn(200)
@given(drawn_passes=passes, before=st.integers(0, BLOCKS))
def test_no_row_is_saved_behind_one_that_is_missing(drawn_passes: Passes, before: int) -> None:
    earlier = {CHAIN.name(RowKind.FA, index) for index in range(before)}
    there, _ = saved_by(drawn_passes, earlier)
    assert not unreached(there)


@drawn(100)
@given(drawn_passes=passes)
def test_a_hole_is_filled_when_there_is_room_again(drawn_passes: Passes) -> None:
    there, saving = saved_by(drawn_passes, set())
    if saving.next_block < BLOCKS:
        names = wanted_of(saving, BLOCKS, there)
        full = {name.index for name in there | set(names) if name.kind is RowKind.FA}
        assert full == set(range(BLOCKS))


def behind_holes(names: Sequence[RowName], is_held: Callable[[RowName], bool]) -> list[RowName]:
    return [name for name in names if is_held(name)]


def forgets(self: Saving, wanted: Sequence[RowName], admitted: Sequence[RowName]) -> None: ...


@pytest.mark.parametrize(
    ("where", "what", "wrong", "given_passes"),
    [
        (saves, "reachable", behind_holes, [(4, 8, frozenset({1}))]),
        (Saving, "note_admitted", forgets, [(4, 2, frozenset()), (2, 8, frozenset())]),
    ],
)
def test_without_that_rows_are_saved_in_vain(
    where: Any, what: str, wrong: Any, given_passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls."""
    monkeypatch.setattr(where, what, wrong)
    assert unreached(saved_by(given_passes, set())[0])


def ages(root: Path, num_tokens: int) -> dict[tuple[RowKind, int], float]:
    """Uses of a prompt's rows after a hit; 1 for those that are not used since they were saved."""
    rows = MemoryRows()
    made = FakeEngine(
        replace(SETTINGS, root=str(root)), Model(window=40), shelf=lambda: MemoryShelf(rows)
    )
    try:
        tokens = prompt(3, num_tokens)
        made.run(tokens)
        made.settle()
        for row in rows.rows.values():
            row.used_at = 1.0
        assert made.run(tokens).loaded == (num_tokens - 1) // 64 * 64
        made.settle()
    finally:
        made.close()
    return {(name.kind, name.index): row.used_at for (_, name), row in rows.rows.items()}


@pytest.mark.parametrize("num_tokens", [256, 257, 300])
def test_all_rows_of_a_prompt_that_hits_are_used(tmp_path: Path, num_tokens: int) -> None:
    """Those of a prompt of whole rows, too, whose last token is computed."""
    used = ages(tmp_path, num_tokens)
    assert all(used[RowKind.FA, index] > 1.0 for index in range(4))
    assert used[RowKind.WA, 3] > 1.0
    assert used[RowKind.WA, 0] == 1.0, "the control: a window that no hit needs"


def test_of_a_prompt_of_whole_rows_the_last_ones_would_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(StoreScheduler, "_note_use_of_end", lambda self, stored: None)
    used = ages(tmp_path, 256)
    assert used[RowKind.FA, 3] == used[RowKind.WA, 3] == 1.0
