"""One side-channel connection: messages in, messages out, never blocking.

::

    send ──► SecureSession ──► unsent bytes ──► socket
    receive ◄── whole messages ◄── SecureSession ◄── socket

A *frame* carries one message list (:mod:`pdconn.protocol.framing`); frames above
``max_frame`` end the connection.  *Unsent* bytes wait for a peer that reads slowly, or
that is not authenticated yet; above ``max_unsent`` the connection ends too.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Sequence

from pdconn.sidechannel.session import AuthPolicy, SecureSession, SideChannelLost, Unauthenticated

MAX_UNSENT = 1 << 26

_CHUNK = 1 << 12
"""Bytes of a recv.  Python allocates as much first and gives most of it back: with a large one, a
frame of 100 bytes costs more than twice as much."""

_LARGE_CHUNK = 1 << 15
"""Of a recv after one that was full.  Above 128 KiB each takes new pages from the system."""


class Connection:
    """Owns a connected, or connecting, stream socket.

    With an authentication policy, messages sent before the peer is authenticated wait here,
    and messages received come from an authenticated peer.  The handshake goes on inside
    :meth:`receive` and :meth:`flush`; a reader's begins with the first flush.

    Args:
        sock: made non-blocking here.
        max_frame: longest frame accepted, in bytes.
        max_unsent: bytes that may wait to be sent.
        policy: from :class:`pdconn.sidechannel.security.Security`; None trusts any peer.
        max_later: longest frame accepted after the first, where that is less.
    """

    def __init__(
        self,
        sock: socket.socket,
        max_frame: int,
        max_unsent: int = MAX_UNSENT,
        policy: AuthPolicy | None = None,
        max_later: int | None = None,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._session = SecureSession(max_frame, policy, max_later)
        self._max_unsent = max_unsent
        self._selector: selectors.BaseSelector | None = None
        self._data: object = None
        self._reads = True
        self._watched = 0
        self._chunk = _CHUNK

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the socket to take them."""
        return bool(self._session.out)

    @property
    def num_unsent(self) -> int:
        """Bytes that wait for the socket to take them."""
        return len(self._session.out)

    @property
    def is_trusted(self) -> bool:
        """Whether the peer is authenticated, or need not be."""
        return self._session.is_trusted

    @property
    def is_midway(self) -> bool:
        """Whether a handshake or a frame is unfinished, or bytes wait to be sent."""
        return self._session.awaits_bytes or self.has_unsent

    def watch(
        self, selector: selectors.BaseSelector, data: object, connecting: bool = False
    ) -> None:
        """Register with ``selector`` until closed: for reading, and for writing while unsent.

        Args:
            selector: yields ``data`` when the socket is ready.
            connecting: whether to watch for writing until the first send.
        """
        self._watched = selectors.EVENT_READ | (selectors.EVENT_WRITE if connecting else 0)
        selector.register(self.socket, self._watched, data)
        self._selector, self._data = selector, data

    def read_on(self, wanted: bool) -> None:
        """Whether to watch for reading, or only for room to send what is unsent."""
        self._reads = wanted
        self._update_watch()

    def send(self, bodies: Sequence[bytes]) -> None:
        """Send a frame per body, after what waited before; keep what the socket does not take.

        Raises:
            SideChannelLost: the connection broke, or more than ``max_unsent`` bytes wait.
        """
        held = self._session.send(bodies) if bodies else 0
        self.flush()
        waiting = held + len(self._session.out)
        if bodies and waiting > self._max_unsent:
            does_not = "read" if self.is_trusted else "authenticate"
            raise SideChannelLost(f"{waiting} bytes wait for a peer that does not {does_not}")

    def flush(self) -> None:
        """Send what waits.

        Raises:
            SideChannelLost: the connection broke.
        """
        self._write()
        self._update_watch()

    def receive(self) -> list[bytes]:
        """Message bodies whose frames are complete now.

        Raises:
            Unauthenticated: the peer failed to authenticate, or a frame is not its own.
            SideChannelLost: the peer closed, the connection broke, or a frame is longer
                than allowed.
        """
        try:
            data = self.socket.recv(self._chunk)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionResetError as error:
            raise self._session.closed(str(error)) from error
        except OSError as error:
            raise SideChannelLost(str(error)) from error
        if not data:
            raise self._session.closed("closed by the peer")
        self._chunk = _LARGE_CHUNK if len(data) == self._chunk else _CHUNK
        unsent = len(self._session.out)
        try:
            bodies = self._session.feed(data)
        except SideChannelLost:
            with contextlib.suppress(SideChannelLost):
                self._write()  # a TLS alert tells the peer why
            raise
        if len(self._session.out) > unsent:
            self.flush()
        elif self._watched & selectors.EVENT_WRITE:
            self._update_watch()
        return bodies

    def close(self) -> None:
        """Leave the selector and close the socket; harmless when closed."""
        selector, self._selector = self._selector, None
        if selector is not None:
            selector.unregister(self.socket)
        self.socket.close()

    def _write(self) -> None:
        out = self._session.out
        while out:
            try:
                sent = self.socket.send(out)
            except (BlockingIOError, InterruptedError):
                return
            except (ConnectionResetError, BrokenPipeError) as error:
                raise self._session.closed(str(error)) from error
            except OSError as error:
                raise SideChannelLost(str(error)) from error
            del out[:sent]

    def _update_watch(self) -> None:
        if self._selector is None:
            return
        wanted = selectors.EVENT_READ if self._reads else 0
        if self.has_unsent:
            wanted |= selectors.EVENT_WRITE
        if wanted and wanted != self._watched:
            self._selector.modify(self.socket, wanted, self._data)
            self._watched = wanted


__all__ = ["MAX_UNSENT", "AuthPolicy", "Connection", "SideChannelLost", "Unauthenticated"]
