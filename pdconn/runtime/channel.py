"""One side-channel connection: frames in, frames out, never blocking."""

from __future__ import annotations

import socket

from pdconn.protocol.errors import FrameError
from pdconn.protocol.framing import Frames, frame

_CHUNK = 1 << 18


class ChannelLost(Exception):
    """The connection is over: closed, reset, flooded or out of step."""


class Channel:
    """Owns a connected, or connecting, stream socket.

    Args:
        sock: made non-blocking here.
        max_frame: longest frame accepted, in bytes.
        max_unsent: bytes that may wait for a peer that does not read.
    """

    def __init__(self, sock: socket.socket, max_frame: int, max_unsent: int = 1 << 26) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._frames = Frames(max_frame)
        self._unsent = bytearray()
        self._max_unsent = max_unsent

    @property
    def has_unsent(self) -> bool:
        """Whether to select for writing."""
        return bool(self._unsent)

    def send(self, body: bytes) -> None:
        """Send a frame, or keep what the socket does not take yet.

        Raises:
            ChannelLost: the connection broke, or too much waits to be sent.
        """
        self._unsent += frame(body)
        if len(self._unsent) > self._max_unsent:
            raise ChannelLost(f"{len(self._unsent)} bytes wait for a peer that does not read")
        self.flush()

    def flush(self) -> None:
        """Send what waits.

        Raises:
            ChannelLost: the connection broke.
        """
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ChannelLost(str(error)) from error
            del self._unsent[:sent]

    def receive(self) -> list[bytes]:
        """Frames that became whole.

        Raises:
            ChannelLost: the other side closed, the connection broke, or a frame is
                longer than allowed.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ChannelLost(str(error)) from error
        if not data:
            raise ChannelLost("closed by the peer")
        try:
            return self._frames.feed(data)
        except FrameError as error:
            raise ChannelLost(str(error)) from error

    def close(self) -> None:
        """Close the socket; harmless when closed."""
        self.socket.close()
