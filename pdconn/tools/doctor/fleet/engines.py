"""Queries engines over HTTP, and checks whether they agree."""

from __future__ import annotations

import asyncio
import email.utils
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from pdconn.router.fleet.engine_client import reason_of
from pdconn.router.fleet.member import Member, Role
from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.findings import Finding, fault, one_line, warning
from pdconn.tools.openai.async_client import OK, AsyncClient
from pdconn.tools.openai.served_models import ServedModel, listed_models

CLOCK_DRIFT_S = 5.0
"""Tolerated clock drift in seconds, for certificates, logs and the age of KV events, not leases."""
_DATE_STEP_S = 1.0
"""The resolution of the Date header in seconds."""
_UNTRUSTED = "its certificate is not trusted here"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine of the fleet.

    Attributes:
        url: the engine's name.
        roles: values of :class:`Role`.
        error: the reason why it cannot be reached; then the other fields are empty.
        health: status of ``/health``.
        version: vLLM's version from ``/version``; None if not reported.
        models: from ``/v1/models``, without adapters; refused: the error status instead.
        drift_s: its clock minus ours; None without a Date header.
        metrics: the page of ``/metrics``; empty without one.
    """

    url: str
    roles: frozenset[str]
    error: str | None = None
    health: int = OK
    version: str | None = None
    models: tuple[ServedModel, ...] = ()
    refused: int | None = None
    drift_s: float | None = None
    metrics: str = ""

    @property
    def prefills(self) -> bool:
        """Whether it is a prefill engine."""
        return Role.PREFILL.value in self.roles

    @property
    def decodes(self) -> bool:
        """Whether it is a decode engine."""
        return Role.DECODE.value in self.roles


# --- gathering ----------------------------------------------------------------------------


def trusting(option: str, path: str) -> ssl.SSLContext:
    """A client's TLS context that trusts only the CAs in a file.

    Raises:
        BadQuestion: the file cannot be read or holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise BadQuestion(option, "CA certificates, PEM", f"{path}: {error.reason}") from None
    except OSError as error:
        raise BadQuestion(option, "a file to read", f"{path}: {error.strerror}") from None


def client_session(
    timeout_s: float, api_key: str | None, trusted: ssl.SSLContext | None = None
) -> aiohttp.ClientSession:
    """A session whose requests time out after ``timeout_s`` seconds of silence.

    Args:
        trusted: for https; None for the CAs of this system.
    """
    connector = aiohttp.TCPConnector(ssl=True if trusted is None else trusted)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, connect=timeout_s, sock_read=timeout_s)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, raise_for_status=False
    )


async def read_engines(
    members: Sequence[Member], session: aiohttp.ClientSession
) -> list[EngineFacts]:
    """Query all engines concurrently."""
    return list(await asyncio.gather(*(_engine(member, session) for member in members)))


async def _engine(member: Member, session: aiohttp.ClientSession) -> EngineFacts:
    roles = frozenset(role.value for role in member.roles)
    client = AsyncClient(member.url, session)
    try:
        health = await client.get_page("/health")
        version = await client.get_page("/version")
        models = await client.get_page("/v1/models")
        metrics = await client.get_page("/metrics")
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        return EngineFacts(member.url, roles, one_line(f"{_UNTRUSTED}: {why}"))
    except (aiohttp.ClientError, OSError) as error:
        return EngineFacts(member.url, roles, one_line(reason_of(error)))
    return EngineFacts(
        member.url,
        roles,
        health=health.status,
        version=_version(version.body) if version.status == OK else None,
        models=_models(models.body),
        refused=None if models.status == OK else models.status,
        drift_s=drift_of(health.date, health.asked_s, health.answered_s),
        metrics=metrics.text,
    )


def drift_of(date: str | None, asked: float, answered: float) -> float | None:
    """Minimum lead of a server's clock over ours in seconds; 0 if they may agree.

    The header names a whole second between ``asked`` and ``answered``, by the server's clock.

    >>> drift_of("Thu, 01 Jan 1970 00:01:00 GMT", 60.5, 60.9)
    0.0
    >>> drift_of("Thu, 01 Jan 1970 00:01:30 GMT", 60.0, 61.0)
    29.0
    """
    try:
        theirs_s = email.utils.parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return None
    if theirs_s > answered:
        return theirs_s - answered
    return min(0.0, theirs_s + _DATE_STEP_S - asked)


