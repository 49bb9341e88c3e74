"""One side-channel connection: messages in, messages out, never blocking."""

from __future__ import annotations

import contextlib
import socket

from pdconn.sidechannel.session import AuthPolicy, SecureSession, SideChannelLost, Unauthenticated

_CHUNK = 1 << 15
"""Asked of a socket at once; Python allocates as much first, and beyond 128 KiB that means
new pages from the system for every frame."""


class Connection:
    """Owns a connected, or connecting, stream socket.

    With a guard, what is sent before the peer has proven itself waits here, and what
    is received has been proven to come from it.  The handshake goes on inside
    :meth:`receive` and :meth:`flush`; a reader's begins with the first flush.

    Args:
        sock: made non-blocking here.
        max_frame: longest frame accepted, in bytes.
        max_unsent: bytes that may wait for a peer that does not read, or has not
            proven itself.
        guard: from :class:`pdconn.sidechannel.security.Security`; None trusts anyone.
    """

    def __init__(
        self,
        sock: socket.socket,
        max_frame: int,
        max_unsent: int = 1 << 26,
        guard: AuthPolicy | None = None,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._layers = SecureSession(max_frame, guard)
        self._max_unsent = max_unsent

    @property
    def has_unsent(self) -> bool:
        """Whether to select for writing."""
        return bool(self._layers.out)

    @property
    def is_trusted(self) -> bool:
        """Whether the peer has proven itself, or need not."""
        return self._layers.is_trusted

    @property
    def is_midway(self) -> bool:
        """Whether a handshake or a frame is unfinished, or bytes wait to be sent."""
        return self._layers.is_midway

    def send(self, body: bytes) -> None:
        """Send a frame, and keep what the socket does not take or the peer may not have yet.

        Raises:
            SideChannelLost: the connection broke, or too much waits to be sent.
        """
        self._layers.send(body)
        self.flush()
        waiting = self._layers.waiting_nbytes
        if waiting > self._max_unsent:
            does_not = "read" if self.is_trusted else "authenticate"
            raise SideChannelLost(f"{waiting} bytes wait for a peer that does not {does_not}")

    def flush(self) -> None:
        """Send what waits.

        Raises:
            SideChannelLost: the connection broke.
        """
        out = self._layers.out
        while out:
            try:
                sent = self.socket.send(out)
            except (BlockingIOError, InterruptedError):
                return
            except (ConnectionResetError, BrokenPipeError) as error:
                raise self._layers.closed(str(error)) from error
            except OSError as error:
                raise SideChannelLost(str(error)) from error
            del out[:sent]

    def receive(self) -> list[bytes]:
        """Messages that became whole.

        Raises:
            Unauthenticated: the peer did not prove itself, or someone else spoke.
            SideChannelLost: the other side closed, the connection broke, or a frame is
                longer than allowed.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionResetError as error:
            raise self._layers.closed(str(error)) from error
        except OSError as error:
            raise SideChannelLost(str(error)) from error
        if not data:
            raise self._layers.closed("closed by the peer")
        waited = len(self._layers.out)
        try:
            bodies = self._layers.feed(data)
        except SideChannelLost:
            with contextlib.suppress(SideChannelLost):
                self.flush()  # TLS tells the peer why
            raise
        if len(self._layers.out) > waited:
            self.flush()
        return bodies

    def close(self) -> None:
        """Close the socket; harmless when closed."""
        self.socket.close()


__all__ = ["AuthPolicy", "Connection", "SideChannelLost", "Unauthenticated"]
