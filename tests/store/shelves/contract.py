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

import itertools
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from pdconn.store.errors import RowDamaged, RowMissing, StoreError
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.shelf.base import Shelf

OpenShelf = Callable[[], Shelf]

PAGE = 4096
MIB = 1 << 20
PATIENCE_S = 30.0


def row_name(number: int = 0, kind: RowKind = RowKind.FA) -> RowName:
    """A row of its own for each number; keys differ from their first byte on."""
    key = random.Random(number).randbytes(16)
    parent = random.Random(number - 1).randbytes(16) if number else bytes(16)
    return RowName(kind, key, parent, number)


def pages(data: bytes | int) -> memoryview:
    """Writable host memory that begins at a page, of these bytes or of so many zeros."""
    nbytes = data if isinstance(data, int) else len(data)
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    if not isinstance(data, int):
        view[:] = data
    return view


def payload(seed: int, nbytes: int = 4 * PAGE) -> bytes:
    """Bytes that are other ones for each seed."""
    return random.Random(seed).randbytes(nbytes)


def save(
    shelf: Shelf, name: RowName, data: bytes, *, namespace: str = "ns", part: str = "p", ranks=1
) -> bool:
    """Begin, write, note and commit a row; whether it is new."""
    shelf.begin("writer", part, len(data))
    shelf.write("writer", part, [(0, pages(data))])
    for rank in range(ranks):
        shelf.put_note("writer", part, rank, b"note %d" % rank)
    return shelf.commit("writer", part, namespace, name)


def load(
    shelf: Shelf,
    name: RowName,
    nbytes: int,
    *,
    namespace: str = "ns",
    at: Sequence[tuple[int, int]] | None = None,
) -> bytes:
    """The bytes of the ranges ``at`` (offset, length), joined; the first ``nbytes`` for None."""
    ranges = [(offset, pages(length)) for offset, length in at or [(0, nbytes)]]
    shelf.read(namespace, name, ranges)
    return b"".join(bytes(view) for _, view in ranges)


def names_of(shelf: Shelf, namespace: str | None = None) -> list[tuple[str, RowName]]:
    """What ``rows`` lists, in order."""
    return sorted((row.namespace, row.name) for row in shelf.rows(namespace))


def parts_of(shelf: Shelf) -> set[tuple[str, str]]:
    """What ``parts`` lists."""
    return {(part.writer, part.part) for part in shelf.parts()}


