"""A relay, and both ends of a connection through it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from pdconn.faults.frame_faults import HOLD_S, MessageFaults
from pdconn.faults.relay import Relay
from pdconn.protocol.messages import Frames, frame

SECONDS = 20.0
"""How long a socket of a test may wait."""

BODIES = [f"frame {number} ".encode() * (number % 7) for number in range(1000)]


class Ends:
    """A relay, and both ends of a connection through it."""

    def __init__(
        self, stack: ExitStack, faults: MessageFaults, seed: int = 7, hold_s: float = HOLD_S
    ) -> None:
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(SECONDS)
        self.relay = stack.enter_context(
            closing(Relay("127.0.0.1", self.listener.getsockname()[1], faults, seed, hold_s=hold_s))
        )
        self.stack = stack
        self.client, self.target = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        address = (self.relay.host, self.relay.port)
        client = self.stack.enter_context(socket.create_connection(address, SECONDS))
        target = self.stack.enter_context(self.listener.accept()[0])
        target.settimeout(SECONDS)
        return client, target

    def counts(self, **expected: int) -> None:
        """Wait until the relay has counted as much."""
        until(lambda: dict(self.relay.counts) == expected, self.relay.counts)


@contextmanager
def ends(
    faults: MessageFaults | None = None, seed: int = 7, hold_s: float = HOLD_S
) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack, faults or MessageFaults(), seed, hold_s)


def until(true: Callable[[], bool], shown: object = "") -> None:
    give_up = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < give_up, f"waited {SECONDS} s: {shown}"
        time.sleep(0.002)


def everything(sock: socket.socket) -> bytes:
    """What arrives until the end of the stream."""
    data = bytearray()
    while chunk := sock.recv(1 << 20):
        data += chunk
    return bytes(data)


def send_all(sock: socket.socket, data: bytes) -> threading.Thread:
    """Send on another thread, then end the stream."""

    def run() -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def passed(sender: socket.socket, receiver: socket.socket, data: bytes) -> bytes:
    """What becomes of ``data`` on its way."""
    thread = send_all(sender, data)
    received = everything(receiver)
    thread.join()
    return received


def bodies(data: bytes) -> list[bytes]:
    return Frames(1 << 28).feed_bytes(data)


def framed(some: list[bytes]) -> bytes:
    return b"".join(frame(body) for body in some)
