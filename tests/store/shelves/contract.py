"""What every shelf keeps: a mixin of laws, run over each kind of shelf.

A test module gives the fixture ``open_shelf``, which opens another object over the same rows
(as another process or thread would), and derives one class::

    @pytest.fixture
    def open_shelf(tmp_path) -> OpenShelf:
        return lambda: SomeShelf(tmp_path)

    class TestSomeShelf(ShelfContract):
        pass

Rows begin empty.  Every object is closed by the laws.  ``namespaces`` may be overridden where
rows of earlier runs cannot be removed.
"""

from __future__ import annotations

import random
import threading
import time
from typing import ClassVar

import pytest

from pdconn.store.format.row import RowKind, RowName
from pdconn.store.store_errors import RowDamaged, RowMissing
from tests.store.shelves.part_laws import NoteLaws, PartLaws
from tests.store.shelves.plain_rows import (
    MIB,
    PAGE,
    PATIENCE_S,
    OpenShelf,
    at_once,
    load,
    names_of,
    pages,
    payload,
    row_name,
    save,
)


class RowLaws:
    """A committed row is listed, read, touched and removed by its namespace and name."""

    namespaces: ClassVar[tuple[str, str]] = ("ns", "ns-2")

    def test_rows_lists_exactly_what_is_there(self, open_shelf: OpenShelf) -> None:
        one, two = self.namespaces
        with open_shelf() as ours, open_shelf() as theirs:
            assert list(theirs.rows()) == [] == list(theirs.rows(one))
            expected = []
            for number in range(6):
                name = row_name(number, RowKind.WA if number % 2 else RowKind.FA)
                namespace = one if number < 4 else two
                save(ours, name, payload(number, PAGE * (number + 1)), namespace=namespace)
                expected.append((namespace, name))
            ours.begin("writer", "p", PAGE)
            assert names_of(theirs) == sorted(expected)
            assert names_of(theirs, one) == sorted(row for row in expected if row[0] == one)
            sizes = {row.name.index: row.nbytes for row in theirs.rows()}
            assert sizes == {number: PAGE * (number + 1) for number in range(6)}
            ours.remove_row(*expected[2])
            ours.discard("writer", "p")
            assert names_of(theirs) == sorted(set(expected) - {expected[2]})

    def test_rows_of_two_namespaces_and_kinds_are_apart(self, open_shelf: OpenShelf) -> None:
        one, two = self.namespaces
        fa, wa = row_name(7), row_name(7, RowKind.WA)
        with open_shelf() as shelf:
            assert save(shelf, fa, payload(1), namespace=one)
            assert not shelf.has(two, fa)
            assert not shelf.has(one, wa)
            assert save(shelf, fa, payload(2), namespace=two)
            assert save(shelf, wa, payload(3), namespace=one)
            assert load(shelf, fa, 4 * PAGE, namespace=one) == payload(1)
            assert load(shelf, wa, 4 * PAGE, namespace=one) == payload(3)
            assert shelf.remove_row(one, fa) == 4 * PAGE
            assert load(shelf, fa, 4 * PAGE, namespace=two) == payload(2)
            assert shelf.has(one, wa)

    def test_rows_of_one_key_and_two_places_are_apart(self, open_shelf: OpenShelf) -> None:
        name = row_name(3)
        other = RowName(name.kind, name.key, name.parent, 4)
        with open_shelf() as shelf:
            assert save(shelf, name, payload(1))
            assert not shelf.has("ns", other)
            with pytest.raises(RowMissing):
                load(shelf, other, PAGE)

    def test_a_removed_row_is_missing(self, open_shelf: OpenShelf) -> None:
        name, data = row_name(), payload(1)
        with open_shelf() as ours, open_shelf() as theirs:
            assert ours.remove_row("ns", name) == 0
            save(ours, name, data)
            assert load(theirs, name, len(data)) == data
            assert theirs.remove_row("ns", name) == len(data)
            assert ours.remove_row("ns", name) == 0
            assert not ours.has("ns", name)
            with pytest.raises(RowMissing):
                load(ours, name, len(data))
            assert save(ours, name, payload(2)), "a name may be used again"
            assert load(theirs, name, len(data)) == payload(2)

    def test_of_removals_at_once_one_counts_the_bytes(self, open_shelf: OpenShelf) -> None:
        shelves = [open_shelf() for _ in range(4)]
        save(shelves[0], row_name(), payload(1))
        freed = at_once(lambda shelf=shelf: shelf.remove_row("ns", row_name()) for shelf in shelves)
        assert sorted(freed) == [0, 0, 0, 4 * PAGE]
        for shelf in shelves:
            shelf.close()

    def test_touching_makes_a_row_the_latest_used(self, open_shelf: OpenShelf) -> None:
        names = [row_name(number) for number in range(4)]
        with open_shelf() as ours, open_shelf() as theirs:
            for name in names[:3]:
                save(ours, name, payload(name.index))
            before = {row.name: row.used_at for row in theirs.rows()}
            assert all(abs(used - time.time()) < 3600 for used in before.values())
            deadline = time.monotonic() + PATIENCE_S
            used: dict[RowName, float] = dict(before)
            while used[names[0]] <= max(before.values()) and time.monotonic() < deadline:
                ours.touch("ns", [names[3], names[0]])  # the first of them is not there
                used = {row.name: row.used_at for row in theirs.rows()}
            assert max(used, key=lambda name: used[name]) == names[0]
            assert used[names[1]] == before[names[1]]
            assert not theirs.has("ns", names[3])

    def test_a_use_that_lies_ahead_stays_until_it_is_moved(self, open_shelf: OpenShelf) -> None:
        kept, other, absent = (row_name(number) for number in range(3))
        with open_shelf() as ours, open_shelf() as theirs:
            for name in (kept, other):
                save(ours, name, payload(name.index))
            now = float(int(time.time()))
            first, later = now + 100.25, now + 200.5
            ours.touch("ns", [absent, kept], later)
            for at in (None, first):
                theirs.touch("ns", [kept], at)
                assert ours.used_at("ns", kept) == later
            theirs.move_use("ns", [kept, other, absent], first, now)
            assert ours.used_at("ns", kept) == later, "it is not the use that was to be moved"
            theirs.move_use("ns", [absent, kept, other], later, now - 50)
            assert ours.used_at("ns", kept) == now - 50
            assert abs((ours.used_at("ns", other) or 0.0) - now) < 3600

    def test_a_use_too_far_ahead_does_not_stay(self, open_shelf: OpenShelf) -> None:
        """As of a damaged file, or a clock that was wrong: it would keep the row for ever."""
        name = row_name()
        with open_shelf() as shelf:
            save(shelf, name, payload(1))
            shelf.touch("ns", [name], time.time() + 1e8)
            shelf.touch("ns", [name])
            assert abs((shelf.used_at("ns", name) or 0.0) - time.time()) < 3600