def at_once(calls: Iterable[Callable[[], object]]) -> list[object]:
    """What the calls return, each made by a thread of its own, begun together."""
    calls = list(calls)
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        start.wait(PATIENCE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class PartLaws:
    """A part is seen by its writer alone, until it is committed."""

    def test_a_part_is_no_row_until_it_is_committed(self, open_shelf: OpenShelf) -> None:
        name, data = row_name(), payload(1)
        with open_shelf() as ours, open_shelf() as theirs:
            ours.begin("writer", "p", len(data))
            ours.write("writer", "p", [(0, pages(data))])
            ours.put_note("writer", "p", 0, b"note")
            assert not theirs.has("ns", name)
            assert list(theirs.rows()) == []
            with pytest.raises(RowMissing):
                load(theirs, name, len(data))
            assert ours.commit("writer", "p", "ns", name)
            assert theirs.has("ns", name)
            assert load(theirs, name, len(data)) == data

    def test_the_first_commit_of_a_name_wins(self, open_shelf: OpenShelf) -> None:
        name, first, second = row_name(), payload(1), payload(2)
        with open_shelf() as ours, open_shelf() as theirs:
            assert save(ours, name, first, part="a")
            assert not save(theirs, name, second, part="b")
            assert load(theirs, name, len(first)) == first
            assert parts_of(ours) == set()

    def test_of_commits_at_once_one_wins(self, open_shelf: OpenShelf) -> None:
        name, shelves = row_name(), [open_shelf() for _ in range(4)]
        for number, shelf in enumerate(shelves):
            shelf.begin("writer", f"p{number}", 4 * PAGE)
            shelf.write("writer", f"p{number}", [(0, pages(payload(number)))])
        won = at_once(
            lambda shelf=shelf, number=number: shelf.commit("writer", f"p{number}", "ns", name)
            for number, shelf in enumerate(shelves)
        )
        assert sorted(map(bool, won)) == [False, False, False, True]
        assert load(shelves[0], name, 4 * PAGE) == payload(won.index(True))
        assert parts_of(shelves[0]) == set()
        for shelf in shelves:
            shelf.close()

    def test_a_part_is_gone_once_committed_and_its_name_free(self, open_shelf: OpenShelf) -> None:
        with open_shelf() as shelf:
            assert save(shelf, row_name(0), payload(0), ranks=3)
            assert parts_of(shelf) == set()
            assert dict(shelf.notes("writer", "p")) == {}
            assert save(shelf, row_name(1), payload(1))
            assert load(shelf, row_name(1), 4 * PAGE) == payload(1)

    def test_writers_of_disjoint_ranges_make_one_row(self, open_shelf: OpenShelf) -> None:
        data, quarter = payload(1, 64 * PAGE), 16 * PAGE
        with open_shelf() as shelf:
            shelf.begin("writer", "p", len(data))

            def write(rank: int) -> None:
                half = quarter // 2
                spans = [rank * quarter + half, rank * quarter]  # the second half first
                with open_shelf() as own:
                    own.write("writer", "p", [(at, pages(data[at : at + half])) for at in spans])
                    own.put_note("writer", "p", rank, b"%d" % rank)

            at_once(lambda rank=rank: write(rank) for rank in range(4))
            assert dict(shelf.notes("writer", "p")) == {n: b"%d" % n for n in range(4)}
            assert shelf.commit("writer", "p", "ns", row_name())
            assert load(shelf, row_name(), len(data)) == data

    def test_bytes_of_any_alignment_are_written_and_read(self, open_shelf: OpenShelf) -> None:
        data = payload(1, 3 * PAGE)
        with open_shelf() as shelf:
            shelf.begin("writer", "p", len(data))
            cuts = [0, 5, 4096, 4100, 8192, len(data)]
            views = [(a, memoryview(bytearray(data))[a:b]) for a, b in itertools.pairwise(cuts)]
            shelf.write("writer", "p", views)
            assert shelf.commit("writer", "p", "ns", row_name())
            into = memoryview(bytearray(5001))
            shelf.read("ns", row_name(), [(4097, into)])
            assert into == data[4097 : 4097 + 5001]

    def test_what_was_not_written_of_a_part_is_not_another_rows_bytes(
        self, open_shelf: OpenShelf
    ) -> None:
        with open_shelf() as shelf:
            assert save(shelf, row_name(0), b"\xff" * 4 * PAGE)
            shelf.remove("ns", row_name(0))
            shelf.begin("writer", "p", 4 * PAGE)
            shelf.write("writer", "p", [(2 * PAGE, pages(b"a" * PAGE))])
            shelf.write("writer", "p", [(3 * PAGE, pages(b"b" * PAGE))])
            shelf.write("writer", "p", [(0, pages(bytes(2 * PAGE)))])
            assert shelf.commit("writer", "p", "ns", row_name(1))
            expected = bytes(2 * PAGE) + b"a" * PAGE + b"b" * PAGE
            assert load(shelf, row_name(1), 4 * PAGE) == expected

    def test_writing_or_committing_what_was_not_begun_fails(self, open_shelf: OpenShelf) -> None:
        with open_shelf() as shelf:
            with pytest.raises(StoreError):
                shelf.write("writer", "none", [(0, pages(payload(1)))])
            with pytest.raises(StoreError):
                shelf.commit("writer", "none", "ns", row_name())
            assert not shelf.has("ns", row_name())


class NoteLaws:
    """Notes are whole, by rank, and gone with their part."""

    def test_notes_are_read_whole_while_they_are_replaced(self, open_shelf: OpenShelf) -> None:
        known = [bytes([n]) * (20_000 + n) for n in range(12)]
        with open_shelf() as ours, open_shelf() as theirs:
            ours.begin("writer", "p", PAGE)
            is_over = threading.Event()

            def put() -> None:
                try:
                    for note in known:
                        ours.put_note("writer", "p", 3, note)
                finally:
                    is_over.set()

            def watch() -> None:
                while not is_over.is_set():
                    found = dict(theirs.notes("writer", "p"))
                    assert found == {} or found[3] in known

            at_once([put, watch])
            assert dict(theirs.notes("writer", "p")) == {3: known[-1]}
            ours.discard("writer", "p")

    def test_notes_come_from_any_rank_in_any_order(self, open_shelf: OpenShelf) -> None:
        with open_shelf() as shelf:
            shelf.begin("writer", "p", PAGE)
            shelf.begin("writer", "p1", PAGE)
            shelf.put_note("writer", "p", 11, b"eleven")
            shelf.put_note("writer", "p", 1, b"")
            shelf.put_note("writer", "p1", 1, b"of another part")
            assert dict(shelf.notes("writer", "p")) == {11: b"eleven", 1: b""}
            shelf.discard("writer", "p")
            assert dict(shelf.notes("writer", "p")) == {}
            assert dict(shelf.notes("writer", "p1")) == {1: b"of another part"}
            shelf.discard("writer", "p1")

    def test_there_are_no_notes_of_what_was_not_begun(self, open_shelf: OpenShelf) -> None:
        with open_shelf() as shelf:
            assert dict(shelf.notes("writer", "none")) == {}

    def test_discarding_leaves_nothing_and_may_be_repeated(self, open_shelf: OpenShelf) -> None:
        with open_shelf() as ours, open_shelf() as theirs:
            ours.begin("writer", "p", 4 * PAGE)
            ours.begin("writer", "other", 4 * PAGE)
            ours.put_note("writer", "p", 0, b"note")
            theirs.discard("writer", "p")
            theirs.discard("writer", "p")
            ours.discard("writer", "never-begun")
            ours.discard("no-writer", "p")
            assert parts_of(ours) == {("writer", "other")}
            with pytest.raises(StoreError):
                ours.write("writer", "p", [(0, pages(payload(1)))])
            with pytest.raises(StoreError):
                ours.commit("writer", "p", "ns", row_name())
            ours.discard("writer", "other")
            assert parts_of(theirs) == set()

    def test_parts_of_every_writer_are_listed_with_their_room(self, open_shelf: OpenShelf) -> None:
        with open_shelf() as ours, open_shelf() as theirs:
            ours.begin("a", "p", 4 * PAGE)
            ours.begin("a", "q", PAGE)
            theirs.begin("b", "p", 2 * PAGE)
            theirs.put_note("b", "p", 0, b"note")
            found = {(part.writer, part.part): part.nbytes for part in ours.parts()}
            assert found == {("a", "p"): 4 * PAGE, ("a", "q"): PAGE, ("b", "p"): 2 * PAGE}
            for writer, part in found:
                theirs.discard(writer, part)
            assert list(ours.parts()) == []


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
            ours.remove(*expected[2])
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
            assert shelf.remove(one, fa) == 4 * PAGE
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
            assert ours.remove("ns", name) == 0
            save(ours, name, data)
            assert load(theirs, name, len(data)) == data
            assert theirs.remove("ns", name) == len(data)
            assert ours.remove("ns", name) == 0
            assert not ours.has("ns", name)
            with pytest.raises(RowMissing):
                load(ours, name, len(data))
            assert save(ours, name, payload(2)), "a name may be used again"
            assert load(theirs, name, len(data)) == payload(2)

    def test_of_removals_at_once_one_counts_the_bytes(self, open_shelf: OpenShelf) -> None:
        shelves = [open_shelf() for _ in range(4)]
        save(shelves[0], row_name(), payload(1))
        freed = at_once(lambda shelf=shelf: shelf.remove("ns", row_name()) for shelf in shelves)
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
                        own.remove("ns", row_name())
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
