"""Rows that are given up: at once where a rank says so, and whatever it makes of them later."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdconn.store.engine import keeper_thread as keeper
from pdconn.store.engine.keeper_thread import NOTES_S, Committer, SaveBatch
from pdconn.store.engine.lookups import Catalogue
from pdconn.store.format.footer import checksum, encode_note, row_nbytes
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.rank_commands import SaveRow
from pdconn.store.shelf.interface import Shelf, StoredPart
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.tools.cli.stored_rows import LAYOUT, prompt

FA = LAYOUT.fa
CHAIN, OTHER = prompt(1, 12), prompt(2, 1)


class Reserved:
    """Bytes that are given back."""

    def __init__(self) -> None:
        self.released = 0

    def commit_row(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        return shelf.commit(part.writer, part.part, namespace, name)

    def release_bytes(self, nbytes: int) -> None:
        self.released += nbytes


class Saving:
    """A committer of rows 0 to 11, each of one rank."""

    def __init__(self) -> None:
        self.shelf = MemoryShelf(MemoryRows())
        self.budget = Reserved()
        self.committer = Committer(
            LAYOUT,
            writer="w",
            num_ranks=1,
            catalogue=Catalogue("ns"),
            budget=self.budget,  # type: ignore[arg-type]
            settled=lambda row: None,
        )
        rows = [SaveRow(CHAIN.name(RowKind.FA, index), f"p{index}") for index in range(12)]
        self.committer.pending.add_batch(SaveBatch("ns", rows))

    def write(self, index: int) -> None:
        """What the rank does."""
        self.shelf.begin("w", f"p{index}", row_nbytes(FA))
        data = memoryview(bytearray(FA.data_nbytes))
        self.shelf.write("w", f"p{index}", [(0, data)])
        sums = {n: checksum(data[s.offset : s.offset + s.nbytes]) for n, s in enumerate(FA.slabs)}
        self.shelf.put_note("w", f"p{index}", 0, encode_note(sums))

    def step(self, now: float) -> list[int]:
        return [
            row.name.index for row in self.committer.commit_written(self.shelf, lambda: "ns", now)
        ]


@pytest.mark.parametrize("says_so", [True, False], ids=["ours", "control"])
def test_rows_that_could_not_be_noted_hold_up_no_other(says_so: bool) -> None:
    """On a full disk; four of them stopped all commits for a minute."""
    saving = Saving()
    for index in range(6, 12):
        saving.write(index)
    if says_so:
        for index in range(6):
            saving.committer.pending.part_not_saved(f"p{index}")
    assert saving.step(0.0) == (list(range(6, 12)) if says_so else [])
    assert saving.budget.released == (6 * row_nbytes(FA) if says_so else 0)
    assert saving.committer.take_failures() == (6 if says_so else 0)
    assert saving.step(NOTES_S + 1.0) == ([] if says_so else list(range(6, 12)))
    assert len(saving.committer.pending.rows) == 0
    assert saving.committer.pending._not_saved == set()


@pytest.mark.parametrize("tenant", [b"another.", b""], ids=["ours", "control"])
def test_a_tenants_rows_are_committed_while_others_are_not_written(tenant: bytes) -> None:
    """Ranks write tenants in turn, so a row may be written long before those saved earlier."""
    saving = Saving()
    name = replace(OTHER.name(RowKind.FA, 0), tenant=tenant)
    saving.committer.pending.add_batch(SaveBatch("ns", [SaveRow(name, "p99")]))
    saving.write(99)
    assert saving.step(0.0) == ([0] if tenant else [])


def test_what_is_said_of_rows_that_are_settled_is_forgotten() -> None:
    saving = Saving()
    saving.write(0)
    assert saving.step(0.0) == [0]
    saving.committer.pending.part_not_saved("p0")
    assert saving.committer.pending._not_saved == set()


@pytest.mark.parametrize("again", [True, False], ids=["ours", "control"])
def test_a_part_that_a_late_rank_makes_anew_is_discarded(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are not reserved: they were returned when the row was given up."""
    if not again:
        monkeypatch.setattr(keeper, "_AGAIN_S", float("inf"))
    saving = Saving()
    saving.step(0.0)
    assert saving.step(NOTES_S + 1.0) == []
    assert saving.budget.released == 12 * row_nbytes(FA)
    saving.write(3)  # the rank was stopped
    for minutes in range(2, 20):
        assert saving.step(60.0 * minutes) == []
    assert [part.part for part in saving.shelf.parts()] == ([] if again else ["p3"])
    saving.step(2 * 3600.0)
    saving.step(3 * 3600.0)
    assert (saving.committer._given_up._parts == {}) == again, "not for ever"


def test_a_row_that_was_added_just_now_is_not_late_with_those_before_it() -> None:
    """Parts went with their folder: what was saved next was given up before it was written."""
    saving = Saving()
    saving.step(0.0)
    late = SaveRow(OTHER.name(RowKind.FA, 0), "late")
    saving.committer.pending.add_batch(SaveBatch("ns", [late]))
    saving.step(NOTES_S - 1.0)
    saving.step(NOTES_S + 1.0)
    assert len(saving.committer.pending.rows) == 1
    saving.step(2 * NOTES_S + 1.0)
    assert len(saving.committer.pending.rows) == 0
