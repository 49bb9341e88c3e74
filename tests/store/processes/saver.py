"""An engine's background work, in a process of its own: saves rows and evicts until it is killed.

Prints a line when it has begun, and one for each row that it commits or evicts.
"""

from __future__ import annotations

import contextlib
import random
import time

from pdconn.store.budget.root_budget import RootBudget
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.interface import StoredPart
from pdconn.store.store_errors import StoreError
from tests.store.budget.forest import row_of

PAGE = 4096
SIZES = {RowKind.FA: 4 * PAGE, RowKind.WA: 2 * PAGE}


class Saver:
    """One writer of a root."""

    def __init__(self, root: str, writer: str, capacity: int, seed: int) -> None:
        settings = StoreSettings(root, capacity)
        self.rng, self.writer = random.Random(seed), writer
        self.shelf = FilesShelf(root, direct_io=False)
        self.budget = RootBudget(settings, writer, sum(SIZES.values()), time.monotonic, time.time)
        self._number = 0

    def run(self) -> None:
        self.budget.open_accounts(self.shelf)
        print("begun", flush=True)
        while True:
            gone: list[RowName] = []
            with contextlib.suppress(StoreError):  # another is stopped while it has the lock
                gone = self.budget.make_room(self.shelf, "ns")
            for name in gone:
                print("evicted", name.file_name, flush=True)
            prefix = tuple(self.rng.randrange(3) for _ in range(self.rng.randrange(1, 8)))
            names = [row_of(prefix[:depth]) for depth in range(1, len(prefix) + 1)]
            self.shelf.touch("ns", names)
            self._save([*names, row_of(prefix, RowKind.WA)])

    def _save(self, names: list[RowName]) -> None:
        taken = []
        for name in names:
            if not self.shelf.has("ns", name):
                if not self.budget.room.take_amount(SIZES[name.kind]):
                    break
                self._number += 1
                taken.append((f"p{self._number}", name))
        for part, name in taken:
            self.shelf.begin(self.writer, part, SIZES[name.kind])
        for part, name in taken:
            nbytes = SIZES[name.kind]
            data = memoryview(bytearray(nbytes))
            self.shelf.write(self.writer, part, [(0, data)])
            try:
                stored = StoredPart(self.writer, part, nbytes)
                if not self.budget.commit_row(self.shelf, stored, "ns", name):
                    self.budget.release_bytes(nbytes)
                print("saved", name.file_name, flush=True)
            except StoreError:
                self.shelf.discard(self.writer, part)
                self.budget.release_bytes(nbytes)
