"""Secrets and certificates, from files and the environment, checked when read.

Every error names the setting and the path.  No error shows the content of a file.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from pdconn.protocol.auth import AuthError, Secret
from transport.errors import FieldError

ENV_SECRET = "PDCONN_SECRET"
ENV_SECRET_FILE = "PDCONN_SECRET_FILE"


class SecurityError(FieldError, ValueError):
    """A security setting of the side channel that is wrong or insufficient."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files: our certificate chain, its key, and our peers' CA.

    The certificate must be valid for server and client; the key has no passphrase.
    """

    cert: str
    key: str
    ca: str

    @classmethod
    def from_paths(cls, cert: str | None, key: str | None, ca: str | None) -> TlsFiles | None:
        """All three paths; None if none is given.

        Raises:
            SecurityError: only some are given; names a missing one.
        """
        given = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        missing = [name for name, path in given.items() if path is None]
        if len(missing) == len(given):
            return None
        if cert is None or key is None or ca is None:
            seen = f"only {' and '.join(name for name in given if name not in missing)}"
            raise SecurityError(missing[0], "tls_cert, tls_key and tls_ca together", seen)
        return cls(cert, key, ca)


def load_secret(path: str, field: str = "secret_file") -> Secret:
    """The secret in a file that only its owner may write, and only owner and group may read.

    Raises:
        SecurityError: it cannot be read, has another mode, or is too short.
    """
    try:
        return Secret(read_private(field, path))
    except AuthError as error:
        raise SecurityError(field, f"{error.expected} in {path}", str(error.seen)) from None


def secret_of(path: str | None, environ: Mapping[str, str]) -> Secret | None:
    """The secret from the file at ``path``, or from the environment without one.

    Raises:
        SecurityError: it cannot be loaded, or the environment names two.
    """
    if path is not None:
        return load_secret(path)
    if ENV_SECRET in environ and ENV_SECRET_FILE in environ:
        raise SecurityError(ENV_SECRET, f"it or {ENV_SECRET_FILE}", "both")
    if ENV_SECRET_FILE in environ:
        return load_secret(environ[ENV_SECRET_FILE], ENV_SECRET_FILE)
    if ENV_SECRET not in environ:
        return None
    try:
        return Secret(os.fsencode(environ[ENV_SECRET]))
    except AuthError as error:
        raise SecurityError(ENV_SECRET, str(error.expected), str(error.seen)) from None


def lender_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.3 for the side that listens; it requires a client certificate of our CA.

    Raises:
        SecurityError: a file is missing or wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no session resumption, so nothing follows the handshake
    return _loaded(context, files)


def reader_context(files: TlsFiles, *, check_hostname: bool) -> ssl.SSLContext:
    """TLS 1.3 for the side that dials.

    Raises:
        SecurityError: a file is missing or wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = check_hostname
    return _loaded(context, files)


def _loaded(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    _require_pem("tls_cert", files.cert, _read("tls_cert", files.cert), b"CERTIFICATE")
    _require_pem("tls_key", files.key, read_private("tls_key", files.key), b"PRIVATE KEY")
    _require_pem("tls_ca", files.ca, _read("tls_ca", files.ca), b"CERTIFICATE")

    def passphrase() -> str:
        raise SecurityError("tls_key", "a key without passphrase", files.key)

    try:
        context.load_cert_chain(files.cert, files.key, passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            expected = f"the key of tls_cert {files.cert}"
            raise SecurityError("tls_key", expected, f"{files.key}, which is not") from None
        raise SecurityError("tls_cert, tls_key", "PEM files", _load_error(error, files)) from None
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        seen = f"{files.ca}: {error.reason}"
        raise SecurityError("tls_ca", "certificates in PEM", seen) from None
    return context


def _load_error(error: ssl.SSLError, files: TlsFiles) -> str:
    return f"{files.cert} and {files.key}: {error.reason}"


def _require_pem(field: str, path: str, data: bytes, what: bytes) -> None:
    if what + b"-----" not in data:
        raise SecurityError(field, f"a PEM {what.decode().lower()}", f"none in {path}")


def _read(field: str, path: str) -> bytes:
    return _read_with_mode(field, path)[0]


def read_private(field: str, path: str) -> bytes:
    """The content of a file that only its owner may write, and only owner and group may read.

    Raises:
        SecurityError: naming the setting ``field`` and the path.
    """
    data, mode = _read_with_mode(field, path)
    if mode & stat.S_IROTH:
        expected = "a file that is not world-readable (chmod o-rwx; Kubernetes: defaultMode 0400)"
        raise SecurityError(field, expected, f"mode {mode:04o} of {path}")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        expected = "a file that only its owner can write (chmod go-w; Kubernetes: defaultMode 0400)"
        raise SecurityError(field, expected, f"mode {mode:04o} of {path}")
    return data


def _read_with_mode(field: str, path: str) -> tuple[bytes, int]:
    """Content and permission bits of one open file, so that a rename cannot mix two files."""
    try:
        with open(path, "rb") as file:
            return file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SecurityError(field, "a readable file", f"{path}: {why}") from None
