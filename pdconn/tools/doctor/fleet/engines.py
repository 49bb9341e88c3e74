"""What engines say of themselves over HTTP, and whether they agree."""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdconn.router.fleet.client import reason_of
from pdconn.router.fleet.member import Member, Role
from pdconn.tools.doctor.errors import BadQuestion
from pdconn.tools.doctor.findings import Finding, fault, one_line, warning

MAX_PAGE_NBYTES = 16 << 20
CLOCK_DRIFT_S = 5.0
"""Leases need no common clock; certificates, logs and the age of KV events do."""
_DATE_STEP_S = 1.0
"""The Date header's resolution."""
_OK = 200
_UNTRUSTED = "its certificate is not trusted here"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of ``/v1/models``; the length is None where the engine does not say."""

    name: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine of the fleet.

    Attributes:
        url: its name.
        roles: words of :class:`Role`.
        error: why it cannot be reached; then nothing else is known.
        health: status of ``/health``.
        version: of vLLM, as ``/version`` says; None where it does not.
        models: of ``/v1/models``, without adapters; refused: the status that came instead.
        drift_s: its clock less ours; None without a Date header.
        metrics: the page of ``/metrics``; empty where there is none.
    """

    url: str
    roles: frozenset[str]
    error: str | None = None
    health: int = _OK
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
    """A client's context that trusts the CAs of a file, and no others.

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
    """A session whose requests end within ``timeout_s`` seconds of silence.

    Args:
        trusted: for https; None: the CAs of this system.
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
    """Ask all engines at once."""
    return list(await asyncio.gather(*(_engine(member, session) for member in members)))


async def _engine(member: Member, session: aiohttp.ClientSession) -> EngineFacts:
    roles = frozenset(role.value for role in member.roles)
    try:
        health = await _get(session, f"{member.url}/health")
        version = await _get(session, f"{member.url}/version")
        models = await _get(session, f"{member.url}/v1/models")
        metrics = await _get(session, f"{member.url}/metrics")
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        return EngineFacts(member.url, roles, one_line(f"{_UNTRUSTED}: {why}"))
    except (aiohttp.ClientError, OSError) as error:
        return EngineFacts(member.url, roles, one_line(reason_of(error)))
    told = _json(version.body).get("version") if version.status == _OK else None
    return EngineFacts(
        member.url,
        roles,
        health=health.status,
        version=told if isinstance(told, str) else None,
        models=_models(_json(models.body)),
        refused=None if models.status == _OK else models.status,
        drift_s=health.drift_s,
        metrics=metrics.body.decode(errors="replace") if metrics.status == _OK else "",
    )


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    body: bytes
    drift_s: float | None


async def _get(session: aiohttp.ClientSession, url: str) -> _Page:
    asked = time.time()
    async with session.get(url, allow_redirects=False) as response:
        answered = time.time()
        body = b""
        async for piece in response.content.iter_chunked(1 << 16):
            body += piece
            if len(body) > MAX_PAGE_NBYTES:
                break
        drift = drift_of(response.headers.get("Date"), asked, answered)
        return _Page(response.status, body, drift)


def drift_of(date: str | None, asked: float, answered: float) -> float | None:
    """How far a server's clock is ahead of ours, at least; 0 where both may agree.

    The header names a whole second between ``asked`` and ``answered``, by the server's clock.

    >>> drift_of("Thu, 01 Jan 1970 00:01:00 GMT", 60.5, 60.9)
    0.0
    >>> drift_of("Thu, 01 Jan 1970 00:01:30 GMT", 60.0, 61.0)
    29.0
    """
    try:
        told = email.utils.parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return None
    if told > answered:
        return told - answered
    return min(0.0, told + _DATE_STEP_S - asked)


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _models(page: Mapping[str, Any]) -> tuple[ServedModel, ...]:
    listed = page.get("data")
    found = []
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and not entry.get("parent"):
            length = entry.get("max_model_len")
            found.append(ServedModel(entry["id"], length if type(length) is int else None))
    return tuple(found)


# --- judging ------------------------------------------------------------------------------


def seen_engines(engines: Sequence[EngineFacts]) -> list[str]:
    """A line for each."""
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
    """Whether each answers."""
    for one in engines:
        if one.error is not None:
            remedy = "start it, or correct its URL; is its port open to this host?"
            if one.error.startswith(_UNTRUSTED):
                remedy = "give the CA that signed it: --engine-ca FILE; names must be in it, too"
            yield fault("engine.unreachable", one.url, one.error, remedy)
        elif one.health != _OK:
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
    """Whether those that answer fit together."""
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
