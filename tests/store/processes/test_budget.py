"""Two processes save and evict in one root; whatever happens to them, it stays within the budget.

What is there is looked at while both are stopped, so that it is what was there at one moment;
each is stopped wherever it happens to be.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from pdconn.store.budget.accounts import Accounts
from pdconn.store.format.row import RowKind
from pdconn.store.shelf.files_shelf import FilesShelf
from tests.store.budget.forest import nbytes_there
from tests.store.processes.saver import PAGE

CAPACITY = 120 * PAGE
PATIENCE_S = 60.0
REPOSITORY = Path(__file__).parents[3]


class SaverProcess:
    """A process that saves, and what it has printed."""

    def __init__(self, root: Path, seed: int, wrong: str = "") -> None:
        command = [sys.executable, "-c", wrong + RUN, str(root), f"w{seed}", str(CAPACITY)]
        self._process = subprocess.Popen(
            [*command, str(seed)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        self.said: Counter[str] = Counter()
        self._heard = threading.Condition()
        assert self._process.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,))
        self._listener.start()

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            with self._heard:
                self.said[line.split(" ")[0].strip()] += 1
                self._heard.notify_all()

    def wait_for(self, word: str, more: int = 0) -> None:
        """Until it has said ``word``, or says it so many times more."""
        with self._heard:
            wanted = self.said[word] + more if more else 1
            assert self._heard.wait_for(lambda: self.said[word] >= wanted, PATIENCE_S)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Every thread of it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            how = os.WSTOPPED | os.WEXITED | os.WNOWAIT
            found = os.waitid(os.P_PID, self._process.pid, how)
            assert found is not None
            assert found.si_code == os.CLD_STOPPED
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


RUN = """
import sys
from tests.store.processes.saver import Saver
Saver(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])).run()
"""


def looked_at(root: Path, savers: list[SaverProcess]) -> int:
    """Bytes that are there at one moment."""
    with savers[0].stopped(), savers[1].stopped():
        return nbytes_there(root)


def check_chains(root: Path, most: int) -> None:
    """Every row has the row before it, but for ``most`` of them."""
    with FilesShelf(root) as shelf:
        names = {row.name for row in shelf.rows()}
    keys = {name.key for name in names if name.kind is RowKind.FA}
    alone = []
    for name in names:
        before = name.key if name.kind is RowKind.WA else name.parent
        if before not in keys and not (name.index == 0 and name.kind is RowKind.FA):
            alone.append(name)
    assert len(alone) <= most, alone


def pause(rng: random.Random) -> None:
    """Let the processes get anywhere; nothing is expected of how far they get."""
    time.sleep(rng.random() * 0.03)


@contextmanager
def two_savers(root: Path, wrong: str = "") -> Iterator[list[SaverProcess]]:
    """The first evicts, and the root is full already; its successors are for the test to kill."""
    savers = [SaverProcess(root, 1, wrong)]
    try:
        savers[0].wait_for("evicted")
        savers.append(SaverProcess(root, 2, wrong))
        savers[1].wait_for("begun")
        yield savers
    finally:
        for saver in savers:
            saver.kill()


@pytest.mark.timeout(180)
def test_two_engines_stay_within_the_budget_whatever_kills_or_stops_them(tmp_path: Path) -> None:
    rng = random.Random(1)
    most = 0
    with two_savers(tmp_path) as savers:
        for round_ in range(6):
            for _ in range(12):
                pause(rng)
                most = max(most, looked_at(tmp_path, savers))
                assert most <= CAPACITY
            number = round_ % 2
            if round_ in (2, 3):
                with savers[number].stopped():
                    for _ in range(8):
                        pause(rng)
                        with savers[1 - number].stopped():
                            assert nbytes_there(tmp_path) <= CAPACITY
                savers[1 - number].wait_for("saved", 1)
            else:
                savers[number].kill()
                assert looked_at_one(tmp_path, savers[1 - number]) <= CAPACITY
                savers[number] = SaverProcess(tmp_path, 10 + round_)
                savers[number].wait_for("saved")
    assert most > CAPACITY // 2
    check_restart(tmp_path)


def looked_at_one(root: Path, saver: SaverProcess) -> int:
    with saver.stopped():
        return nbytes_there(root)


def check_restart(root: Path) -> None:
    """All are dead: the next finds the rows, and nothing else takes room."""
    accounts = Accounts(root, "next", CAPACITY)
    with FilesShelf(root) as shelf:
        accounts.recount(shelf)
        assert not list(shelf.parts())
        usage = accounts.usage()
        assert usage.committed == sum(row.nbytes for row in shelf.rows()) == nbytes_there(root)
        assert (usage.reserved, usage.num_writers) == (0, 1)
    accounts.close()
    # The row before one that is being committed may be evicted meanwhile, by a listing that is
    # older.  The next listing evicts what is alone; of each that was killed one may be left.
    check_chains(root, most=2)


NO_RESERVE = """
from pdconn.threads import AmountBox
from pdconn.store.budget.accounts import Accounts
AmountBox.take_amount = lambda self, amount: True
Accounts._check_covered = lambda self, row: None
"""
COUNTS_NOTHING = """
from pdconn.store.budget.accounts import RowCount
RowCount.plus = lambda self, nbytes, kind: self
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "wrong", [NO_RESERVE, COUNTS_NOTHING], ids=["no reserve", "counts nothing"]
)
def test_a_wrong_budget_is_exceeded(tmp_path: Path, wrong: str) -> None:
    until = time.monotonic() + PATIENCE_S
    saver = SaverProcess(tmp_path, 1, wrong)
    try:
        while looked_at_one(tmp_path, saver) <= CAPACITY:
            assert time.monotonic() < until, "nothing was wrong"
            saver.wait_for("saved", 1)  # one that is stopped again and again does not get on
    finally:
        saver.kill()


@pytest.mark.timeout(180)
def test_the_evictor_of_a_root_is_followed_by_another(tmp_path: Path) -> None:
    with two_savers(tmp_path) as (first, second):
        second.wait_for("saved", 20)
        assert not second.said["evicted"]
        first.kill()
        second.wait_for("evicted")
