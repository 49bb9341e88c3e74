"""A client that asks to keep more than is granted is told so, by a proxy and by a picker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from pdconn.router.openai.session_orders import KeptReport, SessionName
from pdconn.router.routing.session_table import SessionTable
from tests.fakes.deployment import Deployment, Reply, deployment
from tests.fakes.event_loop import in_loop, until
from tests.router.picker.gateway import MODES, Filter, behind_envoy
from tests.router.sessions.test_sessions import SESSION, prefetch, telling

RUNNING: Mapping[str, Any] = {
    "proxy": {},
    **{mode: {"running": behind_envoy(Filter(mode))} for mode in MODES},
}
LESS: Mapping[str, tuple[dict[str, Any], str]] = {
    "seconds": ({"tokens": 320, "seconds": 30.0}, "seconds=30"),
    "of rows": ({"tokens": 320, "rows": True, "rows_seconds": 7.5}, "store-seconds=7.5"),
    "size": ({"tokens": 0, "refused": "share"}, "refused=share"),
    "size, rows in part": (
        {"tokens": 0, "refused": "share", "rows": True, "rows_seconds": 9},
        "refused=share, store-seconds=9",
    ),
}


def told(reply: Reply) -> tuple[str | None, str | None]:
    assert reply.status == 200
    return reply.headers.get("X-Session-Kept"), reply.headers.get("X-Session-Cut")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("less", LESS)
@pytest.mark.parametrize("by", RUNNING)
@in_loop
async def test_a_client_is_told_what_it_is_granted_of_more(
    by: str, less: str, is_stream: bool
) -> None:
    report, cut = LESS[less]
    async with deployment(**RUNNING[by]) as made:
        made.prefill[0].script = telling(**report)
        reply = await made.complete(**SESSION, stream=is_stream)
        assert told(reply) == (str(report["tokens"]), cut)
        made.prefill[0].script = telling(tokens=640)
        reply = await made.complete(**SESSION, stream=is_stream)
        assert told(reply) == ("640", None), "what is granted as it was asked is told as ever"


@pytest.mark.parametrize("by", RUNNING)
@in_loop
async def test_a_router_that_knows_no_cut_tells_none(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(KeptReport, "cut", None)
    async with deployment(**RUNNING[by]) as made:
        made.prefill[0].script = telling(tokens=320, seconds=30.0)
        assert told(await made.complete(**SESSION)) == ("320", None)


async def followed(made: Deployment) -> list[tuple[str | None, str | None]]:
    """What turns are told where decode answers before prefill has."""
    await made.complete()  # where prefill lends is learned
    [prefill], [decode] = made.prefill, made.decode
    late = asyncio.Event()
    answering = telling(tokens=320, seconds=30.0)

    async def behind(engine: Any, seen: Any, http: Any) -> Any:
        answer = await answering(engine, seen, http)
        await late.wait()
        return answer

    prefill.script = behind
    first = await made.complete(**SESSION)
    assert decode.seen[-1].stream is not None, "it was followed"
    late.set()
    find = made.proxy.router.sessions.find_session
    name = SessionName("", "agent")
    await until(lambda: (known := find(name)) is not None and known.tokens)
    prefill.script = None
    return [told(first), *[told(await made.complete(session_id="agent")) for _ in range(2)]]


@pytest.mark.parametrize("by", RUNNING)
@in_loop
async def test_where_decode_answers_first_the_next_answer_tells(by: str) -> None:
    async with deployment(**RUNNING[by], streams="on") as made:
        assert await followed(made) == [(None, None), (None, "seconds=30"), (None, None)]


@in_loop
async def test_what_a_prefetch_is_granted_is_told_by_the_next_answer() -> None:
    async with deployment() as made:
        made.prefill[0].script = telling(tokens=320, seconds=30.0)
        await prefetch(made, **SESSION)
        await until(lambda: made.metric("prefetches_total", outcome="done"))
        made.prefill[0].script = None
        assert told(await made.complete(session_id="agent")) == (None, "seconds=30")
        assert told(await made.complete(session_id="agent")) == (None, None)


@in_loop
async def test_a_table_that_remembers_no_cut_leaves_it_untold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    monkeypatch.setattr(SessionTable, "take_cut", lambda self, session: None)
    async with deployment(streams="on") as made:
        assert await followed(made) == [(None, None)] * 3


@in_loop
async def test_a_strange_word_of_an_engine_is_not_told() -> None:
    async with deployment() as made:
        made.prefill[0].script = telling(tokens=0, refused="a\r\nSet-Cookie: b")
        reply = await made.complete(**SESSION)
        assert told(reply) == ("0", "refused=unknown")
        assert "Set-Cookie" not in reply.headers
