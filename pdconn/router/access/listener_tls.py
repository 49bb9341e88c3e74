"""TLS of the listener: a certificate chain and its key."""

from __future__ import annotations

import ssl

from pdconn.router.router_errors import BadSetting
from pdconn.sidechannel.credentials import SecurityError, read_private

HTTP_1_1, HTTP_2 = "http/1.1", "h2"


class ServerTls:
    """The listener's TLS: version 1.2 or newer.

    Attributes:
        context: used for new connections.

    Raises:
        BadSetting: a file is missing or wrong.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self._protocol = HTTP_1_1
        self.reload_files()

    def speak(self, protocol: str) -> None:
        """Offer one protocol, by its name in ALPN (RFC 7301); ``HTTP_1_1`` at first."""
        self._protocol = protocol
        self.context.set_alpn_protocols([protocol])

    def reload_files(self) -> None:
        """Read both files again, for new connections.

        Raises:
            BadSetting: as in the constructor; the previous certificate stays in use.
        """
        # A new context: OpenSSL keeps one certificate per key type that a context ever loaded.
        context = _new_context()
        _load(context, self._cert, self._key)
        context.set_alpn_protocols([self._protocol])
        self.context = context


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load(context: ssl.SSLContext, cert: str, key: str) -> None:
    def passphrase() -> str:
        raise BadSetting("--tls-key", "a key without passphrase", key)

    try:
        read_private("--tls-key", key)
        context.load_cert_chain(cert, key, passphrase)
    except SecurityError as error:
        raise BadSetting(error.field, error.expected, error.seen) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadSetting("--tls-key", f"the key of {cert}", f"another one in {key}") from error
        expected = "a certificate chain and its key in PEM"
        raise BadSetting("--tls-cert", expected, f"{cert}, {key}: {error.reason}") from error
    except OSError as error:
        seen = f"{cert}: {error.strerror or error}"
        raise BadSetting("--tls-cert", "a readable file", seen) from error
