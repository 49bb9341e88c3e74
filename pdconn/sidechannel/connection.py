"""One side-channel connection, from a host name to messages in and out, without blocking.

::

    send_frames ──► SecureSession ──► unsent bytes ──► socket
    receive_frames ◄── whole messages ◄── SecureSession ◄── socket

``SecureSession`` has no socket: it consists of the layers between a socket's bytes and messages::

    bytes ◄──► TLS ◄──► frames ◄──► seals ◄──► messages
               if configured        if there is a secret

Without an authentication policy, TLS and seals are left out.  With one, no message is sent
and none is delivered before the peer is authenticated in every layer.

A *frame* carries one message list (:class:`pdconn.protocol.messages.Frames`); frames above
``max_frame`` end the connection.  *Unsent* bytes wait for a peer that reads slowly, or
that is not authenticated yet; above ``max_unsent`` the connection ends too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdconn.protocol.auth import (
    MAX_HANDSHAKE_NBYTES,
    NONCE_NBYTES,
    TAG_NBYTES,
    AuthError,
    LenderAuth,
    ReaderAuth,
    Secret,
)
from pdconn.protocol.errors import FrameError
from pdconn.protocol.messages import Frames, frame
from pdconn.sidechannel.tls import Tls, TlsClosed, TlsFailed

MAX_WELCOME = 1 << 21
"""Bytes of a Welcome: some 200 ranks of 60 layers each, which take 0.2 s to decode."""

MAX_REPLIES = 1 << 23
"""Bytes of a frame after a Welcome.  Lenders begin a new frame after 512 KiB, but a message is not
cut: the blocks of a prompt of a million tokens in 16 groups of blocks of 16 tokens take 5 MiB."""

Address = tuple[socket.AddressFamily, Any]


def resolve(host: str, port: int) -> Address:
    """The address of ``host:port``.  Blocks until the name server answers.

    Raises:
        OSError: the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} is not a host name: {error}") from error
    family, _, _, _, address = found[0]
    return family, address


def connecting_to(address: Address) -> socket.socket:
    """A socket that is connecting; it turns writable when it is connected or has failed.

    Raises:
        OSError: the connection fails at once.
    """
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    failed = sock.connect_ex(where)
    if failed not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(failed, os.strerror(failed))
    return sock


