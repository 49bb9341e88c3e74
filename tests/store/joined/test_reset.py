"""A reset of the prefix cache while rows are being committed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdconn.store.engine.keeper_thread import Committer, SaveBatch
from pdconn.store.engine.lookups import Catalogue
from pdconn.store.format.footer import checksum, encode_note, row_nbytes
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.rank_commands import SaveRow
from pdconn.store.shelf.interface import Shelf, StoredPart
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.tools.cli.stored_rows import LAYOUT, prompt

FA = LAYOUT.fa


class ResettingBudget:
    """The engine resets its cache while the first row's commit waits for the accounts; blocks
    of the second row are others' by then, and are gathered and noted before it ends."""

    def __init__(self) -> None:
        self.namespace = "before"

    def commit_row(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        if self.namespace == "before":
            self.namespace = "after"
            write(shelf, 1, b"bytes of others")
        return shelf.commit(part.writer, part.part, namespace, name)

    def release_bytes(self, nbytes: int) -> None:
        pass


def write(shelf: Shelf, number: int, content: bytes) -> None:
    """What a rank does."""
    data = (content * (FA.data_nbytes // len(content) + 1))[: FA.data_nbytes]
    shelf.begin("w", f"p{number}", row_nbytes(FA))
    shelf.write("w", f"p{number}", [(0, memoryview(bytearray(data)))])
    sums = {n: checksum(data[s.offset : s.offset + s.nbytes]) for n, s in enumerate(FA.slabs)}
    shelf.put_note("w", f"p{number}", 0, encode_note(sums))


@pytest.mark.parametrize(
    ("asks", "committed"), [("each row", [0]), ("each step", [0, 1])], ids=["ours", "control"]
)
def test_a_row_gathered_after_a_reset_is_not_committed_before_it(
    asks: str, committed: list[int]
) -> None:
    """The control knows the namespace as it was when the step began."""
    budget = ResettingBudget()
    committer = Committer(
        LAYOUT,
        writer="w",
        num_ranks=1,
        catalogue=Catalogue("before"),
        budget=budget,  # type: ignore[arg-type]
        settled=lambda row: None,
    )
    chain = prompt(1, 3)
    rows = tuple(SaveRow(chain.name(RowKind.FA, index), f"p{index}") for index in range(2))
    committer.pending.add_batch(SaveBatch("before", rows))
    now: Callable[[], str] = lambda: budget.namespace  # noqa: E731
    with MemoryShelf(MemoryRows()) as shelf:
        write(shelf, 0, b"good")
        done = committer.commit_written(shelf, now if asks == "each row" else lambda: "before", 0.0)
        assert [row.name.index for row in done] == committed
        assert {row.namespace for row in done} == {"before"}
        assert not list(shelf.parts())
