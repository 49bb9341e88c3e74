"""What a client asks for its session: to keep its KV, to release it, or only its name.  Pure.

By fields of the body, which the ``openai`` package passes in ``extra_body``, or by headers; a field
goes before its header::

    session_id   X-Session-ID       the session's name; vLLM's own field and header
    keep         X-Session-Keep     seconds for which this turn's KV is kept
    release      X-Session-Release  true: nothing is kept of the session after this turn

``keep`` and ``release`` are the router's own; ``session_id`` is passed on, since vLLM knows it.
A session belongs to a tenant: the client's API key where the router checks keys, else the request's
``cache_salt``.  Engines get the tenant as a digest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta, Raw
from multidict import CIMultiDict

from pdconn.router.openai.requests import UNREADABLE, Fields, ParsedBody, is_empty, kind_of
from pdconn.router.router_errors import BadBody
from transport.errors import shown

SESSION_FIELD, SESSION_HEADER = "session_id", "X-Session-ID"
KEEP_FIELD, KEEP_HEADER = "keep", "X-Session-Keep"
RELEASE_FIELD, RELEASE_HEADER = "release", "X-Session-Release"
KEPT_HEADER, BROKEN_HEADER = "X-Session-Kept", "X-Session-Broken"
"""Headers of the answer: tokens that prefill keeps now, and why earlier promises were broken."""
CUT_HEADER = "X-Session-Cut"
"""A header of the answer: what prefill grants, where that is less than was asked.  A dictionary of
RFC 9651, of its own, since clients read ``X-Session-Kept`` as one number."""

OF_STORE = "store-"
"""Prefix of a reason, where it is rows that are not kept any more."""
MAX_SESSION = 128
"""Characters of a session's name."""
MAX_KEEP_S = 86_400.0

_OURS = (KEEP_FIELD, RELEASE_FIELD)


@dataclass(frozen=True, slots=True)
class SessionName:
    """A client's session.

    Attributes:
        tenant: a digest; empty for clients that cannot be told apart.
        name: as the client wrote it.
    """

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """What one request asks for its session.

    Attributes:
        keep_s: seconds to keep this turn; 0 to release the session; None to do neither.
    """

    session: SessionName
    keep_s: float | None = None

    def to_params(self) -> dict[str, object] | None:
        """The value of ``pdconn.keep`` for engines; None if they are asked for nothing."""
        if self.keep_s is None:
            return None
        tenant, name = self.session.tenant, self.session.name
        return {"session": name, "seconds": self.keep_s, "tenant": tenant}


def tenant_of(authorization: str | None, fields: Fields) -> str:
    """A digest of a client's key, else of its ``cache_salt``; empty without both.

    >>> tenant_of(None, {}), len(tenant_of("Bearer key", {}))
    ('', 16)
    """
    salt = fields.get("cache_salt")
    if authorization is not None:
        secret = b"key:" + authorization.partition(" ")[2].strip().encode(errors="replace")
    elif salt is not None and not is_empty(salt):
        secret = b"salt:" + bytes(salt)
    else:
        return ""
    return blake2b(secret, digest_size=8).hexdigest()


def take_order(
    body: ParsedBody, headers: CIMultiDict[str], authorization: str | None
) -> tuple[ParsedBody, SessionOrder | None]:
    """What a request asks for its session, and the body without the router's own fields.

    Args:
        body: the client's.
        headers: for engines; the router's own are removed.
        authorization: of the client, if the router has checked it.

    Raises:
        BadBody: a field or header is invalid, or there is no session to keep.
    """
    keep, release = _last(headers, KEEP_HEADER), _last(headers, RELEASE_HEADER)
    fields = body.fields
    named = fields.keys() & {SESSION_FIELD, *_OURS}
    if not named and keep is None and release is None and SESSION_HEADER not in headers:
        return body, None  # nearly all requests
    order = _order(fields, headers, keep, release, authorization)
    if not fields.keys() & {*_OURS}:
        return body, order
    left = {name: value for name, value in fields.items() if name not in _OURS}
    return replace(body, raw=msgspec.json.encode(left), fields=left), order


def _order(
    fields: Fields,
    headers: CIMultiDict[str],
    keep: str | None,
    release: str | None,
    authorization: str | None,
) -> SessionOrder | None:
    name = session_name(fields, headers.get(SESSION_HEADER))
    keep_s = _seconds(fields, keep)
    if _is_released(fields, release):
        if keep_s:
            raise BadBody(RELEASE_FIELD, f"no {KEEP_FIELD} beside it", f"{KEEP_FIELD}: {keep_s:g}")
        keep_s = 0.0
    if name is None:
        if keep_s is not None:
            raise BadBody(SESSION_FIELD, f"a name beside {KEEP_FIELD} and {RELEASE_FIELD}", None)
        return None
    return SessionOrder(SessionName(tenant_of(authorization, fields), name), keep_s)


