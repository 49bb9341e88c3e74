"""A raw client of a lender, and a relay between two connections that may change what passes."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdconn.sidechannel.connection import Connection
from pdconn.sidechannel.security import Security
from tests.fakes.credentials import sockets

WELCOME = b"welcome: addresses and geometry"
HELLO = b"hello: engine and incarnation"
PATIENCE_S = 20.0


def await_bytes(source: socket.socket) -> None:
    """What was sent over the loopback device is there soon, and not always at once."""
    assert select.select([source], [], [], PATIENCE_S)[0], "nothing arrives"


def arrived(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except BlockingIOError:
        return b""


class RawClient:
    """A raw socket connected to a lender, that sees every byte the lender sends."""

    def __init__(self, security: Security) -> None:
        self.socket, self.accepted = sockets()
        self.socket.setblocking(False)
        self.lender = Connection(self.accepted, 1 << 20, policy=security.for_lender())
        self.seen = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.lender.close()

    def send(self, data: bytes) -> list[bytes]:
        """Send it and let the lender answer; return the messages that it received."""
        self.socket.sendall(data)
        self.lender.flush_unsent()
        if data:
            await_bytes(self.accepted)
        bodies = self.lender.receive_frames()
        self.seen += arrived(self.socket)
        return bodies

    def receive(self) -> bytes:
        """All that the lender has sent, once there is more of it."""
        await_bytes(self.socket)
        self.seen += arrived(self.socket)
        return self.seen


class Relay:
    """A reader and a lender with a relay between them that may change what passes."""

    def __init__(self, security: Security, change: Callable[[bytes], bytes] | None = None) -> None:
        self.sockets = (*sockets(), *sockets())
        reader, self._a, self._b, self._there = self.sockets
        for end in (self._a, self._b):
            end.setblocking(False)
        self.reader = Connection(reader, 1 << 20, policy=security.for_reader("localhost"))
        self.lender = Connection(self._there, 1 << 20, policy=security.for_lender())
        self.passed = {"there": bytearray(), "back": bytearray()}
        self.change = change
        self.received: list[bytes] = []

    def turn(self) -> None:
        self.reader.flush_unsent()
        data = arrived(self._a)
        self.passed["there"] += data
        changed = self.change(data) if self.change and data else data
        self._b.sendall(changed)
        if changed:
            await_bytes(self._there)
        self.received += self.lender.receive_frames()
        self.lender.flush_unsent()
        back = arrived(self._b)
        self.passed["back"] += back
        self._a.sendall(back)
        self.reader.receive_frames()

    def until_received(self, count: int) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while len(self.received) < count:
            assert time.monotonic() < give_up, f"received {self.received}"
            self.turn()

    def turn_once_sent(self) -> None:
        """A turn in which something that the reader has sent passes."""
        self.reader.flush_unsent()
        await_bytes(self._a)
        self.turn()


@contextmanager
def relayed(security: Security) -> Iterator[Relay]:
    relay = Relay(security)
    try:
        yield relay
    finally:
        for end in relay.sockets:
            end.close()
