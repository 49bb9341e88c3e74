"""How the two ends of a side channel authenticate each other.

=============  ============================================================================
secret         both prove that they know it, and authenticate every message; no encryption
TLS            both show a certificate of one CA, and everything is encrypted
both           the secret's handshake runs inside TLS
none           any host may connect: only on loopback, or with ``insecure``
=============  ============================================================================
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdconn.protocol.auth import Secret
from pdconn.sidechannel.connection import LenderAuthPolicy, ReaderAuthPolicy
from pdconn.sidechannel.credentials import (
    SecurityError,
    TlsFiles,
    lender_context,
    reader_context,
    secret_of,
)


class NoHostName(SecurityError, OSError):
    """A host that no certificate can name; an OSError, as when it does not resolve."""

    def __init__(self, host: str) -> None:
        super().__init__("host", "a name or address that a certificate can hold", repr(host))


class Unprotected(SecurityError):
    """The side channel is reachable from other hosts, and nothing authenticates them."""

    def __init__(self, host: str) -> None:
        expected = (
            "a shared secret (secret_file, or PDCONN_SECRET in the environment), or TLS "
            '(tls_cert, tls_key and tls_ca), or "insecure": true if every host that reaches '
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
    """Credentials of both sides of our side channels.  Files are read once, here.

    ``check_hostname``: a lender's certificate must name the host in the ticket; else any
    certificate of the CA is accepted.

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
        """Read the settings; the secret may come from the environment if no setting names it.

        Raises:
            SecurityError: naming the setting, the expected and the seen value.
        """
        secret = secret_of(secret_file, environ)
        tls = TlsFiles.from_paths(tls_cert, tls_key, tls_ca)
        return cls(secret, tls, insecure, tls_check_hostname)

    @property
    def authenticates(self) -> bool:
        """Whether peers must authenticate."""
        return self.secret is not None or self.tls is not None

    def require(self, host: str) -> None:
        """Refuse a side channel at ``host`` that is reachable and unauthenticated.

        Raises:
            Unprotected: naming the three remedies.
        """
        if not (self.authenticates or self.insecure or is_loopback(host)):
            raise Unprotected(host)

    def for_lender(self, *endpoints: str) -> LenderAuthPolicy | None:
        """The policy for connections that we accept; None trusts every reader.

        Args:
            endpoints: our ``host:port``, as in our tickets.  A reader must have dialled one of
                them, or the address at which its connection is accepted.
        """
        if not self.authenticates:
            return None
        context = None if self._contexts is None else self._contexts.lender
        return LenderAuthPolicy(self.secret, context, endpoints or ("",))

    def for_reader(self, host: str, endpoint: str = "") -> ReaderAuthPolicy | None:
        """The policy for a connection to the lender at ``host``; None trusts it.

        ``endpoint`` is ``host:port`` as in the ticket.

        Raises:
            NoHostName: TLS is on, and no certificate can name ``host``.
        """
        if not self.authenticates:
            return None
        if self._contexts is None:
            return ReaderAuthPolicy(self.secret, None, host, endpoint)
        try:
            self._contexts.reader.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=host)
        except (TypeError, ValueError, ssl.SSLError):  # a zero byte, not IDNA, or too long
            raise NoHostName(host) from None
        return ReaderAuthPolicy(self.secret, self._contexts.reader, host, endpoint)


def is_loopback(host: str) -> bool:
    """Whether ``host`` certainly is this machine; of names, only localhost is."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


__all__ = ["NoHostName", "Security", "SecurityError", "TlsFiles", "Unprotected", "is_loopback"]