def session_name(fields: Mapping[str, Raw], header: str | None) -> str | None:
    """The session's name; None without one.

    Raises:
        BadBody: it is no text of 1 to ``MAX_SESSION`` printable characters.
    """
    given: object = header
    field, value = SESSION_HEADER, fields.get(SESSION_FIELD)
    if value is not None and kind_of(value) != "null":
        field, given = SESSION_FIELD, _decoded(value)
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= MAX_SESSION or not given.isprintable():
        raise BadBody(field, f"1 to {MAX_SESSION} printable characters", shown(given, MAX_SESSION))
    return given


def _seconds(fields: Fields, header: str | None) -> float | None:
    """Seconds to keep; None if nothing is asked."""
    given: object = header
    field, value = KEEP_HEADER, fields.get(KEEP_FIELD)
    if value is not None:
        field, given = KEEP_FIELD, _decoded(value)
    elif header is not None:
        try:
            given = float(header)
        except ValueError:
            given = header
    if given is None:
        return None
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if isinstance(given, (int, float)) and is_number and 0 < given <= MAX_KEEP_S:  # not for NaN
        return float(given)
    raise BadBody(field, f"seconds above 0 and up to {MAX_KEEP_S:g}", shown(given))


def _is_released(fields: Fields, header: str | None) -> bool:
    given: object = {"true": True, "false": False, None: False}.get(header, header)
    field, value = RELEASE_HEADER, fields.get(RELEASE_FIELD)
    if value is not None:
        given = _decoded(value)
        field, given = RELEASE_FIELD, False if given is None else given
    if not isinstance(given, bool):
        raise BadBody(field, "true or false", shown(given))
    return given


def _decoded(value: Raw) -> object:
    """A small JSON value; a long one is shown by its kind."""
    if len(memoryview(value)) > 8 * MAX_SESSION:
        return [kind_of(value)]
    try:
        return msgspec.json.decode(value)
    except UNREADABLE:
        return [kind_of(value)]


def _last(headers: CIMultiDict[str], name: str) -> str | None:
    given: list[str] = headers.popall(name, [])
    return given[-1] if given else None


class KeptReport(msgspec.Struct):
    """What an engine's answer tells of a session.

    Attributes:
        tokens: that are kept now.
        used: this turn has come back to what was kept for it.
        broken: why an earlier promise was broken.
        refused: why nothing is kept.
        rows: the engine's store keeps the turn's rows as well.
        rows_broken: why an earlier promise to keep rows was broken.
        seconds, rows_seconds: for which blocks and rows are kept, if for less than was asked.
    """

    tokens: int = 0
    used: bool = False
    broken: str | None = None
    refused: str | None = None
    rows: bool = False
    rows_broken: str | None = None
    seconds: Annotated[float, Meta(ge=0, le=MAX_KEEP_S)] | None = None
    rows_seconds: Annotated[float, Meta(ge=0, le=MAX_KEEP_S)] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether anything is kept now."""
        return self.refused is None or self.rows

    @property
    def all_broken(self) -> tuple[str, ...]:
        """Why promises were broken, those of rows with a prefix."""
        rows = None if self.rows_broken is None else f"{OF_STORE}{self.rows_broken}"
        return tuple(why for why in (self.broken, rows) if why is not None)

    @property
    def cut(self) -> str | None:
        """What is granted, as ``X-Session-Cut`` tells it; None if it is all that was asked.

        >>> KeptReport(320, seconds=60.0).cut
        'seconds=60'
        >>> KeptReport(0, refused="share", rows=True, rows_seconds=0.5).cut
        'refused=share, store-seconds=0.5'
        """
        seconds = {"seconds": self.seconds, f"{OF_STORE}seconds": self.rows_seconds}
        cut = [f"{name}={round(s, 3):.12g}" for name, s in seconds.items() if s is not None]
        if self.refused is not None:
            # An engine's word, of which a header takes no more than a token.
            is_token = re.fullmatch("[a-z][a-z_-]{0,39}", self.refused)
            cut.insert(0, f"refused={self.refused if is_token else 'unknown'}")
        return ", ".join(cut) or None


class BrokenReport(msgspec.Struct):
    """What an engine's answer to any request tells of a session, whose promise was broken."""

    session: str
    why: str
    tenant: str = ""

    @property
    def name(self) -> SessionName:
        """The session."""
        return SessionName(self.tenant, self.session)


class SessionReports(msgspec.Struct):
    """What an engine's answer tells of sessions: of the request's own, and of others."""

    kept: KeptReport | None = None
    broken: list[BrokenReport] = []


class _OfTicket(msgspec.Struct):
    do_remote_prefill: bool = False
    pdconn: SessionReports | None = None


def split_reports(ticket: Raw | None) -> tuple[Raw | None, SessionReports]:
    """An answer's ``kv_transfer_params`` as a ticket, and what they tell of sessions.

    >>> split_reports(Raw(b'{"pdconn": {"kept": {"session": "s", "tokens": 9}}}'))[1].kept.tokens
    9
    """
    if ticket is None:
        return None, SessionReports()
    try:
        found = msgspec.json.decode(ticket, type=_OfTicket)
    except UNREADABLE:
        return ticket, SessionReports()
    reports = found.pdconn or SessionReports()
    has_none = reports.kept is None and not reports.broken
    return (ticket if has_none or found.do_remote_prefill else None), reports
