"""Connections to a lender that wait, and whether it still serves a reader beside them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

from pdconn.lender.sessions import ConnectionLimits
from pdconn.protocol.messages import PROTOCOL_VERSION, Hello, encode, frame
from tests.fakes.pair import Pair
from tests.threads.inside import loop_of

BLOCKS = b"\x55" * 16
HELLO = frame(encode([Hello(PROTOCOL_VERSION, "unknown", "boot-1")]))
LIMITS = ConnectionLimits()


def lift_limits(pair: Pair) -> None:
    """Back to the defaults: a pull on a busy machine may take longer than a test's limits."""
    loop_of(pair.lender)._admission._limits = LIMITS


@contextmanager
def raw_connections(pair: Pair, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that have sent ``data`` and wait."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", pair.lender.port), 5.0)
            made.append(stack.enter_context(closing(sock)))
            with suppress(OSError):
                sock.sendall(data)
        yield made


def is_closed(sock: socket.socket) -> bool:
    """Whether the lender has closed; what it sent before is discarded."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def serves(pair: Pair, request: str = "good") -> bool:
    """Whether an ordinary pull succeeds."""
    pair.pull(request, pair.lend(f"lent-{request}"))
    return pair.outcome_of(request) is None
