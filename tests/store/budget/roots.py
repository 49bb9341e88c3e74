"""Engines on one root, simulated in one process: each may be killed before any change it makes.

Locks of files work between open files, so each engine's :class:`RootBudget` locks out those of
the others as another process would.  After every change it is checked that

* the bytes that are there are within the capacity;
* what the accounts say is never below the bytes that are there, or may be at once;
* no row lost one that it needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.budget import accounts, root_budget
from pdconn.store.budget.accounts import Accounts, read_account, read_count
from pdconn.store.budget.root_budget import RootBudget
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.interface import StoredPart, StoredRow
from pdconn.store.store_errors import ShelfFailure, StoreError
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.budget.forest import NAMESPACES, needs, row_of

SIZES = {RowKind.FA: 64, RowKind.WA: 32}
CAPACITY = 30 * 64


class Killed(BaseException):
    """The engine was killed."""


class Wrong(AssertionError):
    """The law was broken."""


class Steps:
    """Counts the changes that engines make, and kills the engine before the one of a number."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.left: int | None = None
        self._check = check

    def __call__(self) -> None:
        self._check()
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            self()
            return call(*args, **kwargs)

        return stepping


class SteppingShelf(MemoryShelf):
    """Each change is a step; removing a row that another needs is wrong; some calls fail."""

    def __init__(self, shared: MemoryRows, step: Steps, fails: Callable[[], bool]) -> None:
        super().__init__(shared)
        self._step, self._fails = step, fails

    def begin(self, writer: str, part: str, nbytes: int) -> None:
        self._step()
        super().begin(writer, part, nbytes)

    def commit(self, writer: str, part: str, namespace: str, name: RowName) -> bool:
        self._step()
        if self._fails():
            raise ShelfFailure("no commit now")
        return super().commit(writer, part, namespace, name)

    def discard(self, writer: str, part: str) -> None:
        self._step()
        if self._fails():
            raise ShelfFailure("no discard now")
        super().discard(writer, part)

    def remove_row(self, namespace: str, name: RowName) -> int:
        self._step()
        if self._fails():
            raise ShelfFailure("no removal now")
        for where, other in self._shared.rows:
            if where == namespace and needs(name, other):
                raise Wrong(f"{other} needs {name}, which is evicted")
        return super().remove_row(namespace, name)


class SimulatedEngine:
    """One boot of an engine: a budget, and parts on their way."""

    def __init__(self, root: SimulatedRoot, writer: str, capacity: int) -> None:
        self.root, self.writer = root, writer
        settings = StoreSettings(str(root.path), capacity, wa_share=0.4)
        clock = root.rows.clock
        self.budget = RootBudget(settings, writer, sum(SIZES.values()), clock, clock)
        self.shelf = SteppingShelf(root.rows, root.step, root.fails)
        self.is_open = False
        self.parts: dict[str, tuple[str, RowName]] = {}
        self._number = 0

    def act(self, rng: random.Random) -> None:
        """Do something that an engine does."""
        if not self.is_open:
            self.budget.open_accounts(self.shelf)
            self.is_open = True
        what = rng.choice(["step", "begin", "begin", "begin", "commit", "commit", "drop", "use"])
        getattr(self, f"_{what}")(rng)

    def _step(self, rng: random.Random) -> None:
        self.budget.make_room(self.shelf, "ns-1")

    def _begin(self, rng: random.Random) -> None:
        """Save the next row of a prefix, or its WA row."""
        namespace = rng.choice(NAMESPACES)
        path: tuple[int, ...] = ()
        while self.shelf.has(namespace, row_of((*path, (branch := rng.randrange(3))))):
            path = (*path, branch)
        path = (*path, branch)
        kind = RowKind.WA if len(path) > 1 and rng.random() < 0.5 else RowKind.FA
        name = row_of(path[:-1] if kind is RowKind.WA else path, kind)
        if self.budget.room.take_amount(SIZES[kind]):
            self._number += 1
            part = f"p{self._number}"
            self.shelf.begin(self.writer, part, SIZES[kind])
            self.parts[part] = namespace, name

    def _commit(self, rng: random.Random) -> None:
        if not self.parts:
            return
        part = rng.choice(list(self.parts))
        namespace, name = self.parts.pop(part)
        nbytes = SIZES[name.kind]
        try:
            before = row_of_need(name)
            if before is not None and not self.shelf.has(namespace, before):
                raise ShelfFailure("what it needs is gone")
            if not self.budget.commit_row(
                self.shelf, StoredPart(self.writer, part, nbytes), namespace, name
            ):
                self.budget.release_bytes(nbytes)
        except StoreError:
            self._give_up(part, nbytes)

    def _drop(self, rng: random.Random) -> None:
        if self.parts:
            part = rng.choice(list(self.parts))
            self._give_up(part, SIZES[self.parts.pop(part)[1].kind])

    def _give_up(self, part: str, nbytes: int) -> None:
        try:
            self.shelf.discard(self.writer, part)
        except StoreError:
            return
        self.budget.release_bytes(nbytes)

    def _use(self, rng: random.Random) -> None:
        places = sorted(self.root.rows.rows)
        if places:
            namespace, name = rng.choice(places)
            self.shelf.touch(namespace, [name])


