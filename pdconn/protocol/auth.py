"""Both sides of a connection prove that they know one secret, and seal every frame.

Four tiny frames before the first message; the reader speaks first::

    reader                                     lender
    hello, nonce r  ─────────────────────────►
                    ◄───────────────────────── challenge, nonce l
    proof of reader ─────────────────────────►   wrong: closed without a reply
                    ◄───────────────────────── proof of lender
    sealed frames   ◄────────────────────────►   tag ‖ body

A host without the secret that dials learns a nonce and nothing else: the lender sends its
proof only after it has checked the reader's, and the reader sends no message before it has
checked the lender's.

Everything is derived from the secret *and both nonces* (HKDF's extract and expand, RFC 5869, with
HMAC-SHA256); tags are those of keyed BLAKE2b (RFC 7693), which takes less time for each frame::

    session = HMAC(label ‖ version ‖ r ‖ l ‖ endpoint, secret)
    HMAC(session, "reader proves"),  HMAC(session, "lender proves")    the proofs
    HMAC(session, "reader seals"),   HMAC(session, "lender seals")     keys of tags
    tag     = BLAKE2b(key of the sender, sequence number ‖ body), 16 bytes

So no frame of one connection is valid on another (fresh nonces), in the other direction
(labels), or elsewhere in the stream (sequence numbers).  The *endpoint* is the ``host:port``
that the reader dials, as the ticket names it, and it must be one of the lender's own: a forged
ticket that sends a reader to another host cannot have its handshake relayed to the true
lender.  There is no encryption: bodies travel in the clear unless TLS is below.

Nonces are arguments; no error shows a byte of a secret, key, proof or tag.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b

from pdconn.protocol.errors import ProtocolError

VERSION = 2
"""Of the handshake and of tags; version 1 made tags with HMAC-SHA256."""

NONCE_NBYTES = 32
TAG_NBYTES = 16
MIN_SECRET_NBYTES = 16
MAX_HANDSHAKE_NBYTES = 1024
"""Longest frame accepted before the handshake is complete."""

_LABEL = b"pdconn-auth"
_HEAD = len(_LABEL) + 2
_PAYLOAD = 32  # of every handshake frame: a nonce or a proof


class AuthError(ProtocolError):
    """The peer failed to prove that it knows the secret, or a frame is not authentic."""


class Secret:
    """At least 16 bytes that readers and lenders share.  Its repr and errors hide them.

    One newline at the end is not part of it, so a file that an editor or ``echo`` has written
    holds the same secret as an environment variable.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        stripped = value.removesuffix(b"\n").removesuffix(b"\r") if value.endswith(b"\n") else value
        if len(stripped) < MIN_SECRET_NBYTES:
            expected = f"at least {MIN_SECRET_NBYTES} bytes"
            raise AuthError("secret", expected, f"{len(stripped)} bytes")
        self._value = stripped

    def __repr__(self) -> str:
        return "Secret(...)"

    def session(self, reader_nonce: bytes, lender_nonce: bytes, endpoint: str) -> bytes:
        """The key from which both sides of one connection derive all others."""
        salt = _LABEL + bytes([VERSION]) + reader_nonce + lender_nonce + endpoint.encode()
        return hmac.digest(salt, self._value, "sha256")


class _Kind(IntEnum):
    """The kind of a handshake frame."""

    HELLO = 1
    CHALLENGE = 2
    READER_PROOF = 3
    LENDER_PROOF = 4

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "'s ")


class _Seal:
    """Tags of one direction: each is valid for one body at one position in the stream."""

    def __init__(self, session: bytes, label: bytes) -> None:
        self._key = hmac.digest(session, label, "sha256")
        self._next = 0

    def tag(self, body: bytes) -> bytes:
        numbered = self._next.to_bytes(8, "big") + body
        self._next += 1
        return blake2b(numbered, digest_size=TAG_NBYTES, key=self._key).digest()


