"""The words between the side that measures and the side that lends.

    reader                          lender
    Open(shape, blocks, ranks) ──►  allocates, fills, registers
                              ◄──   Opened(where, how to reach it) | Refused(why)
    Ask                       ──►
                              ◄──   Used(seconds of CPU so far)
    Shut                      ──►   gives the memory back
                              ◄──   Used

Each is a frame of ``pdconn.protocol.framing`` around msgpack.  A lender holds a pattern
and nothing else, so there is nothing to authenticate; what it may be made to allocate is
bounded where it is started.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Generic, TypeVar

import msgspec

from pdconn.bench.errors import LenderFailed
from pdconn.forecast.engine import EngineShape
from pdconn.protocol.errors import FrameError
from pdconn.protocol.framing import Frames, frame

_MAX_FRAME = 64 << 20
_CHUNK = 1 << 18


class Open(msgspec.Struct, tag=True, frozen=True):
    """Lend ``num_blocks`` blocks of each rank in ``ranks``, over the path of that name.

    ``mooncake``: lend them through Mooncake's transfer engine, too.
    """

    engine: EngineShape
    num_blocks: int
    ranks: tuple[int, ...]
    path: str
    mooncake: bool = False


class Lent(msgspec.Struct, frozen=True):
    """One rank's memory: its first address, bytes, and the transport's address."""

    rank: int
    base: int
    nbytes: int
    address: bytes


class Opened(msgspec.Struct, tag=True, frozen=True):
    """What :class:`Open` asked for; ``facts`` describe the lender's transport and machine.

    ``mooncake`` is where Mooncake's engine is reached, empty without one.
    """

    lent: tuple[Lent, ...]
    facts: dict[str, str]
    mooncake: str = ""


class AskCpu(msgspec.Struct, tag=True, frozen=True):
    """How much CPU have you used?"""


class Shut(msgspec.Struct, tag=True, frozen=True):
    """Give the memory back."""


class Used(msgspec.Struct, tag=True, frozen=True):
    """Seconds of CPU, user and system, since the process began."""

    cpu_s: float


class CannotLend(msgspec.Struct, tag=True, frozen=True):
    """Why something cannot be done."""

    why: str


ToLender = Open | AskCpu | Shut
FromLender = Opened | Used | CannotLend
Heard = TypeVar("Heard")

AT_LENDER: msgspec.msgpack.Decoder[ToLender] = msgspec.msgpack.Decoder(ToLender)
AT_READER: msgspec.msgpack.Decoder[FromLender] = msgspec.msgpack.Decoder(FromLender)


class Talk(Generic[Heard]):
    """Messages over a connected socket that blocks.  Owns the socket.

    ``decoder`` is ``AT_LENDER`` or ``AT_READER``, for what the other side says.

    Raises:
        LenderFailed: the other side went away, or does not speak this.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Heard]) -> None:
        self._sock = sock
        self._decoder = decoder
        self._frames = Frames(_MAX_FRAME)
        self._bodies: deque[bytes] = deque()

    def send(self, message: ToLender | FromLender) -> None:
        """Send one message."""
        try:
            self._sock.sendall(frame(msgspec.msgpack.encode(message)))
        except OSError as error:
            raise LenderFailed(f"the other side is gone: {error}") from error

    def receive(self) -> Heard | None:
        """The next message; None once the other side has left."""
        try:
            while not self._bodies:
                data = self._sock.recv(_CHUNK)
                if not data:
                    return None
                self._bodies.extend(self._frames.feed(data))
            return self._decoder.decode(self._bodies.popleft())
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            raise LenderFailed(f"the other side said what makes no sense: {error}") from error

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