def row_of_need(name: RowName) -> RowName | None:
    """The row that this one depends on, as the saver knows it."""
    return PARENTS.get(name)


PARENTS: dict[RowName, RowName] = {}


def _fill(path: tuple[int, ...]) -> None:
    if path:
        PARENTS[row_of(path, RowKind.WA)] = row_of(path)
        if len(path) > 1:
            PARENTS[row_of(path)] = row_of(path[:-1])
    if len(path) < 5:
        for branch in range(3):
            _fill((*path, branch))


_fill(())


class SimulatedRoot:
    """A root, its engines, and what happens to them."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng = path, random.Random(seed)
        self.now = 0.0
        self.rows = MemoryRows(lambda: self.now)
        self.step = Steps(self.check)
        self.is_faulty = False
        self._boots = 0
        self.least = Accounts(path, "least", CAPACITY)
        self.engines: list[SimulatedEngine] = []

    def fails(self) -> bool:
        return self.is_faulty and self.rng.random() < 0.1

    def boot(self) -> SimulatedEngine:
        self._boots += 1
        capacity = self.rng.choice([CAPACITY, 2 * CAPACITY])
        return SimulatedEngine(self, f"w{self._boots}", capacity)

    def nbytes(self) -> int:
        """Of rows and parts that are there."""
        parts = sum(len(part.data) for part in self.rows.parts.values())
        return parts + sum(len(row.data) for row in self.rows.rows.values())

    def check(self) -> None:
        there = self.nbytes()
        if there > CAPACITY:
            raise Wrong(f"{there} bytes are there, of {CAPACITY}")
        count = read_count(self.path / "budget")
        if count is None:
            return
        found = [read_account(path) for path in (self.path / "budget" / "writers").iterdir()]
        said = count.committed + sum(account.reserved for account in found if account)
        ready = sum(engine.budget._allowance.ready for engine in self.engines)
        if said < there + ready:
            raise Wrong(f"{there} bytes are there, {ready} may be; {said} are counted")

    def run(self, num_actions: int) -> None:
        """Let things happen, then all engines end: the next finds everything, and can save."""
        self.engines = [self.boot() for _ in range(3)]
        for _ in range(num_actions):
            self.now += self.rng.choice([0.001, 0.1, 10.0, 100.0])
            self.is_faulty = self.rng.random() < 0.3
            number = self.rng.randrange(3)
            with contextlib.ExitStack() as held:
                if self.rng.random() < 0.03:
                    held.enter_context(self._stopped())
                if self.rng.random() < 0.02:
                    self._tear()
                if self.rng.random() < 0.1:
                    self.step.left = self.rng.randrange(6)
                try:
                    with contextlib.suppress(StoreError):
                        self.engines[number].act(self.rng)
                except Killed:
                    self._end(number)
                self.step.left = None
            self.check()
        self._all_end()

    def _all_end(self) -> None:
        for number in range(3):
            self._end(number)
        self.is_faulty = False
        self.now += 1000
        self.least.recount(MemoryShelf(self.rows))
        usage = self.least.usage()
        if self.rows.parts or usage.reserved or usage.committed != self.nbytes():
            raise Wrong(f"left behind: {usage}, {len(self.rows.parts)} parts")
        for _ in range(200):
            self.now += 1
            self.engines[0].act(self.rng)
            self.check()
        for _ in range(10):
            self.engines[0].budget.make_room(self.engines[0].shelf, "ns-1")
        if not self.engines[0].budget.room.take_amount(SIZES[RowKind.FA]):
            raise Wrong("nothing can be saved")

    def _end(self, number: int) -> None:
        """The engine is gone, and another begins."""
        self.engines[number].budget.close()
        self.engines[number] = self.boot()

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """A process is stopped while it holds the lock."""
        fd = os.open(self.path / "budget" / "lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _tear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.path / "budget" / "ledger", 20)

    def close(self) -> None:
        for engine in self.engines:
            engine.budget.close()
        self.least.close()


def simulate(path: Path, seed: int, patch: pytest.MonkeyPatch, num_actions: int = 150) -> None:
    """One history of a root.

    Raises:
        Wrong: the law was broken.
    """
    root = SimulatedRoot(path, seed)
    try:
        for name in ("write_count", "write_account", "news_line"):
            patch.setattr(accounts, name, root.step.before(getattr(accounts, name)))
        patch.setattr(root_budget, "Accounts", partial(Accounts, wait_s=0.0))
        root.run(num_actions)
    finally:
        root.close()


def stored(path: tuple[int, ...], used_at: float, kind: RowKind = RowKind.FA) -> StoredRow:
    """A row of namespace ns-1, of the size of its kind."""
    return StoredRow("ns-1", row_of(path, kind), SIZES[kind], used_at)
