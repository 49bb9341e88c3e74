"""What a side channel demands of the other side, and what it shows of itself.

=============  ========================================================================
secret         both prove that they know it, and seal every message; nothing is hidden
TLS            both show a certificate of one CA, and everything is encrypted
both           the secret's handshake runs inside TLS
none           anyone may talk to us: only on loopback, or where ``insecure`` says so
=============  ========================================================================
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdconn.protocol.auth import Secret
from pdconn.sidechannel.credentials import (
    SecurityError,
    TlsFiles,
    lender_context,
    reader_context,
    secret_of,
)
from pdconn.sidechannel.session import LenderAuthPolicy, ReaderAuthPolicy


class NoHostName(SecurityError, OSError):
    """A host that no certificate could name; an OSError, as when it does not resolve."""

    def __init__(self, host: str) -> None:
        super().__init__("host", "a name or address that a certificate can hold", repr(host))


class Unprotected(SecurityError):
    """Strangers could reach the side channel and nothing would stop them."""

    def __init__(self, host: str) -> None:
        expected = (
            "a shared secret (secret_file, or PDCONN_SECRET in the environment), or TLS "
            '(tls_cert, tls_key and tls_ca), or "insecure": true if everyone who can reach '
            "this address may read and end any transfer"
        )
        super().__init__(
            f"side channel at {host}", expected, "none of them, and it is not loopback"
        )


@dataclass(frozen=True, slots=True)
class _Contexts:
    lender: ssl.SSLContext
    reader: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class Security:
    """How both sides of our side channels are guarded.  Files are read once, here.

    ``check_hostname`` is whether a lender's certificate must name the host that a
    ticket names; else any certificate of the CA will do.

    Raises:
        SecurityError: a TLS file is missing or wrong.
    """

    secret: Secret | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    check_hostname: bool = True
    _contexts: _Contexts | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.tls is not None:
            contexts = _Contexts(
                lender_context(self.tls),
                reader_context(self.tls, check_hostname=self.check_hostname),
            )
            object.__setattr__(self, "_contexts", contexts)

    @classmethod
    def load(
        cls,
        *,
        secret_file: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        tls_check_hostname: bool = True,
        insecure: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> Security:
        """From settings; the environment may have the secret if no setting does.

        Raises:
            SecurityError: naming the setting, what was expected and what came.
        """
        secret = secret_of(secret_file, environ)
        tls = TlsFiles.of(tls_cert, tls_key, tls_ca)
        return cls(secret, tls, insecure, tls_check_hostname)

    @property
    def authenticates(self) -> bool:
        """Whether strangers are kept out."""
        return self.secret is not None or self.tls is not None

    def require(self, host: str) -> None:
        """Whether the side channel of ``host`` may be used at all.

        Raises:
            Unprotected: naming the three ways out.
        """
        if not (self.authenticates or self.insecure or is_loopback(host)):
            raise Unprotected(host)

    def for_lender(self, place: str = "") -> LenderAuthPolicy | None:
        """For a channel to whoever dialled us; None trusts them.

        ``place`` is ``host:port`` as our tickets name it, and a reader's must be the same.
        """
        if not self.authenticates:
            return None
        context = None if self._contexts is None else self._contexts.lender
        return LenderAuthPolicy(self.secret, context, place)

    def for_reader(self, host: str, place: str = "") -> ReaderAuthPolicy | None:
        """For a channel to the lender at ``host``; None trusts it.

        ``place`` is ``host:port`` as the ticket names it.

        Raises:
            NoHostName: with TLS, and ``host`` is no name.
        """
        if not self.authenticates:
            return None
        if self._contexts is None:
            return ReaderAuthPolicy(self.secret, None, host, place)
        try:
            self._contexts.reader.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=host)
        except (TypeError, ValueError, ssl.SSLError):  # a zero byte, no IDNA name, too long
            raise NoHostName(host) from None
        return ReaderAuthPolicy(self.secret, self._contexts.reader, host, place)


def is_loopback(host: str) -> bool:
    """Whether ``host`` leads to this machine for certain: no name but localhost does."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


__all__ = ["NoHostName", "Security", "SecurityError", "TlsFiles", "Unprotected", "is_loopback"]
