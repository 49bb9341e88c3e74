"""Whatever happens to the engines on a root: bytes stay within the capacity, none are lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.budget import accounts
from pdconn.store.budget.accounts import (
    Accounts,
    RowCount,
    Usage,
    WriterAccount,
    read_count,
    sum_usage,
    write_count,
)
from pdconn.store.budget.row_tree import RowTree
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import Shelf, StoredPart, StoredRow
from pdconn.threads import AmountBox
from tests.store.budget.roots import SimulatedEngine, Wrong, simulate

SEEDS = range(25)

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("seed", SEEDS)
def test_any_history_keeps_the_law(tmp_path: Path, seed: int, monkeypatch: Patch) -> None:
    simulate(tmp_path, seed, monkeypatch)


def no_reserve(patch: Patch) -> None:
    patch.setattr(AmountBox, "take_amount", lambda self, amount: True)


def free_before_commit(patch: Patch) -> None:
    right = Accounts.commit_row

    def commit(self: Accounts, shelf: Shelf, part: StoredPart, row: StoredRow) -> bool:
        self.release_reserved(row.nbytes)
        self._own.reserved += row.nbytes
        return right(self, shelf, part, row)

    patch.setattr(Accounts, "commit_row", commit)


def never_counted(patch: Patch) -> None:
    patch.setattr(RowCount, "plus", lambda self, nbytes, kind: self)


def count_down_before_removal(patch: Patch) -> None:
    def remove(self: Accounts, shelf: Shelf, namespace: str, name: RowName) -> int:
        nbytes = next((r.nbytes for r in shelf.rows() if r.name == name), 0)
        count = read_count(self._folder)
        if count is not None:
            write_count(self._folder, count.plus(-nbytes, name.kind))
        return shelf.remove_row(namespace, name)

    patch.setattr(Accounts, "_remove", remove)


def ancestor_evicted(patch: Patch) -> None:
    patch.setattr(RowTree, "_is_leaf", lambda self, place: True)


def window_outlives_its_row(patch: Patch) -> None:
    patch.setattr(
        RowTree,
        "_is_leaf",
        lambda self, p: p[1].kind is RowKind.WA or not self._after[p[0], p[1].key],
    )


def new_rows_of_others_unknown(patch: Patch) -> None:
    patch.setattr(Accounts, "_has_news", lambda self: False)


def dead_writer_ignored(patch: Patch) -> None:
    patch.setattr(accounts, "claim_writer", lambda path: None)


def live_writer_taken_for_dead(patch: Patch) -> None:
    patch.setattr(accounts, "claim_writer", lambda path: os.open(path, os.O_RDWR))


def own_capacity_alone(patch: Patch) -> None:
    def wrong(count: RowCount | None, found: Iterable[WriterAccount]) -> Usage:
        accounts = list(found)
        own = accounts[-1].capacity
        usage = sum_usage(count, accounts)
        return replace(usage, capacity=own, committed=own if count is None else count.committed)

    patch.setattr(accounts, "sum_usage", wrong)


def own_reserve_alone(patch: Patch) -> None:
    right = sum_usage
    patch.setattr(accounts, "sum_usage", lambda count, found: right(count, list(found)[-1:]))


def unread_count_is_nothing(patch: Patch) -> None:
    right = read_count
    patch.setattr(accounts, "read_count", lambda folder: right(folder) or RowCount(0, 0))


def part_that_stays_is_free(patch: Patch) -> None:
    right = Accounts._sort_parts

    def sort_parts(self: Accounts, shelf: Shelf, dead: set[str]) -> int:
        right(self, shelf, dead)
        return 0

    patch.setattr(Accounts, "_sort_parts", sort_parts)


def failed_discard_is_free(patch: Patch) -> None:
    right = SimulatedEngine._give_up

    def give_up(self: SimulatedEngine, part: str, nbytes: int) -> None:
        right(self, part, nbytes)
        if (self.writer, part) in self.root.rows.parts:
            self.budget.release_bytes(nbytes)

    patch.setattr(SimulatedEngine, "_give_up", give_up)


def row_that_was_there_frees_twice(patch: Patch) -> None:
    right = Accounts.commit_row

    def commit(self: Accounts, shelf: Shelf, part: StoredPart, row: StoredRow) -> bool:
        is_new = right(self, shelf, part, row)
        if not is_new:
            self.release_reserved(row.nbytes)
        return is_new

    patch.setattr(Accounts, "commit_row", commit)


MUTANTS: list[Callable[[Any], None]] = [
    no_reserve,
    free_before_commit,
    never_counted,
    count_down_before_removal,
    ancestor_evicted,
    window_outlives_its_row,
    new_rows_of_others_unknown,
    dead_writer_ignored,
    live_writer_taken_for_dead,
    own_capacity_alone,
    own_reserve_alone,
    unread_count_is_nothing,
    part_that_stays_is_free,
    failed_discard_is_free,
    row_that_was_there_frees_twice,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.__name__))
def test_a_wrong_budget_is_told(tmp_path: Path, mutant: Callable[[Patch], None]) -> None:
    def run() -> None:
        for seed in SEEDS:
            with pytest.MonkeyPatch.context() as patch:
                mutant(patch)
                simulate(tmp_path / str(seed), seed, patch)

    with pytest.raises(Wrong):
        run()
