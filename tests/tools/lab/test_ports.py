"""A port is given out once: in one process, and by all processes of a user on this machine."""

from __future__ import annotations

import itertools
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdconn.tools.lab.ports import LOCALHOST, free_ports, is_free

_LOWEST = 21_000

_ASKING = """
import os, sys
from pdconn.tools.lab import ports
lowest, highest, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ports._LOWEST, ports._lowest_ephemeral = lowest, lambda: highest + 1
if "unlocked" in how:
    ports._lock_file = lambda: None
print("ready", flush=True)
for line in sys.stdin:
    count, *row = line.split()
    try:
        print(*ports.free_ports(int(count), in_a_row=bool(row)), flush=True)
    except OSError as error:
        print("none", flush=True)
    if "forks" in how:
        if os.fork():
            break
        print("forked", flush=True)
"""


class Asker:
    """A process that asks for ports of a narrow range, and keeps them until it ends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self.heard() == "ready"

    def ask(self, count: int, *, in_a_row: bool = False) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count} {'row' if in_a_row else ''}\n")
        self._process.stdin.flush()

    def heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ports(self) -> list[int]:
        """The answer to the oldest question; empty if there were none left."""
        answer = self.heard()
        return [] if answer == "none" else [int(word) for word in answer.split()]

    def wait(self) -> None:
        """Until it has ended."""
        assert self._process.wait(60.0) == 0


@contextmanager
def asker(directory: Path, num_ports: int, *how: str) -> Iterator[Asker]:
    """A process with ``directory`` for temporary files, and ``num_ports`` ports to choose from."""
    command = [sys.executable, "-c", _ASKING, str(_LOWEST), str(_LOWEST + num_ports - 1), *how]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    ) as process:
        yield Asker(process)


def given_to_four(directory: Path, *how: str) -> list[int]:
    """What four processes are given that ask at the same time, for ports and for rows."""
    with ExitStack() as stack:
        askers = [stack.enter_context(asker(directory, 600, *how)) for _ in range(4)]
        for each in askers:
            for _ in range(5):
                each.ask(12)
                each.ask(4, in_a_row=True)
        return [port for each in askers for _ in range(10) for port in each.ports()]


def test_no_two_processes_are_given_the_same_port(tmp_path: Path) -> None:
    given = given_to_four(tmp_path)
    assert len(given) == 4 * 5 * 16
    assert len(set(given)) == len(given)


def test_without_the_lock_they_are(tmp_path: Path) -> None:
    """The control: 320 of 600 ports, by chance."""
    given = given_to_four(tmp_path, "unlocked")
    assert len(given) == 4 * 5 * 16
    assert len(set(given)) < len(given)


@pytest.mark.parametrize("how", [[], ["forks"]], ids=["alone", "while a forked child lives"])
def test_a_process_keeps_its_ports_until_it_ends(tmp_path: Path, how: list[str]) -> None:
    """In a forked child nothing keeps them."""
    with asker(tmp_path, 8, *how) as first, asker(tmp_path, 8) as second:
        first.ask(8)
        assert len(first.ports()) == 8
        if how:
            assert first.heard() == "forked"
        else:
            second.ask(1)
            assert second.ports() == []
            assert first._process.stdin is not None
            first._process.stdin.close()
        first.wait()
        second.ask(8)
        assert len(second.ports()) == 8


def test_the_file_of_the_locks_is_ours_alone(tmp_path: Path) -> None:
    with asker(tmp_path, 8) as one:
        one.ask(1)
        assert one.ports()
    [path] = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 0


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_without_a_file_for_locks_ports_are_given_all_the_same(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / f"pdconn-ports-{os.getuid()}", tmp_path / "elsewhere"
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with asker(tmp_path, 8) as one:
        one.ask(8)
        assert len(one.ports()) == 8
    assert not elsewhere.exists()


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)


def test_ports_in_a_row_follow_each_other_and_are_not_given_twice() -> None:
    ports = free_ports(4, in_a_row=True)
    assert ports == [ports[0] + step for step in range(4)]
    assert all(is_free(port) for port in ports)
    again = itertools.chain.from_iterable(free_ports(4, in_a_row=True) for _ in range(50))
    assert not set(ports) & set(again)


def test_no_row_begins_below_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        [port] = free_ports(1)
        taken.bind((LOCALHOST, port))
        chosen = iter([port - 1, port, port + 1, *range(port + 2, port + 9)])

        class Chosen(random.Random):
            def randint(self, a: int, b: int) -> int:
                return next(chosen)

        assert free_ports(2, source=Chosen(), in_a_row=True)[0] > port
