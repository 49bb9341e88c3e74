"""TLS from bytes to bytes: no socket here, so that a connection stays non-blocking.

::

    ciphertext from the socket ── decrypt ──────────► Tls ──► plaintext
    ciphertext to the socket   ◄── take_ciphertext ── Tls ◄── encrypt ── plaintext
"""

from __future__ import annotations

import ssl

_CHUNK = 1 << 16
_HEADER = 5

_MEANING = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer showed no client certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer requires a client certificate",
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "the peer does not speak TLS",
    "RECORD_LAYER_FAILURE": "the peer does not speak TLS",
    "HTTP_REQUEST": "the peer speaks HTTP, not TLS",
    "UNSUPPORTED_PROTOCOL": "the peer does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer does not speak TLS 1.3",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer does not know the CA of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the peer says that our certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer does not accept our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the peer does not accept our certificate",
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "a record was altered, replayed or misplaced",
    "SSLV3_ALERT_BAD_RECORD_MAC": "the peer got an altered, replayed or misplaced record",
}
"""OpenSSL's reasons in plain words; others are shown as OpenSSL names them."""


class TlsFailed(Exception):
    """The handshake failed, or a record is not what the peer sent."""


class TlsClosed(Exception):
    """The peer has ended the session."""


class Tls:
    """One TLS session.

    Args:
        context: for our side (:mod:`pdconn.sidechannel.credentials`).
        is_lender: whether we listen.
        host: the host that we dial, which the certificate must name.
    """

    def __init__(self, context: ssl.SSLContext, *, is_lender: bool, host: str | None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, is_lender, host)
        self._records = _Records()
        self._held = bytearray()
        self.is_ready = False
        self._do_handshake()

    @property
    def is_midway(self) -> bool:
        """Whether the handshake is unfinished, or a record has arrived in part."""
        return not self.is_ready or self._records.is_midway

    @property
    def held_nbytes(self) -> int:
        """Plaintext that waits for the handshake."""
        return len(self._held)

    def decrypt(self, data: bytes) -> bytes:
        """Decrypt incoming bytes; returns the plaintext that they complete.

        Raises:
            TlsFailed: with a reason for a log line.
            TlsClosed: the peer has ended the session.
        """
        self._records.note_bytes(data)
        self._incoming.write(data)
        try:
            if not self.is_ready:
                self._do_handshake()
            return self._read() if self.is_ready else b""
        except ssl.SSLZeroReturnError as error:
            raise TlsClosed from error
        except ssl.SSLError as error:
            raise TlsFailed(_reason(error)) from error

    def encrypt(self, data: bytes) -> None:
        """Encrypt plaintext to send; it is held until the handshake is complete."""
        if not self.is_ready:
            self._held += data
            return
        view = memoryview(data)
        while view:
            view = view[self._session.write(view) :]

    def take_ciphertext(self) -> bytes:
        """Ciphertext to send."""
        return self._outgoing.read()

    def _do_handshake(self) -> None:
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            return
        self.is_ready = True
        held, self._held = self._held, bytearray()
        self.encrypt(bytes(held))

    def _read(self) -> bytes:
        plain = bytearray()
        while True:
            try:
                piece = self._session.read(_CHUNK)
            except ssl.SSLWantReadError:
                return bytes(plain)
            if not piece:
                raise ssl.SSLZeroReturnError
            plain += piece


class _Records:
    """Parses record headers, since OpenSSL does not report that it holds part of a record."""

    def __init__(self) -> None:
        self._header = b""
        self._missing = 0

    @property
    def is_midway(self) -> bool:
        return bool(self._header) or self._missing > 0

    def note_bytes(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._missing:
                step = min(self._missing, len(data) - at)
                self._missing -= step
            else:
                step = min(_HEADER - len(self._header), len(data) - at)
                self._header += data[at : at + step]
                if len(self._header) == _HEADER:
                    self._missing = int.from_bytes(self._header[3:], "big")
                    self._header = b""
            at += step


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate: {error.verify_message.rstrip('.')}"
    reason = error.reason or str(error)
    return _MEANING.get(reason, reason.lower().replace("_", " "))