class _Side:
    """The common part of both sides: one handshake frame at a time, then sealed frames.

    ``_awaited`` is the handshake frame that must arrive next, None after the last.  The
    first invalid frame ends it: every later call raises.
    """

    def __init__(self, secret: Secret, nonce: bytes, awaited: _Kind) -> None:
        if len(nonce) != NONCE_NBYTES:
            raise AuthError("our nonce", f"{NONCE_NBYTES} bytes", f"{len(nonce)} bytes")
        self._secret = secret
        self._nonce = nonce
        self._awaited: _Kind | None = awaited
        self._failed = False
        self._session = b""
        self._ours: _Seal | None = None
        self._theirs: _Seal | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the peer is authenticated, so that messages may pass."""
        return self._ours is not None and not self._failed

    @property
    def has_proven(self) -> bool:
        """Whether our proof was sent; a peer that closes now has probably rejected it."""
        return bool(self._session)

    def opening_frames(self) -> list[bytes]:
        """Frames to send before the first one arrives."""
        return []

    def feed_frame(self, body: bytes) -> tuple[list[bytes], list[bytes]]:
        """Process an incoming frame; returns messages for the application, and frames to send.

        Raises:
            AuthError: any frame but the one that may arrive now.
        """
        if self._failed:
            raise AuthError("frame", "none after a failure", "another")
        try:
            if self._theirs is not None:
                return [_opened(self._theirs, body)], []
            assert self._awaited is not None
            return [], self._advance(self._awaited, _payload(self._awaited, body))
        except AuthError:
            self._failed = True
            raise

    def opened(self, bodies: Sequence[bytes]) -> list[bytes]:
        """The messages of several sealed frames, once :attr:`is_ready`.

        Raises:
            AuthError: one of them is not the next that the peer sealed.
        """
        theirs = self._theirs
        if self._failed or theirs is None:
            raise AuthError("frame", "none before the peer is authenticated", "one")
        try:
            return [_opened(theirs, body) for body in bodies]
        except AuthError:
            self._failed = True
            raise

    def seal(self, body: bytes) -> bytes:
        """``body`` behind its tag; frames must be sent in the order of sealing.

        Raises:
            AuthError: the peer is not authenticated.
        """
        if self._ours is None or self._failed:
            raise AuthError("message", "none before the peer is authenticated", "one")
        return self._ours.tag(body) + body

    def _advance(self, kind: _Kind, payload: bytes) -> list[bytes]:
        raise NotImplementedError

    def _derive(self, label: bytes) -> bytes:
        return hmac.digest(self._session, label, "sha256")

    def _complete(self, ours: str, theirs: str) -> None:
        self._awaited = None
        self._ours = _Seal(self._session, f"{ours} seals".encode())
        self._theirs = _Seal(self._session, f"{theirs} seals".encode())


class ReaderAuth(_Side):
    """The side that dials: it sends its proof first, and no message before the lender's proof.

    Args:
        nonce: 32 random bytes, new for every connection.
        endpoint: ``host:port`` of the lender, as the ticket names it.
    """

    def __init__(self, secret: Secret, nonce: bytes, endpoint: str = "") -> None:
        super().__init__(secret, nonce, _Kind.CHALLENGE)
        self._endpoint = endpoint

    def opening_frames(self) -> list[bytes]:
        """The hello."""
        return [_handshake(_Kind.HELLO, self._nonce)]

    def _advance(self, kind: _Kind, payload: bytes) -> list[bytes]:
        if kind is _Kind.CHALLENGE:
            if payload == self._nonce:
                raise AuthError("lender's nonce", "one of its own", "ours")
            self._session = self._secret.session(self._nonce, payload, self._endpoint)
            self._awaited = _Kind.LENDER_PROOF
            return [_handshake(_Kind.READER_PROOF, self._derive(b"reader proves"))]
        if not hmac.compare_digest(payload, self._derive(b"lender proves")):
            raise AuthError("lender's proof", "one made with our secret", "one made with another")
        self._complete("reader", "lender")
        return []


class LenderAuth(_Side):
    """The side that listens: it sends a nonce, and its proof after a valid one.

    Args:
        nonce: 32 random bytes, new for every connection.
        endpoints: our ``host:port``, by each name that readers may dial.
    """

    def __init__(self, secret: Secret, nonce: bytes, endpoints: Sequence[str] = ("",)) -> None:
        super().__init__(secret, nonce, _Kind.HELLO)
        self._endpoints = tuple(endpoints)
        self._sessions: list[bytes] = []

    def _advance(self, kind: _Kind, payload: bytes) -> list[bytes]:
        if kind is _Kind.HELLO:
            self._sessions = [
                self._secret.session(payload, self._nonce, endpoint) for endpoint in self._endpoints
            ]
            self._awaited = _Kind.READER_PROOF
            return [_handshake(_Kind.CHALLENGE, self._nonce)]
        self._session = self._proven_by(payload)
        self._complete("lender", "reader")
        return [_handshake(_Kind.LENDER_PROOF, self._derive(b"lender proves"))]

    def _proven_by(self, proof: bytes) -> bytes:
        """The session of the endpoint that the reader's proof was made with."""
        # Several endpoints are ours: the host that we advertise, and the address at which the
        # connection came in, which a router may have written into the ticket.
        for session in self._sessions:
            if hmac.compare_digest(proof, hmac.digest(session, b"reader proves", "sha256")):
                return session
        places = " or ".join(filter(None, self._endpoints)) or "no place in particular"
        ours = f"one made with our secret, and for {places}"
        seen = "one made with another, or by a reader that dialled another host"
        raise AuthError("reader's proof", ours, seen)


def _handshake(kind: _Kind, payload: bytes) -> bytes:
    return _LABEL + bytes([VERSION, kind]) + payload


def _payload(kind: _Kind, body: bytes) -> bytes:
    """The payload of the awaited frame, after checking that ``body`` is exactly that."""
    if not body.startswith(_LABEL) or len(body) < _HEAD:
        seen = f"{len(body)} other bytes: does the peer have a secret?"
        raise AuthError("handshake", f"pdconn's {kind.label}", seen)
    version, seen_kind = body[len(_LABEL)], body[len(_LABEL) + 1]
    if version != VERSION:
        raise AuthError("handshake version", VERSION, version)
    if seen_kind != kind:
        raise AuthError("handshake frame", f"{kind.value} ({kind.label})", seen_kind)
    if len(body) != _HEAD + _PAYLOAD:
        raise AuthError(f"{kind.label}, bytes", _HEAD + _PAYLOAD, len(body))
    return body[_HEAD:]


def _opened(theirs: _Seal, body: bytes) -> bytes:
    tag, message = body[:TAG_NBYTES], body[TAG_NBYTES:]
    if not hmac.compare_digest(tag, theirs.tag(message)):
        raise AuthError(
            "frame", "the next that the peer sealed", "an altered, replayed or misplaced one"
        )
    return message