class ReadLaws:
    """Reads fill what was asked, or say why not."""

    def test_ranges_are_read_in_any_order(self, open_shelf: OpenShelf) -> None:
        data = payload(1, 64 * PAGE)
        cuts = sorted(random.Random(2).sample(range(1, 64), 9))
        at = [(a * PAGE, (b - a) * PAGE) for a, b in zip([0, *cuts], [*cuts, 64], strict=True)]
        with open_shelf() as shelf:
            save(shelf, row_name(), data)
            for seed in range(3):
                random.Random(seed).shuffle(at)
                expected = b"".join(data[start : start + length] for start, length in at)
                assert load(shelf, row_name(), 0, at=at) == expected
            assert load(shelf, row_name(), 0, at=[(63 * PAGE, PAGE)]) == data[-PAGE:]

    def test_more_ranges_than_one_call_takes(self, open_shelf: OpenShelf) -> None:
        data = payload(1, 256 * PAGE)
        with open_shelf() as shelf:
            save(shelf, row_name(), data)
            into = pages(len(data))
            size = 512
            shelf.read(
                "ns",
                row_name(),
                [(at, into[at : at + size]) for at in range(0, len(data), size)],
            )
            assert into == data

    def test_a_large_row_is_written_and_read_whole(self, open_shelf: OpenShelf) -> None:
        data = payload(1, 9 * MIB)
        with open_shelf() as ours, open_shelf() as theirs:
            save(ours, row_name(), data)
            for _ in range(2):
                assert load(theirs, row_name(), len(data)) == data
            half = len(data) // 2
            assert load(theirs, row_name(), 0, at=[(half, half), (0, half)]) == (
                data[half:] + data[:half]
            )
            (row,) = theirs.rows()
            assert row.nbytes == len(data)

    def test_a_row_that_is_not_there_is_missing(self, open_shelf: OpenShelf) -> None:
        with open_shelf() as shelf:
            assert not shelf.has("ns", row_name())
            for _ in range(2):
                with pytest.raises(RowMissing):
                    load(shelf, row_name(), PAGE)
            save(shelf, row_name(), payload(1))
            assert shelf.has("ns", row_name())
            assert load(shelf, row_name(), PAGE) == payload(1)[:PAGE]

    @pytest.mark.parametrize("nbytes", [PAGE, PAGE + 100, MIB])
    def test_a_row_that_ends_before_a_range_is_damaged(
        self, open_shelf: OpenShelf, nbytes: int
    ) -> None:
        with open_shelf() as shelf:
            save(shelf, row_name(), payload(1, nbytes))
            for at in ([(0, 2 * MIB)], [(4 * MIB, PAGE)], [(0, PAGE), (nbytes - 50, 100)]):
                with pytest.raises(RowDamaged):
                    load(shelf, row_name(), 0, at=at)
            assert load(shelf, row_name(), nbytes) == payload(1, nbytes)

    def test_a_row_removed_while_it_is_read_is_whole_or_missing(
        self, open_shelf: OpenShelf
    ) -> None:
        data = [payload(n, 40 * PAGE) for n in range(2)]
        rounds, reads = 10, []
        is_over = threading.Event()

        def replace() -> None:
            try:
                with open_shelf() as own:
                    for number in range(rounds):
                        save(own, row_name(), data[number % 2])
                        own.remove_row("ns", row_name())
            finally:
                is_over.set()

        def read() -> None:
            with open_shelf() as own:
                while not is_over.is_set():
                    try:
                        reads.append(load(own, row_name(), 40 * PAGE))
                    except RowMissing:
                        reads.append(None)

        at_once([replace, read])
        assert all(found is None or found in data for found in reads)

    def test_closing_may_be_repeated(self, open_shelf: OpenShelf) -> None:
        shelf = open_shelf()
        shelf.close()
        shelf.close()


class ShelfContract(PartLaws, NoteLaws, RowLaws, ReadLaws):
    """All laws of a shelf."""