class _Version(msgspec.Struct):
    version: str | None = None


def _version(page: bytes) -> str | None:
    try:
        return msgspec.json.decode(page, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _models(page: bytes) -> tuple[ServedModel, ...]:
    try:
        return tuple(one for one in listed_models(page) if not one.is_adapter)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


# --- judging ------------------------------------------------------------------------------


def seen_engines(engines: Sequence[EngineFacts]) -> list[str]:
    """One line per engine."""
    lines = []
    for one in engines:
        roles = " and ".join(sorted(one.roles))
        if one.error is not None:
            lines.append(f"{one.url} ({roles}): {one.error}")
            continue
        models = ", ".join(f"{m.name} of {m.max_model_len or '?'} tokens" for m in one.models)
        lines.append(
            f"{one.url} ({roles}): vLLM {one.version or 'unknown'}, {models or 'no model'}"
        )
    return lines


def judge_engines(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Findings about engines that do not answer properly."""
    for one in engines:
        if one.error is not None:
            remedy = "start it, or correct its URL; is its port open to this host?"
            if one.error.startswith(_UNTRUSTED):
                remedy = "give the CA that signed it: --engine-ca FILE; names must be in it, too"
            yield fault("engine.unreachable", one.url, one.error, remedy)
        elif one.health != OK:
            message = f"/health: expected 200, got {one.health}"
            yield fault("engine.unhealthy", one.url, message, "read its log, and restart it")
        elif one.refused is not None:
            message = f"/v1/models: expected 200, got {one.refused}"
            remedy = (
                "write its key into a file and give that: --api-key-file FILE"
                if one.refused in (401, 403)
                else "correct the URL: what answers there is no server of vLLM"
            )
            yield fault("engine.models", one.url, message, remedy)


def judge_agreement(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Findings about engines that do not match each other."""
    up = [one for one in engines if one.error is None and one.refused is None]
    yield from _versions(up)
    yield from _models_agree(up)
    for one in up:
        if one.drift_s is not None and abs(one.drift_s) > CLOCK_DRIFT_S:
            side = "ahead of" if one.drift_s > 0 else "behind"
            message = f"its clock is {abs(one.drift_s):.0f} s {side} ours"
            remedy = "synchronise both hosts (chrony, systemd-timesyncd)"
            yield warning("engine.clock", one.url, message, remedy)


def _versions(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    found = sorted({one.version for one in engines if one.version is not None})
    if len(found) > 1:
        held = "; ".join(
            f"{version} at {', '.join(one.url for one in engines if one.version == version)}"
            for version in found
        )
        message = f"expected one version of vLLM, got {held}"
        remedy = "finish the roll-out: layouts and hashes may differ between versions"
        yield fault("fleet.versions", "vLLM", message, remedy)


def _models_agree(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    prefill, decode = (
        [one for one in engines if one.prefills],
        [one for one in engines if one.decodes],
    )
    theirs = {model.name for one in prefill for model in one.models}
    ours = {model.name for one in decode for model in one.models}
    for name in sorted(theirs | ours if theirs and ours else ()):
        lacking = [one.url for one in engines if name not in {model.name for model in one.models}]
        if lacking and (name not in theirs or name not in ours):
            message = f"{name!r} is served by one role only; not by {', '.join(lacking)}"
            remedy = "serve one model under one name on both (--served-model-name)"
            yield fault("fleet.model", "model", message, remedy)
        yield from _lengths(name, engines)


def _lengths(name: str, engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    lengths = {
        one.url: model.max_model_len
        for one in engines
        for model in one.models
        if model.name == name and model.max_model_len is not None
    }
    if len(set(lengths.values())) > 1:
        held = ", ".join(f"{length} at {url}" for url, length in lengths.items())
        message = f"{name!r}: expected one max_model_len, got {held}"
        remedy = (
            "set --max-model-len alike: a prompt too long for prefill is computed by decode alone, "
            "and one too long for decode is refused"
        )
        yield fault("fleet.max-model-len", "max_model_len", message, remedy)
