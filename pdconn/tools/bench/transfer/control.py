"""The messages between the measuring and the lending side.

    reader                          lender
    Open(shape, blocks, ranks) ──►  allocates, fills, registers
                              ◄──   CanLend(memory, address) | CannotLend(reason)
    AskCpu                    ──►
                              ◄──   Used(seconds of CPU so far)
    Shut                      ──►   frees the memory
                              ◄──   Used

Each is a frame of ``pdconn.protocol.messages`` around msgpack.  A lender holds only a pattern, so
there is no authentication; an option of the lender bounds its allocations.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from typing import Generic, TypeVar

import msgspec

from pdconn.protocol.errors import FrameError
from pdconn.protocol.messages import Frames, frame
from pdconn.tools.bench.bench_errors import LenderFailed
from pdconn.tools.bench.interrupts import interruptible
from pdconn.tools.plan.engine_shape import EngineShape
from registration.references import KVCacheReferences

_MAX_FRAME = 64 << 20
_CHUNK = 1 << 18


class Open(msgspec.Struct, tag=True, frozen=True):
    """Lend ``num_blocks`` blocks of each rank in ``ranks``, over the path of that name.

    ``mooncake``: also lend them over Mooncake's transfer engine.
    """

    engine: EngineShape
    num_blocks: int
    ranks: tuple[int, ...]
    path: str
    mooncake: bool = False


class Lent(msgspec.Struct, frozen=True):
    """One rank's memory: first address and bytes, references, and the transport's address."""

    rank: int
    base: int
    nbytes: int
    references: KVCacheReferences
    address: bytes


class CanLend(msgspec.Struct, tag=True, frozen=True):
    """The memory that :class:`Open` requested; ``facts`` describe the lender's machine.

    ``mooncake`` is the address of Mooncake's engine, empty without one.
    """

    lent: tuple[Lent, ...]
    facts: dict[str, str]
    mooncake: str = ""


class AskCpu(msgspec.Struct, tag=True, frozen=True):
    """Request the CPU time that the lender has used."""


class Shut(msgspec.Struct, tag=True, frozen=True):
    """Free the memory."""


class Used(msgspec.Struct, tag=True, frozen=True):
    """CPU seconds, user and system, since the start of the process."""

    cpu_s: float


class CannotLend(msgspec.Struct, tag=True, frozen=True):
    """The lender cannot fulfil the request."""

    why: str


ToLender = Open | AskCpu | Shut
FromLender = CanLend | Used | CannotLend
Incoming = TypeVar("Incoming")

AT_LENDER: msgspec.msgpack.Decoder[ToLender] = msgspec.msgpack.Decoder(ToLender)
AT_READER: msgspec.msgpack.Decoder[FromLender] = msgspec.msgpack.Decoder(FromLender)


class ControlConnection(Generic[Incoming]):
    """Messages over a connected blocking socket, which it owns.

    ``decoder``: ``AT_LENDER`` or ``AT_READER``, for the messages of the other side.

    Raises:
        LenderFailed: the other side disconnected, or sent an invalid message.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Incoming]) -> None:
        self._sock = sock
        self._decoder = decoder
        self._frames = Frames(_MAX_FRAME)
        self._bodies: deque[bytes] = deque()
        self._arrivals = select.poll()
        self._arrivals.register(sock, select.POLLIN)

    def send_message(self, message: ToLender | FromLender) -> None:
        """Send one message."""
        try:
            self._sock.sendall(frame(msgspec.msgpack.encode(message)))
        except OSError as error:
            raise LenderFailed(f"the other side is gone: {error}") from error

    def receive_message(self, timeout_s: float | None = None) -> Incoming | None:
        """The next message; None once the other side has closed the connection.

        Raises:
            LenderFailed: also if no byte arrives for ``timeout_s``.
        """
        try:
            while not self._bodies:
                with interruptible():  # not inside a message: the next answer would be misread
                    arrived = self._arrivals.poll(timeout_s and 1000 * timeout_s)
                if not arrived:
                    raise LenderFailed(f"the other side did not answer within {timeout_s} s")
                data = self._sock.recv(_CHUNK)
                if not data:
                    return None
                self._bodies.extend(self._frames.feed_bytes(data))
            return self._decoder.decode(self._bodies.popleft())
        except ConnectionResetError:  # closed by the other side before it read our message
            return None
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            raise LenderFailed(f"the other side sent an invalid message: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
