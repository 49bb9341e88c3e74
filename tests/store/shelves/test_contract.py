"""The contract catches shelves that break a law, and settings open the shelf that they name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from pdconn.store.format.row import RowName
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.interface import Buffer, StoredPart, StoredRow
from pdconn.store.shelf.open import open_shelf
from pdconn.store.store_errors import ShelfFailure, StoreSettingError
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.shelves import contract
from tests.store.shelves.contract import ShelfContract
from tests.store.shelves.plain_rows import PAGE


class LastCommitWins(MemoryShelf):
    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        self.remove_row(namespace, name)
        return super().commit(writer, part, namespace, name)


class EveryCommitIsNew(MemoryShelf):
    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        super().commit(writer, part, namespace, name)
        return True


class ShowsParts(MemoryShelf):
    def has(self, namespace: str, name: RowName) -> bool:
        return bool(self._shared.parts) or super().has(namespace, name)


class MixesNotes(MemoryShelf):
    def notes(self, writer: str, part: str) -> Mapping[int, bytes]:
        found: dict[int, bytes] = {}
        for each in list(self.parts()):
            if each.part.startswith(part):
                found.update(super().notes(each.writer, each.part))
        return found


class TearsNotes(MemoryShelf):
    def put_note(self, writer: str, part: str, rank: int, note: bytes) -> None:
        super().put_note(writer, part, rank, note[: len(note) // 2])
        time.sleep(0.01)
        super().put_note(writer, part, rank, note)


class ListsEveryNamespace(MemoryShelf):
    def rows(self, namespace: str | None = None) -> Iterator[StoredRow]:
        return super().rows()


class ForgetsNamespaces(MemoryShelf):
    def remove_row(self, namespace: str, name: RowName) -> int:
        return sum(super(ForgetsNamespaces, self).remove_row(each, name) for each in ("ns", "ns-2"))


class FillsUp(MemoryShelf):
    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
        row = self._shared.rows.get((namespace, name))
        nbytes = len(row.data) if row else 0
        super().read(
            namespace,
            name,
            [(at, into[: max(0, nbytes - at)]) for at, into in ranges if at < nbytes],
        )


class SortsRanges(MemoryShelf):
    def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
        row = bytearray(sum(len(into) for _, into in ranges))
        first = min(at for at, _ in ranges)
        super().read(namespace, name, [(first, memoryview(row))])
        at = 0
        for _, into in ranges:
            into[:] = row[at : at + len(into)]
            at += len(into)


class NeverTouches(MemoryShelf):
    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        if at is not None:
            super().touch(namespace, names, at)


class TouchesBackwards(MemoryShelf):
    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        for row in self.rows(namespace):
            if row.name in names:
                now = self._shared.clock() if at is None else at
                self.move_use(namespace, [row.name], row.used_at, now)


class MovesEveryUse(MemoryShelf):
    def move_use(self, namespace: str, names: Sequence[RowName], old: float, new: float) -> None:
        for row in self.rows(namespace):
            if row.name in names:
                super().move_use(namespace, [row.name], row.used_at, new)


class BelievesEveryUse(MemoryShelf):
    def touch(self, namespace: str, names: Sequence[RowName], at: float | None = None) -> None:
        now = self._shared.clock()
        for name in names:
            row = self._shared.rows.get((namespace, name))
            if row is not None:
                row.used_at = max(row.used_at, now if at is None else at)


class FreesNothing(MemoryShelf):
    def remove_row(self, namespace: str, name: RowName) -> int:
        super().remove_row(namespace, name)
        return 0


class ListsOwnParts(MemoryShelf):
    def parts(self) -> Iterator[StoredPart]:
        return (part for part in super().parts() if part.writer == "a")


class KeepsParts(MemoryShelf):
    def discard(self, writer: str, part: str) -> None:
        if not self.notes(writer, part):
            super().discard(writer, part)


MUTANTS = {
    LastCommitWins: "test_the_first_commit_of_a_name_wins",
    EveryCommitIsNew: "test_of_commits_at_once_one_wins",
    ShowsParts: "test_a_part_is_no_row_until_it_is_committed",
    MixesNotes: "test_notes_come_from_any_rank_in_any_order",
    TearsNotes: "test_notes_are_read_whole_while_they_are_replaced",
    ListsEveryNamespace: "test_rows_lists_exactly_what_is_there",
    ForgetsNamespaces: "test_rows_of_two_namespaces_and_kinds_are_apart",
    SortsRanges: "test_ranges_are_read_in_any_order",
    NeverTouches: "test_touching_makes_a_row_the_latest_used",
    TouchesBackwards: "test_a_use_that_lies_ahead_stays_until_it_is_moved",
    MovesEveryUse: "test_a_use_that_lies_ahead_stays_until_it_is_moved",
    BelievesEveryUse: "test_a_use_too_far_ahead_does_not_stay",
    FreesNothing: "test_a_removed_row_is_missing",
    ListsOwnParts: "test_parts_of_every_writer_are_listed_with_their_room",
    KeepsParts: "test_discarding_leaves_nothing_and_may_be_repeated",
}
BROKEN = (AssertionError, pytest.fail.Exception)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_shelf_that_breaks_a_law_is_caught(
    mutant: type[MemoryShelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "PATIENCE_S", 0.5)
    law = getattr(ShelfContract(), MUTANTS[mutant])
    shared, broken = MemoryRows(), MemoryRows()
    law(lambda: MemoryShelf(shared))
    with pytest.raises(BROKEN):
        law(lambda: mutant(broken))


@pytest.mark.parametrize("nbytes", [PAGE, PAGE + 100])
def test_a_shelf_that_fills_up_short_rows_is_caught(nbytes: int) -> None:
    law, broken = ShelfContract().test_a_row_that_ends_before_a_range_is_damaged, MemoryRows()
    with pytest.raises(BROKEN):
        law(lambda: FillsUp(broken), nbytes)


# Settings


@pytest.mark.parametrize("direct_io", [True, False, "auto"])
def test_settings_open_the_shelf_that_they_name(tmp_path: Path, direct_io: bool | str) -> None:
    settings = StoreSettings(str(tmp_path / "root"), 1 << 30, direct_io=direct_io)  # type: ignore[arg-type]
    with open_shelf(settings) as shelf:
        assert isinstance(shelf, FilesShelf)
        assert shelf._transfer.direct_io == direct_io
    assert (tmp_path / "root" / "format").is_file()


def test_a_shelf_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreSettingError, match="files or posix"):
        open_shelf(StoreSettings(str(tmp_path), 1 << 30, shelf="tape"))


def test_a_root_that_is_a_file_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ShelfFailure, match="cannot open the root"):
        open_shelf(StoreSettings(str(tmp_path / "file" / "root"), 1 << 30))
