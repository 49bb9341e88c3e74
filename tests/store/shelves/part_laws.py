"""Laws of what is not yet a row: parts, which their writer alone sees, and notes."""

from __future__ import annotations

import itertools
import threading

import pytest

from pdconn.store.store_errors import RowMissing, StoreError
from tests.store.shelves.plain_rows import (
    PAGE,
    OpenShelf,
    at_once,
    load,
    pages,
    parts_of,
    payload,
    row_name,
    save,
)


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

    @pytest.mark.parametrize("later", [2, 6])
    def test_a_part_that_is_begun_again_has_the_most_room_that_was_asked_for(
        self, open_shelf: OpenShelf, later: int
    ) -> None:
        """Ranks ask for different amounts where rows are packed: what is written stays."""
        data = payload(1)
        with open_shelf() as ours, open_shelf() as theirs:
            ours.begin("writer", "p", len(data))
            ours.write("writer", "p", [(0, pages(data))])
            theirs.begin("writer", "p", later * PAGE)
            whole = max(len(data), later * PAGE)
            if whole > len(data):
                theirs.write("writer", "p", [(len(data), pages(bytes(whole - len(data))))])
            assert ours.commit("writer", "p", "ns", row_name())
            assert [row.nbytes for row in ours.rows()] == [whole]
            assert load(theirs, row_name(), len(data)) == data

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
            shelf.remove_row("ns", row_name(0))
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
