"""Checks secret and TLS files: the engine's own checks, and a handshake with itself.

A certificate, its key and the CA are tried in both roles: a TLS session in memory between the
policy for peers that dial us and the policy for peers that we dial.  That reveals an expired
certificate, one that the CA did not sign, and one that is not valid for servers or for clients.
"""

from __future__ import annotations

import re
import shlex
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdconn.sidechannel.credentials import (
    SecurityError,
    TlsFiles,
    lender_context,
    reader_context,
    secret_of,
)
from pdconn.sidechannel.security import is_loopback
from pdconn.tools.doctor.findings import Finding, fault, of_error, warning

SOON_S = 14 * 86400.0
"""Seconds before a certificate's end from which a warning is given."""

_STEPS = 16
"""Maximum exchanges of a handshake; TLS 1.3 needs two."""


@dataclass(frozen=True, slots=True)
class CredentialFacts:
    """Facts about the files; errors are those with which an engine would end.

    Attributes:
        has_secret, has_tls: whether it is configured and loads.
        errors: reasons why one does not load.
        handshake: the reason why a session with itself failed; None if it did not, or without TLS.
        ends_at: end of the certificate, in seconds since the epoch.
        names: hosts in the certificate.
        cert: path of the certificate.
    """

    has_secret: bool = False
    has_tls: bool = False
    errors: tuple[SecurityError, ...] = ()
    handshake: str | None = None
    ends_at: float | None = None
    names: tuple[str, ...] = ()
    cert: str = ""


def read_credentials(
    secret_file: str | None,
    tls: Mapping[str, str | None],
    environ: Mapping[str, str],
) -> CredentialFacts:
    """Load the files as an engine does.

    Args:
        tls: ``tls_cert``, ``tls_key`` and ``tls_ca``.
    """
    errors: list[SecurityError] = []
    has_secret = False
    try:
        has_secret = secret_of(secret_file, environ) is not None
    except SecurityError as error:
        errors.append(error)
    try:
        files = TlsFiles.from_paths(tls.get("tls_cert"), tls.get("tls_key"), tls.get("tls_ca"))
        if files is None:
            return CredentialFacts(has_secret, errors=tuple(errors))
        lender, reader = lender_context(files), reader_context(files, check_hostname=False)
    except SecurityError as error:
        return CredentialFacts(has_secret, errors=(*errors, error))
    shown, why = _with_ourselves(lender, reader)
    ends = shown.get("notAfter")
    return CredentialFacts(
        has_secret,
        has_tls=True,
        errors=tuple(errors),
        handshake=why,
        ends_at=None if ends is None else ssl.cert_time_to_seconds(ends),
        names=tuple(name for _, name in shown.get("subjectAltName", ())),
        cert=files.cert,
    )


def _with_ourselves(
    lender: ssl.SSLContext, reader: ssl.SSLContext
) -> tuple[dict[str, Any], str | None]:
    """The certificate as a peer would see it, and the reason why a handshake fails."""
    to_lender, to_reader = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        lender.wrap_bio(to_lender, to_reader, server_side=True),
        reader.wrap_bio(to_reader, to_lender),
    ]
    for _ in range(_STEPS):
        waiting = 0
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
            except ssl.SSLCertVerificationError as error:
                return {}, error.verify_message
            except ssl.SSLError as error:
                return {}, error.reason or str(error)
        if not waiting:
            shown: Any = ends[1].getpeercert()
            return dict(shown or {}), None
    return {}, "the handshake did not end"


def seen_credentials(facts: CredentialFacts, now: float) -> str:
    """One line about the protection of the side channel."""
    parts = ["a secret" if facts.has_secret else "no secret"]
    if not facts.has_tls:
        parts.append("no TLS")
    elif facts.ends_at is None:
        parts.append("TLS")
    else:
        days = (facts.ends_at - now) / 86400
        parts.append(f"TLS with a certificate for {', '.join(facts.names)} that ends in {days:.0f}")
        parts[-1] += " days"
    return " and ".join(parts)


def judge_credentials(
    facts: CredentialFacts,
    *,
    listens_at: str | None = None,
    named: str | None = None,
    now: float | None = None,
) -> Iterator[Finding]:
    """Findings about files that an engine, or its peers, would refuse.

    Args:
        listens_at: address of this engine's side channel; None without one.
        named: the host in tickets that peers check; None if unknown, or not checked.
        now: seconds since the epoch.
    """
    for error in facts.errors:
        yield of_error(f"credentials.{error.field.split(',')[0]}", error, _remedy(error))
    if facts.handshake is not None:
        message = f"{facts.cert}: a handshake with itself fails: {facts.handshake}"
        remedy = "issue a certificate of this CA that is valid now, for server and client"
        yield fault("credentials.tls", "tls_cert", message, remedy)
    now = time.time() if now is None else now
    if facts.ends_at is not None and facts.ends_at - now < SOON_S:
        days = (facts.ends_at - now) / 86400
        message = f"{facts.cert}: ends in {days:.1f} days"
        remedy = "renew it and restart the engine: files are read at its start"
        yield warning("credentials.tls-ends", "tls_cert", message, remedy)
    if facts.names and named and not _names(facts.names, named):
        message = (
            f"{facts.cert}: expected {named}, which tickets name, got {', '.join(facts.names)}"
        )
        remedy = f'issue it for {named}, or set "tls_check_hostname": false on decode'
        yield fault("credentials.tls-host", "tls_cert", message, remedy)
    protected = facts.has_secret or facts.has_tls or facts.errors
    if listens_at is not None and not is_loopback(listens_at) and not protected:
        message = f"the side channel at {listens_at} has neither secret nor TLS"
        remedy = (
            "(umask 077; openssl rand -hex 32 > pdconn.secret), copy that file to every engine, "
            'and set "secret_file" to its path; or "insecure": true where the network is ours'
        )
        yield fault("credentials.none", "side channel", message, remedy)


def _names(names: tuple[str, ...], host: str) -> bool:
    """Whether a certificate's names cover a host; ``*`` matches one label."""
    lowered = host.lower()
    parent = lowered.partition(".")[2]
    return any(name.lower() in (lowered, f"*.{parent}") for name in names)


def _remedy(error: SecurityError) -> str:
    seen = str(error.seen)
    opened = re.match(r"mode \d+ of (.+)", seen)
    if opened is not None:
        return f"chmod 600 {shlex.quote(opened[1])}; on Kubernetes defaultMode: 0400"
    if "which is not" in seen:
        return "set tls_key to the key of that certificate"
    return "correct the setting; docs/security.md shows how the files are made"
