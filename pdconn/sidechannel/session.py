"""The layers between a socket's bytes and messages: TLS, frames, seals.  No socket here.

::

    bytes ◄──► TLS ◄──► frames ◄──► seals ◄──► messages
               if configured        if there is a secret

Without an authentication policy, TLS and seals are left out.  With one, no message is sent
and none is delivered before the peer is authenticated in every layer.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
from pdconn.protocol.framing import Frames, frame
from pdconn.sidechannel.tls import Tls, TlsClosed, TlsFailed

_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")  # an alert, a handshake


class SideChannelLost(Exception):
    """The connection is over: closed, reset, flooded or out of step."""


class Unauthenticated(SideChannelLost):
    """The peer failed to authenticate, or we to it, or a later frame is not authentic."""


@dataclass(frozen=True, slots=True)
class LenderAuthPolicy:
    """What a lender demands of the readers that dial it.  Serves any number of connections."""

    secret: Secret | None
    tls: ssl.SSLContext | None
    endpoints: tuple[str, ...] = ("",)

    def reached_at(self, endpoint: str) -> LenderAuthPolicy:
        """For a connection that came in at ``endpoint``, which its reader may have dialled."""
        if endpoint in self.endpoints:
            return self
        return replace(self, endpoints=(*self.endpoints, endpoint))

    def open(self) -> tuple[Tls | None, LenderAuth | None]:
        """The layers of a new connection."""
        nonce = secrets.token_bytes(NONCE_NBYTES)
        return (
            None if self.tls is None else Tls(self.tls, is_lender=True, host=None),
            None if self.secret is None else LenderAuth(self.secret, nonce, self.endpoints),
        )


@dataclass(frozen=True, slots=True)
class ReaderAuthPolicy:
    """What a reader demands of the lender that it dials at ``host``."""

    secret: Secret | None
    tls: ssl.SSLContext | None
    host: str
    endpoint: str = ""

    def open(self) -> tuple[Tls | None, ReaderAuth | None]:
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
        awaits_bytes: whether the handshake, or what arrived of a frame, is unfinished.
    """

    def __init__(
        self, max_frame: int, policy: AuthPolicy | None, max_later: int | None = None
    ) -> None:
        self._awaits_reader = isinstance(policy, LenderAuthPolicy)
        self._tls: Tls | None = None
        self._auth: LenderAuth | ReaderAuth | None = None
        if policy is not None:
            self._tls, self._auth = policy.open()
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
            self._put(self._auth.start() if self._auth is not None else [])

    @property
    def is_trusted(self) -> bool:
        """Whether the peer is authenticated in every layer that we have."""
        return self._has_tls_done and self._has_auth_done

    def send(self, bodies: Sequence[bytes]) -> int:
        """Put messages into :attr:`out`, or hold them until the peer is authenticated.

        Returns how many bytes are held.
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

    def feed(self, data: bytes) -> list[bytes]:
        """Bytes arrived; return the messages that they complete.

        Afterwards :attr:`out` has handshake replies, and what was held for the handshake.

        Raises:
            Unauthenticated: the peer failed to authenticate, or a frame is not its own.
            SideChannelLost: a frame is longer than allowed, or the peer ended the session.
        """
        if not self._has_received and len(self._first) < 4:
            self._first = (self._first + data[:4])[:4]
        try:
            bodies = self._split(data if self._tls is None else self._tls.feed(data))
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
                self.out += self._tls.take()
        self._has_received |= bool(bodies)
        self.awaits_bytes = (
            bool(self._frames.unfinished or self._handshake.unfinished)
            or (self._auth is not None and not self._auth.is_ready)
            or (self._tls is not None and self._tls.is_midway)
        )
        return bodies

    def closed(self, how: str) -> SideChannelLost:
        """The error to raise when the peer has closed: its likely cause depends on the state."""
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
            self._tls.write(frames)
            self.out += self._tls.take()

    def _split(self, data: bytes) -> list[bytes]:
        """Message bodies that are complete now.

        A handshake frame is fed byte by byte: the frame behind the last one may arrive
        with it, and has another limit.
        """
        auth = self._auth
        if auth is None:
            return self._frames.feed(data)
        if auth.is_ready:
            return auth.opened(self._frames.feed(data))
        at = 0
        while not self._has_auth_done and at < len(data):
            for body in self._handshake.feed(data[at : at + 1]):
                self._advance(body)
            at += 1
        return auth.opened(self._frames.feed(data[at:])) if auth.is_ready else []

    def _advance(self, body: bytes) -> None:
        assert self._auth is not None
        self._put(self._auth.feed(body)[1])
        if self._auth.is_ready:
            held, self._held = self._held, []
            self._put([self._auth.seal(message) for message in held])

    def _frame_error(self, error: FrameError) -> SideChannelLost:
        if self._tls is None and self._first[:2] in _TLS_RECORDS and not self._has_received:
            return Unauthenticated("the peer speaks TLS and we do not")
        if not self.is_trusted:
            return Unauthenticated(f"before it authenticated: {error}")
        return SideChannelLost(str(error))
