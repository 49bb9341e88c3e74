"""What clients write of their sessions: read, checked, and taken out of what engines get."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw
from multidict import CIMultiDict

from pdconn.protocol.keep import (
    MAX_KEEP_S,
    MAX_SESSION,
    KeepOrder,
    SessionKey,
    is_prefetch,
    keep_of,
    with_broken,
)
from pdconn.router.openai import session_orders
from pdconn.router.openai.bodies import decode_body, prefetch_body, prefill_body, release_body
from pdconn.router.openai.requests import ParsedBody, Route, parse_any_body, parse_body
from pdconn.router.openai.session_orders import (
    KeptReport,
    SessionName,
    SessionOrder,
    SessionReports,
    split_reports,
    take_order,
    tenant_of,
)
from pdconn.router.router_errors import BadBody


def body_of(**fields: Any) -> ParsedBody:
    raw = json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
    return parse_body(Route.COMPLETIONS, raw)


def taken(headers: dict[str, str] | None = None, **fields: Any) -> SessionOrder | None:
    return take_order(body_of(**fields), CIMultiDict(headers or {}), None)[1]


AGENT = SessionName("", "agent 7")


@pytest.mark.parametrize(
    ("headers", "fields", "order"),
    [
        ({}, {}, None),
        ({}, {"session_id": None, "keep": None, "release": None}, None),
        ({}, {"session_id": "agent 7"}, SessionOrder(AGENT)),
        ({"x-session-id": "agent 7"}, {}, SessionOrder(AGENT)),
        ({"X-Session-ID": "other"}, {"session_id": "agent 7"}, SessionOrder(AGENT)),
        ({}, {"session_id": "agent 7", "keep": 300}, SessionOrder(AGENT, 300.0)),
        ({"X-Session-Keep": "2.5"}, {"session_id": "agent 7"}, SessionOrder(AGENT, 2.5)),
        ({"X-Session-Keep": "9"}, {"session_id": "agent 7", "keep": 7}, SessionOrder(AGENT, 7.0)),
        ({}, {"session_id": "agent 7", "release": True}, SessionOrder(AGENT, 0.0)),
        ({"X-Session-Release": "true"}, {"session_id": "agent 7"}, SessionOrder(AGENT, 0.0)),
        ({"X-Session-Release": "false"}, {"session_id": "agent 7"}, SessionOrder(AGENT)),
    ],
)
def test_fields_go_before_headers(
    headers: dict[str, str], fields: dict[str, Any], order: SessionOrder | None
) -> None:
    assert taken(headers, **fields) == order


@pytest.mark.parametrize(
    ("headers", "fields", "named"),
    [
        ({}, {"keep": 9}, "session_id"),
        ({}, {"release": True}, "session_id"),
        ({}, {"session_id": ""}, "session_id"),
        ({}, {"session_id": 7}, "session_id"),
        ({}, {"session_id": "s" * 129}, "session_id"),
        ({}, {"session_id": "a\nb"}, "session_id"),
        ({}, {"session_id": ["s"] * 10_000}, "session_id"),
        ({"X-Session-ID": "s" * 129}, {}, "X-Session-ID"),
        ({}, {"session_id": "s", "keep": 0}, "keep"),
        ({}, {"session_id": "s", "keep": -1}, "keep"),
        ({}, {"session_id": "s", "keep": "5m"}, "keep"),
        ({}, {"session_id": "s", "keep": True}, "keep"),
        ({}, {"session_id": "s", "keep": 86_401}, "keep"),
        ({"X-Session-Keep": "nan"}, {"session_id": "s"}, "X-Session-Keep"),
        ({"X-Session-Keep": "soon"}, {"session_id": "s"}, "X-Session-Keep"),
        ({}, {"session_id": "s", "release": 1}, "release"),
        ({}, {"session_id": "s", "release": 0}, "release"),
        ({}, {"session_id": "s", "release": ""}, "release"),
        ({}, {"session_id": "s", "release": []}, "release"),
        ({"X-Session-Release": "yes"}, {"session_id": "s"}, "X-Session-Release"),
        ({}, {"session_id": "s", "keep": 9, "release": True}, "release"),
    ],
)
def test_what_is_no_order_is_refused_by_the_field(
    headers: dict[str, str], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadBody, match=rf"^{named}: expected ") as error:
        taken(headers, **fields)
    assert len(str(error.value)) < 400


def test_the_routers_own_fields_and_headers_are_not_passed_on() -> None:
    headers = CIMultiDict({"X-Session-Keep": "9", "X-Session-ID": "s", "Other": "1"})
    body, order = take_order(body_of(keep=7, release=None, user="u"), headers, None)
    assert order is not None
    assert dict(headers) == {"X-Session-ID": "s", "Other": "1"}
    assert json.loads(body.raw) == {"model": "m", "prompt": "hi", "user": "u"}


def test_a_body_without_them_stays_the_clients_bytes() -> None:
    body = body_of(session_id="s")
    assert take_order(body, CIMultiDict(), None)[0] is body


def test_a_tenant_is_a_key_that_was_checked_or_a_salt_and_neither_is_shown() -> None:
    salted = body_of(cache_salt="a").fields
    tenants = [
        tenant_of(None, {}),
        tenant_of(None, salted),
        tenant_of(None, body_of(cache_salt="b").fields),
        tenant_of("Bearer key", salted),
        tenant_of("Bearer other", salted),
        tenant_of("Bearer a", {}),
    ]
    assert len(set(tenants)) == len(tenants)
    assert tenant_of("Bearer key", {}) == tenant_of("bearer  key", salted)
    assert not any("key" in one for one in tenants)


# What engines get


def keeps(raw: bytes) -> KeepOrder | None:
    """What the connector reads in a body."""
    return keep_of(json.loads(raw)["kv_transfer_params"])


def test_what_the_router_writes_is_what_the_connector_reads() -> None:
    assert (session_orders.MAX_SESSION, session_orders.MAX_KEEP_S) == (MAX_SESSION, MAX_KEEP_S)
    keep = SessionOrder(SessionName("t" * 16, "s" * MAX_SESSION), MAX_KEEP_S).to_params()
    assert keep is not None
    body = body_of()
    expected = KeepOrder(SessionKey("t" * 16, "s" * MAX_SESSION), MAX_KEEP_S)
    ticket = Raw(b'{"do_remote_prefill": true, "big": 1e2, "pdconn": {"version": 2}}')
    for raw in (
        prefill_body(body, keep=keep),
        decode_body(body, None, keep),
        decode_body(body, ticket, keep),
        prefetch_body(body, None, keep),
        release_body(None, keep),
    ):
        assert keeps(raw) == expected
    params = json.loads(decode_body(body, ticket, keep))["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["pdconn"]["version"] == 2
    assert "do_remote_decode" not in json.loads(prefetch_body(body))["kv_transfer_params"]
    assert is_prefetch(json.loads(prefetch_body(body))["kv_transfer_params"])
    assert not is_prefetch(json.loads(prefill_body(body))["kv_transfer_params"])


def test_without_an_order_bodies_are_as_they_were() -> None:
    body = body_of(session_id="s")
    assert SessionOrder(AGENT).to_params() is None
    assert decode_body(body, None, None) == body.raw
    assert keeps(prefill_body(body)) is None


@pytest.mark.parametrize(
    ("ticket", "is_ticket", "kept"),
    [
        (None, False, None),
        (b'{"x": 1}', True, None),
        (b'{"pdconn": {"lend": 9, "held": 4}}', True, None),
        (b'{"pdconn": {"kept": {"tokens": 9}}}', False, KeptReport(9)),
        (
            b'{"pdconn": {"kept": {"rows": true, "rows_broken": "reset", "refused": "share"}}}',
            False,
            KeptReport(0, refused="share", rows=True, rows_broken="reset"),
        ),
        (
            b'{"do_remote_prefill": true, "pdconn": {"kept": {"tokens": 9, "broken": "room"}}}',
            True,
            KeptReport(9, broken="room"),
        ),
        (
            b'{"pdconn": {"kept": {"tokens": 9, "seconds": 30, "rows_seconds": 0.5}}}',
            False,
            KeptReport(9, seconds=30.0, rows_seconds=0.5),
        ),
        (b'{"pdconn": {"kept": {"tokens": 9, "seconds": 1e9}}}', True, None),
        (b'{"pdconn": {"kept": "x"}}', True, None),
        (b"not json", True, None),
    ],
)
def test_what_an_engine_tells_of_a_session_is_no_ticket(
    ticket: bytes | None, is_ticket: bool, kept: KeptReport | None
) -> None:
    given = None if ticket is None else Raw(ticket)
    assert split_reports(given) == (given if is_ticket else None, SessionReports(kept))


@pytest.mark.parametrize("is_ticket", [True, False])
def test_what_an_engine_tells_of_other_sessions_is_no_ticket_either(is_ticket: bool) -> None:
    params = with_broken(None, [(SessionKey("a", "s"), "room")])
    given = Raw(json.dumps({**(params or {}), "do_remote_prefill": is_ticket}).encode())
    ticket, reports = split_reports(given)
    assert (ticket is not None, reports.kept) == (is_ticket, None)
    assert [(one.name, one.why) for one in reports.broken] == [(SessionName("a", "s"), "room")]


@pytest.mark.parametrize(
    ("fields", "route"),
    [
        ({"prompt": [1]}, Route.COMPLETIONS),
        ({"messages": []}, Route.CHAT),
        ({"input": "a"}, Route.RESPONSES),
    ],
)
def test_the_body_of_any_route_is_told_by_its_prompt(fields: dict[str, Any], route: Route) -> None:
    assert parse_any_body(json.dumps(fields).encode()).route is route


def test_a_body_without_a_prompt_is_none_of_a_route() -> None:
    with pytest.raises(BadBody, match="prompt"):
        parse_any_body(b"{}")


@pytest.mark.parametrize(
    ("report", "why", "is_kept"),
    [
        (KeptReport(9), (), True),
        (KeptReport(9, broken="room"), ("room",), True),
        (KeptReport(0, refused="share"), (), False),
        (KeptReport(0, refused="share", rows=True, rows_broken="room"), ("store-room",), True),
        (KeptReport(9, broken="room", rows_broken="reset"), ("room", "store-reset"), True),
    ],
)
def test_a_session_is_told_of_blocks_and_of_rows(
    report: KeptReport, why: tuple[str, ...], is_kept: bool
) -> None:
    assert (report.all_broken, report.is_kept) == (why, is_kept)
