"""The network itself, without engines: cables, partitions, late packets, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multinode.namespaces import Machine, Network, left_by, sweep, why_not

_WHY_NOT = why_not()
pytestmark = [
    pytest.mark.multinode,
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]

_PATIENCE_S = 60.0
_SOON_S = 1.0
"""How long a machine that cannot be reached is tried."""

_KILLED = """
import sys, time
from tests.multinode.namespaces import Network
network = Network({"a": 1}, late=["a"])
print("made", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network({"a": 1, "b": 2, "c": 3, "far": 4}, late=["far"]) as made:
        yield made


def echo(machine: Machine) -> socket.socket:
    """A server on ``machine`` that sends back what it gets, until it is closed."""
    with machine.inside():
        server = socket.create_server((machine.address, 7))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return server


def close(server: socket.socket) -> None:
    server.shutdown(socket.SHUT_RDWR)  # or ``accept`` would not notice
    server.close()


def call(source: Machine, target: Machine, timeout_s: float = _PATIENCE_S) -> socket.socket:
    """A connection; OSError where there is no way."""
    with source.inside():
        return socket.create_connection((target.address, 7), timeout_s)


def reaches(source: Machine, target: Machine) -> bool:
    """Whether one gets through to a server on the other soon."""
    try:
        call(source, target, _SOON_S).close()
    except OSError:
        return False
    return True


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(network: Network) -> Iterator[Machine]:
    """Machine ``a``, with a server."""
    listening = echo(network["a"])
    yield network["a"]
    close(listening)


def test_machines_reach_each_other_and_nothing_of_them_shows_here(
    network: Network, server: Machine
) -> None:
    assert all(reaches(network[name], server) for name in ("a", "b", "c", "far"))
    with pytest.raises(OSError, match="assign requested address"):
        socket.create_server((server.address, 7))
    assert "10.213." not in Path("/proc/net/fib_trie").read_text(encoding="utf-8")


def test_a_cable_can_be_pulled_out_and_put_back(network: Network, server: Machine) -> None:
    network.unplug("b")
    try:
        assert not reaches(network["b"], server)
        assert reaches(network["c"], server)
    finally:
        network.plug("b")
    until(lambda: reaches(network["b"], server))


def test_a_late_cable_can_be_pulled_out_too(network: Network, server: Machine) -> None:
    network.unplug("far")
    try:
        assert not reaches(network["far"], server)
    finally:
        network.plug("far")
    until(lambda: reaches(network["far"], server))


def test_a_partition_is_between_two_machines_and_silent(network: Network, server: Machine) -> None:
    """An open connection does not end; it goes on when the partition is over."""
    with call(network["b"], server) as connection:
        network.part("a", "b")
        try:
            connection.sendall(b"anybody?")
            connection.settimeout(_SOON_S)
            with pytest.raises(TimeoutError):
                connection.recv(16)
            assert not reaches(network["b"], server)
            assert reaches(network["c"], server)
        finally:
            network.heal("a", "b")
        connection.settimeout(_PATIENCE_S)
        assert connection.recv(16) == b"anybody?"


def test_bytes_are_counted_where_they_arrive(network: Network, server: Machine) -> None:
    before = {name: network[name].received_nbytes() for name in ("b", "c")}
    sent = exchange(network["b"], server, 1 << 20)
    assert network["b"].received_nbytes() - before["b"] >= sent
    assert network["c"].received_nbytes() - before["c"] < sent / 10
    assert network["b"].received_nbytes("lo") < sent / 10


def exchange(source: Machine, target: Machine, nbytes: int) -> int:
    """Send so many bytes and get them back, in pieces that no buffer is too small for."""
    sent = 0
    with call(source, target) as connection:
        while sent < nbytes:
            connection.sendall(bytes(1 << 15))
            left = 1 << 15
            while left:
                left -= len(connection.recv(left))
            sent += 1 << 15
    return sent


def test_packets_come_late_and_get_lost_and_the_bytes_arrive(
    network: Network, server: Machine
) -> None:
    delay_s = 0.05
    with call(network["far"], server) as connection:
        network.wire.be(delay_s=delay_s)
        began = time.monotonic()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        assert time.monotonic() - began >= 2 * delay_s  # there and back
    before = network.wire.be(loss=0.05)
    exchange(network["far"], server, 1 << 20)
    after = network.wire.be()
    assert after.lost > before.lost
    assert after.passed > before.passed


def test_a_narrow_cable_lets_no_more_pass(network: Network, server: Machine) -> None:
    bytes_per_s = 1 << 20
    network.narrow("b", bytes_per_s)
    try:
        began = time.monotonic()
        sent = exchange(network["b"], server, bytes_per_s // 2)
        took_s = time.monotonic() - began
    finally:
        network.widen("b")
    assert took_s > 0.8 * (sent - 16_384) / bytes_per_s  # but for the burst that is free


def test_nothing_is_left_when_a_network_closes() -> None:
    before = left_by(os.getpid())
    with Network({"a": 1}):
        assert len(left_by(os.getpid())) == len(before) + 2  # the machine and the switch
    assert left_by(os.getpid()) == before


def test_nothing_is_left_when_its_maker_is_killed() -> None:
    with started() as maker:
        made = left_by(maker.pid)
        assert len(made) == 2
        maker.kill()
        until(lambda: left_by(maker.pid) == [])


def test_what_a_killed_guard_left_is_swept_up_and_what_is_in_use_is_not(network: Network) -> None:
    in_use = left_by(os.getpid())
    with started() as maker:
        for guard in children(maker.pid, "tests.multinode.namespaces"):
            os.kill(guard, signal.SIGKILL)
        maker.kill()
        maker.wait()
        left = left_by(maker.pid)
        assert len(left) == 2
        assert set(left) <= set(sweep())
        assert left_by(maker.pid) == []
    assert left_by(os.getpid()) == in_use
    assert reaches(network["b"], network["c"]) is False  # nothing listens there; the way is free


def started() -> subprocess.Popen[str]:
    """A process that has made a network."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _KILLED]
    maker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert maker.stdout is not None
    assert maker.stdout.readline() == "made\n"
    return maker


def children(pid: int, words: str) -> list[int]:
    """Children of a process whose command line holds ``words``."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found += [int(child)] if words in command else []
    assert found
    return found
