"""Clients with a socket of their own: a reader that behaves, and crowds that do not."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from random import Random
from types import TracebackType
from typing import Self, TypeVar

from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Done,
    FromLender,
    FromReader,
    Granted,
    Hello,
    Reader,
    Renew,
    Welcome,
    decode_from_lender,
    encode,
)
from pdconn.sidechannel.connection import Connection
from pdconn.sidechannel.security import Security

M = TypeVar("M")

PATIENCE_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class RawReader:
    """A decode rank that follows the protocol, one message at a time.

    ``host`` is the lender's, as a ticket names it.
    """

    def __init__(
        self,
        port: int,
        security: Security | None = None,
        wants: str = "boot-1",
        host: str = "127.0.0.1",
    ) -> None:
        sock = socket.create_connection((host, port), PATIENCE_S)
        policy = (security or Security()).for_reader(host, f"{host}:{port}")
        self._connection = Connection(sock, 1 << 24, policy=policy)
        self._received: list[FromLender] = []
        try:
            self.say(Hello(PROTOCOL_VERSION, "reader", wants))
            self.welcome = self.hear(Welcome)
        except BaseException:
            self.close()
            raise

    def say(self, *messages: FromReader) -> None:
        self.send(encode(messages))

    def send(self, body: bytes) -> None:
        """Send a frame with any body, once the handshake is complete."""
        self._connection.send_frames([body])

    def hear(self, kind: type[M]) -> M:
        """The next message, which must be of ``kind``; the handshake goes on meanwhile."""
        give_up = time.monotonic() + PATIENCE_S
        while not self._received:
            assert time.monotonic() < give_up, f"no {kind.__name__} in {PATIENCE_S} s"
            self._connection.flush_unsent()
            for body in self._connection.receive_frames():
                self._received += decode_from_lender(body)
            time.sleep(0.0005)
        message = self._received.pop(0)
        assert isinstance(message, kind), message
        return message

    def claim(self, request: str, ticket: bytes, pull: str) -> Granted:
        """Claim and renew; what the lender grants."""
        reader = Reader(pull, 0, 1)
        self.say(Claim(1, request, reader, ticket))
        self.hear(Granted)
        self.say(Renew(2, request, reader))
        return self.hear(Granted)

    def done(self, request: str, ticket: bytes, pull: str) -> None:
        self.say(Done(request, Reader(pull, 0, 1), ticket))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def crowd(port: int, inputs: list[bytes], rng: Random) -> list[bytes]:
    """Send each input on a connection of its own, all at once and in pieces.

    Some connections are reset before their end.  Returns the replies until the lender closed.

    Raises:
        AssertionError: the lender does not close a connection.
    """
    socks = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in inputs]
    try:
        for sock, piece in _interleaved(socks, inputs, rng):
            with contextlib.suppress(OSError):  # closed by the lender
                sock.sendall(piece)
        for sock in socks:
            if rng.random() < 0.1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.close()
        return [_rest(sock) for sock in socks if sock.fileno() >= 0]
    finally:
        for sock in socks:
            sock.close()


def _interleaved(
    socks: list[socket.socket], inputs: list[bytes], rng: Random
) -> list[tuple[socket.socket, bytes]]:
    """Every input in up to three pieces, first the first pieces of all."""
    cuts = [sorted(rng.randrange(len(data) + 1) for _ in range(2)) for data in inputs]
    pieces = [
        (data[:first], data[first:second], data[second:])
        for data, (first, second) in zip(inputs, cuts, strict=True)
    ]
    rounds = itertools.chain.from_iterable(zip(*pieces, strict=True))
    return [pair for pair in zip(itertools.cycle(socks), rounds, strict=False) if pair[1]]


def _rest(sock: socket.socket) -> bytes:
    """Everything received until the other side closes."""
    answer = bytearray()
    with contextlib.suppress(ConnectionError, OSError):
        sock.shutdown(socket.SHUT_WR)
    try:
        while data := sock.recv(1 << 18):
            answer += data
    except TimeoutError:
        raise AssertionError(f"the lender does not close: {bytes(answer[:64])!r}") from None
    except ConnectionError:
        pass
    return bytes(answer)