def literal_address(host: str, port: int) -> Address | None:
    """The address if ``host`` is a literal address; None if it is a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, UnicodeError, ValueError):
            socket.inet_pton(family, host)
            return family, (host, port)
    return None


_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")  # an alert, a handshake


class SideChannelLost(Exception):
    """The connection has ended: closed, reset, or by a frame or a backlog that is too long."""


class Unauthenticated(SideChannelLost):
    """One side has failed to authenticate, or a later frame is not authentic."""


@dataclass(frozen=True, slots=True)
class LenderAuthPolicy:
    """How a lender authenticates readers; for any number of connections."""

    secret: Secret | None
    tls: ssl.SSLContext | None
    endpoints: tuple[str, ...] = ("",)

    def reached_at(self, endpoint: str) -> LenderAuthPolicy:
        """The policy for a connection accepted at ``endpoint``, which its reader may have named."""
        if endpoint in self.endpoints:
            return self
        return replace(self, endpoints=(*self.endpoints, endpoint))

    def open_layers(self) -> tuple[Tls | None, LenderAuth | None]:
        """The layers of a new connection."""
        nonce = secrets.token_bytes(NONCE_NBYTES)
        return (
            None if self.tls is None else Tls(self.tls, is_lender=True, host=None),
            None if self.secret is None else LenderAuth(self.secret, nonce, self.endpoints),
        )


@dataclass(frozen=True, slots=True)
class ReaderAuthPolicy:
    """How a reader authenticates the lender that it dials at ``host``."""

    secret: Secret | None
    tls: ssl.SSLContext | None
    host: str
    endpoint: str = ""

    def open_layers(self) -> tuple[Tls | None, ReaderAuth | None]:
        """The layers of a new connection."""
        nonce = secrets.token_bytes(NONCE_NBYTES)
        return (
            None if self.tls is None else Tls(self.tls, is_lender=False, host=self.host),
            None if self.secret is None else ReaderAuth(self.secret, nonce, self.endpoint),
        )


AuthPolicy = LenderAuthPolicy | ReaderAuthPolicy


class SecureSession:
    """Both directions of one connection.

    Args:
        max_frame: longest message accepted, in bytes; until the peer is authenticated,
            frames are limited to 1 KiB.
        policy: None trusts any peer.
        max_later: longest message accepted after the first; ``max_frame`` unless given.

    Attributes:
        out: bytes to send; the owner removes what it has sent.
        awaits_bytes: whether the handshake, or an incoming frame, is unfinished.
    """

    def __init__(
        self, max_frame: int, policy: AuthPolicy | None, max_later: int | None = None
    ) -> None:
        self._awaits_reader = isinstance(policy, LenderAuthPolicy)
        self._tls: Tls | None = None
        self._auth: LenderAuth | ReaderAuth | None = None
        if policy is not None:
            self._tls, self._auth = policy.open_layers()
        self._handshake = Frames(MAX_HANDSHAKE_NBYTES)
        sealed = TAG_NBYTES if self._auth is not None else 0
        later = max_frame if max_later is None else max_later
        self._frames = Frames(max_frame + sealed, later + sealed)
        self._held: list[bytes] = []
        self._first = b""
        self._has_sent = self._has_received = False
        self.out = bytearray()
        self.awaits_bytes = self._tls is not None or self._auth is not None
        if self.awaits_bytes:
            self._put(self._auth.opening_frames() if self._auth is not None else [])

    @property
    def is_trusted(self) -> bool:
        """Whether the peer is authenticated in every configured layer."""
        return self._has_tls_done and self._has_auth_done

    def queue_messages(self, bodies: Sequence[bytes]) -> int:
        """Add messages to :attr:`out`, or hold them until the peer is authenticated.

        Returns:
            How many bytes are held.
        """
        self._has_sent = True
        if self._auth is None:
            self._put(bodies)
        elif self._auth.is_ready:
            self._put([self._auth.seal(body) for body in bodies])
        else:
            self._held += bodies
        in_tls = 0 if self._tls is None else self._tls.held_nbytes
        return in_tls + sum(map(len, self._held)) if self._held else in_tls

    def receive_bytes(self, data: bytes) -> list[bytes]:
        """Process incoming bytes; returns the messages that they complete.

        Handshake replies, and messages that waited for the handshake, are added to :attr:`out`.

        Raises:
            Unauthenticated: the peer failed to authenticate, or a frame is not its own.
            SideChannelLost: a frame is longer than allowed, or the peer ended the session.
        """
        if not self._has_received and len(self._first) < 4:
            self._first = (self._first + data[:4])[:4]
        try:
            bodies = self._split(data if self._tls is None else self._tls.decrypt(data))
        except TlsClosed:
            raise self.closed("closed by the peer") from None
        except TlsFailed as error:
            raise Unauthenticated(f"TLS: {error}") from error
        except AuthError as error:
            raise Unauthenticated(str(error)) from error
        except FrameError as error:
            raise self._frame_error(error) from error
        finally:
            if self._tls is not None:
                self.out += self._tls.take_ciphertext()
        self._has_received |= bool(bodies)
        self.awaits_bytes = (
            bool(self._frames.unfinished or self._handshake.unfinished)
            or (self._auth is not None and not self._auth.is_ready)
            or (self._tls is not None and self._tls.is_midway)
        )
        return bodies

    def closed(self, how: str) -> SideChannelLost:
        """The error for a peer that has closed, with the likely cause in the present state."""
        if self._awaits_reader and not self._first:
            return SideChannelLost(how)  # a port probe: connect and close
        if not self._has_tls_done:
            return Unauthenticated(f"{how} before it authenticated: does it speak TLS?")
        if self._auth is not None and not self._auth.is_ready:
            if isinstance(self._auth, ReaderAuth) and self._auth.has_proven:
                hint = "the secrets probably differ, or it does not know itself by this host"
                return Unauthenticated(f"{how} when it saw our proof: {hint}")
            tls = "and TLS" if self._tls is not None else "and no TLS"
            hint = f"we use a secret {tls}; does the peer?"
            return Unauthenticated(f"{how} before it authenticated: {hint}")
        if self._has_sent and not self._has_received:
            lacks = [
                *(["a secret"] if self._auth is None else []),
                *(["TLS"] if self._tls is None else ["another certificate"]),
            ]
            hint = f"does it require {' or '.join(lacks)} that we do not have?"
            return Unauthenticated(f"{how} before it answered: {hint}")
        return SideChannelLost(how)

    @property
    def _has_tls_done(self) -> bool:
        return self._tls is None or self._tls.is_ready

    @property
    def _has_auth_done(self) -> bool:
        return self._auth is None or self._auth.is_ready

    def _put(self, bodies: Iterable[bytes]) -> None:
        frames = b"".join([frame(body) for body in bodies])
        if self._tls is None:
            self.out += frames
        else:
            self._tls.encrypt(frames)
            self.out += self._tls.take_ciphertext()

    def _split(self, data: bytes) -> list[bytes]:
        """Message bodies that are complete."""
        auth = self._auth
        if auth is None:
            return self._frames.feed_bytes(data)
        if auth.is_ready:
            return auth.opened(self._frames.feed_bytes(data))
        # Byte by byte: the frame behind the last one of the handshake may have arrived with it, and
        # has another limit.
        at = 0
        while not self._has_auth_done and at < len(data):
            for body in self._handshake.feed_bytes(data[at : at + 1]):
                self._advance(body)
            at += 1
        return auth.opened(self._frames.feed_bytes(data[at:])) if auth.is_ready else []

    def _advance(self, body: bytes) -> None:
        assert self._auth is not None
        self._put(self._auth.feed_frame(body)[1])
        if self._auth.is_ready:
            held, self._held = self._held, []
            self._put([self._auth.seal(message) for message in held])

    def _frame_error(self, error: FrameError) -> SideChannelLost:
        if self._tls is None and self._first[:2] in _TLS_RECORDS and not self._has_received:
            return Unauthenticated("the peer speaks TLS and we do not")
        if not self.is_trusted:
            return Unauthenticated(f"before it authenticated: {error}")
        return SideChannelLost(str(error))


MAX_UNSENT = 1 << 26

_CHUNK = 1 << 12
"""Bytes of a recv.  Python allocates as many first and frees most of them again: with a large
buffer, a frame of 100 bytes costs more than twice as much."""

_LARGE_CHUNK = 1 << 15
"""Bytes of a recv after a full one.  Above 128 KiB each takes new pages from the system."""


class Connection:
    """Owns a connected, or connecting, stream socket.

    With an authentication policy, messages sent before the peer is authenticated wait here,
    and messages received come from an authenticated peer.  The handshake happens inside
    :meth:`receive_frames` and :meth:`flush_unsent`; a reader's begins with the first flush.

    Args:
        sock: made non-blocking here.
        max_frame: longest frame accepted, in bytes.
        max_unsent: bytes that may wait to be sent.
        policy: from :class:`pdconn.sidechannel.security.Security`; None trusts any peer.
        max_later: longest frame accepted after the first, if that is less.
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
        """Whether the peer is authenticated, or no authentication is required."""
        return self._session.is_trusted

    @property
    def is_midway(self) -> bool:
        """Whether a handshake or a frame is unfinished, or bytes wait to be sent."""
        return self._session.awaits_bytes or self.has_unsent

    def watch_socket(
        self, selector: selectors.BaseSelector, data: object, connecting: bool = False
    ) -> None:
        """Register with ``selector`` until closed, for reading, and for writing while bytes wait.

        Args:
            selector: yields ``data`` when the socket is ready.
            connecting: whether to watch for writing until the first send.
        """
        self._watched = selectors.EVENT_READ | (selectors.EVENT_WRITE if connecting else 0)
        selector.register(self.socket, self._watched, data)
        self._selector, self._data = selector, data

    def read_on(self, wanted: bool) -> None:
        """Watch for reading if ``wanted``; otherwise only for writing."""
        self._reads = wanted
        self._update_watch()

    def send_frames(self, bodies: Sequence[bytes]) -> None:
        """Send one frame per body, after the bytes that wait; keep what the socket does not accept.

        Raises:
            SideChannelLost: the connection broke, or more than ``max_unsent`` bytes wait.
        """
        held = self._session.queue_messages(bodies) if bodies else 0
        self.flush_unsent()
        waiting = held + len(self._session.out)
        if bodies and waiting > self._max_unsent:
            does_not = "read" if self.is_trusted else "authenticate"
            raise SideChannelLost(f"{waiting} bytes wait for a peer that does not {does_not}")

    def flush_unsent(self) -> None:
        """Send the bytes that wait.

        Raises:
            SideChannelLost: the connection broke.
        """
        self._write()
        self._update_watch()

    def receive_frames(self) -> list[bytes]:
        """Receive the message bodies whose frames are complete.

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
            bodies = self._session.receive_bytes(data)
        except SideChannelLost:
            with contextlib.suppress(SideChannelLost):
                self._write()  # a TLS alert with the reason
            raise
        if len(self._session.out) > unsent:
            self.flush_unsent()
        elif self._watched & selectors.EVENT_WRITE:
            self._update_watch()
        return bodies

    def close(self) -> None:
        """Unregister from the selector and close the socket.  Idempotent."""
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
