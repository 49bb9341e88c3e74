"""Each outcome, and each reason for decode alone, as a client causes it; none is left out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdconn.router.labels import RequestEnd
from pdconn.router.metric_table import METRICS
from pdconn.router.openai.requests import Direct
from pdconn.router.router_server import Limits
from tests.fakes.deployment import Deployment, deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import FakeEngine, Script, die_in_stream, error, hang, reset, stream_of
from tests.fakes.routed import PROMPT, fleet

Scene = Callable[[Deployment], Awaitable[object]]


def settings(**options: Any) -> Callable[[Scene], Scene]:
    """Options of the router of a scene."""

    def note(scene: Scene) -> Scene:
        scene.options = options  # type: ignore[attr-defined]
        return scene

    return note


async def ok(d: Deployment) -> None:
    assert (await d.complete(stream=True)).status == 200


async def refused(d: Deployment) -> None:
    assert (await d.complete(prompt=None)).status == 400


async def client_error(d: Deployment) -> None:
    d.decode[0].script = answering(400)
    assert (await d.complete(temperature=-1)).status == 400


async def client_left(d: Deployment) -> None:
    d.decode[0].script = hang
    writer = await d.open()
    await until(lambda: d.decode[0].seen)
    await leave(writer)


async def engine_error(d: Deployment) -> None:
    d.decode[0].script = stream_of({"error": {"message": "x", "code": 500}})
    assert (await d.complete(stream=True)).status == 200


async def broken_stream(d: Deployment) -> None:
    d.decode[0].script = die_in_stream
    with contextlib.suppress(aiohttp.ClientError):
        await d.complete(stream=True)


async def no_engine(d: Deployment) -> None:
    await d.decode[0].stop()
    assert (await d.complete()).status == 503


@settings(require_prefill=True)
async def no_handover(d: Deployment) -> None:
    d.prefill[0].lends = False
    assert (await d.complete()).status == 503


@settings(request_timeout_s=0.1)
async def timed_out(d: Deployment) -> None:
    d.decode[0].script = hang
    assert (await d.complete()).status == 504


@settings(max_requests=1)
async def busy(d: Deployment) -> None:
    d.decode[0].script = hang
    writer = await d.open()
    await until(lambda: d.decode[0].seen)
    assert (await d.complete()).status == 503
    await leave(writer)


@settings(drain_timeout_s=0.05)
async def cut_off(d: Deployment) -> object:
    """What this returns ends with the router."""
    d.decode[0].script = hang
    asking = asyncio.create_task(d.complete())
    await until(lambda: d.decode[0].seen)
    return asking


ENDS: dict[RequestEnd, Scene] = {
    RequestEnd.OK: ok,
    RequestEnd.REFUSED: refused,
    RequestEnd.CLIENT_ERROR: client_error,
    RequestEnd.CLIENT_LEFT: client_left,
    RequestEnd.ENGINE_ERROR: engine_error,
    RequestEnd.BROKEN_STREAM: broken_stream,
    RequestEnd.NO_ENGINE: no_engine,
    RequestEnd.NO_HANDOVER: no_handover,
    RequestEnd.TIMED_OUT: timed_out,
    RequestEnd.BUSY: busy,
    RequestEnd.CUT_OFF: cut_off,
}


def answering(status: int) -> Script:
    async def answer(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        return error(status, "no")

    return answer


#: How requests end at gateways alone: tests/router/picker.
AT_GATEWAYS = {RequestEnd.UNSEEN, RequestEnd.GATEWAY_ERROR}


@pytest.mark.parametrize("end", sorted(set(RequestEnd) - AT_GATEWAYS, key=lambda end: end.value))
@in_loop
async def test_a_request_that_ends_so_is_counted_so(end: RequestEnd) -> None:
    scene = ENDS[end]
    limits = Limits(patience_s=0.1, first_backoff_s=60.0, last_returns_s=0.2)
    left: object = None
    async with deployment(limits=limits, **getattr(scene, "options", {})) as d:
        left = await scene(d)
        if left is None:
            await until(lambda: d.outcome(end.value))
    if isinstance(left, asyncio.Task):
        await asyncio.gather(left, return_exceptions=True)
    counted = {one: d.outcome(one.value) for one in RequestEnd}
    others = {one for one, number in counted.items() if number} - {end}
    assert counted[end] == 1
    assert others <= ({RequestEnd.CLIENT_LEFT} if end is RequestEnd.BUSY else set())


# --- reasons for decode alone -------------------------------------------------------------------

BODIES: dict[Direct, tuple[str, dict[str, Any]]] = {
    Direct.SEVERAL_PROMPTS: ("/v1/completions", {"prompt": ["a", "b"]}),
    Direct.SEVERAL_CHOICES: ("/v1/completions", {"n": 2}),
    Direct.BEAM_SEARCH: ("/v1/completions", {"use_beam_search": True}),
    Direct.PROMPT_LOGPROBS: ("/v1/completions", {"echo": True}),
    Direct.PROMPT_EMBEDS: ("/v1/completions", {"prompt_embeds": "x"}),
    Direct.TRUNCATED_PROMPT: ("/v1/completions", {"truncate_prompt_tokens": 5}),
    Direct.STORED_RESPONSE: ("/v1/responses", {"previous_response_id": "resp_1"}),
    Direct.SERVER_TOOLS: ("/v1/responses", {"tools": [{"type": "web_search_preview"}]}),
}


@contextlib.asynccontextmanager
async def sent_as(reason: Direct) -> AsyncIterator[Deployment]:
    """A fleet of which decode served one request alone, for this reason."""
    if reason is Direct.PREFIX_HELD:
        async with fleet(alone_below=64) as f:
            await f.pod(f.decode[0]).store(PROMPT)
            await f.events_applied()
            await f.ask([*PROMPT, *range(64)])
            yield f
        return
    limits = Limits(first_backoff_s=60.0, last_returns_s=0.2)
    timeout_s = 0.05 if reason is Direct.NO_PREFILL_IN_TIME else None
    async with deployment(num_decode=2, limits=limits, prefill_timeout_s=timeout_s) as d:
        if reason is Direct.NO_TICKET:
            d.prefill[0].lends = False
        elif reason is Direct.NO_PREFILL:
            await d.prefill[0].stop()
        elif reason is Direct.NO_PREFILL_IN_TIME:
            d.prefill[0].script = hang
        elif reason is Direct.PREFILL_ERROR:
            d.prefill[0].script = answering(503)
        elif reason is Direct.PREFILL_TOO_SHORT:
            d.prefill[0].models = [{"id": "m", "max_model_len": 16}]
            for engine in d.decode:
                engine.models = [{"id": "m", "max_model_len": 64}]
            d.prefill[0].script = answering(400)
        elif reason is Direct.TICKET_SPENT:
            d.decode[0].script = reset
        path, body = BODIES.get(reason, ("/v1/completions", {}))
        assert (await d.complete(path, **body)).status == 200
        yield d


@pytest.mark.parametrize("reason", Direct, ids=lambda reason: reason.value)
@in_loop
async def test_a_request_that_decode_serves_alone_is_counted_by_its_reason(reason: Direct) -> None:
    async with sent_as(reason) as d:
        counted = {one: d.metric("direct_requests_total", reason=one.value) for one in Direct}
        assert counted == {one: float(one is reason) for one in Direct}
        assert d.metric("handed_over_requests_total") == 0


@in_loop
async def test_an_answer_that_decode_refuses_is_neither_handed_over_nor_served_alone() -> None:
    async with deployment() as d:
        d.decode[0].script = answering(500)
        for body in ({}, {"n": 2}):
            assert (await d.complete(**body)).status == 500
        assert d.metric("handed_over_requests_total") == 0
        assert d.metric("direct_requests_total", reason="several_choices") == 0


# --- the others ---------------------------------------------------------------------------------


def unseen(text: str) -> list[str]:
    """Values of labels that no test of ``text`` names."""
    return [
        f"{values.__name__}.{one.name}"
        for row in METRICS
        for values in row.values.values()
        for one in values
        if f"{values.__name__}.{one.name}" not in text
        and not re.search(rf'{"|".join(row.labels)}="{one.value}"', text)
    ]


def test_every_value_of_a_label_is_run_by_some_test() -> None:
    texts = {path: path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert unseen("".join(texts.values())) == []
    assert "Dropped.IDLE" in unseen(texts[Path(__file__)].replace("Dropped.IDLE", ""))


# --- clients that leave with everything in their hands --------------------------------------------


def late_end(engine: FakeEngine) -> Script:
    """The connection's end comes long after the stream's: vLLM ends both, and they race."""

    async def script(_: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        if "chat" in seen.path:
            token: dict[str, Any] = {"delta": {"content": "t"}}
        else:
            token = {"text": "t"}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        chunk = {"id": "x", "object": "o", "created": 1, "model": "m",
                 "choices": [{"index": 0, "finish_reason": None, **token}]}  # fmt: skip
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        with contextlib.suppress(ConnectionError):
            await asyncio.sleep(1.0)
        return response

    return script


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@in_loop
async def test_a_stream_that_the_openai_package_received_whole_is_ok(route: str) -> None:
    """It closes its connection 0.1 s after ``[DONE]``, whatever the server does."""
    openai = pytest.importorskip("openai")
    async with deployment() as d:
        d.decode[0].script = late_end(d.decode[0])
        async with openai.AsyncOpenAI(base_url=d.proxy.url + "/v1", api_key="x") as client:
            if "chat" in route:
                message: Any = {"role": "user", "content": "hi"}
                stream = await client.chat.completions.create(
                    model="m", messages=[message], stream=True
                )
            else:
                stream = await client.completions.create(model="m", prompt="hi", stream=True)
            assert len([chunk async for chunk in stream]) == 1
        await until(lambda: sum(d.outcome(one.value, route) for one in RequestEnd))
        assert d.outcome("ok", route) == 1
        assert d.metric("request_seconds_count", route=route) == 1


@pytest.mark.parametrize("num_read", [1, 2])
@in_loop
async def test_one_that_leaves_before_the_end_has_left(num_read: int) -> None:
    """Negative control: ``num_read`` events of two, of which the second is the end."""
    async with deployment() as d:
        d.decode[0].script = late_end(d.decode[0])
        body = {"model": "m", "prompt": "hi", "stream": True}
        if num_read == 1:
            d.decode[0].script = stream_of({"choices": [{"text": "a"}]}, pause_s=1.0)
        async with d.client.post(d.url("/v1/completions"), json=body) as reply:
            await reply.content.readuntil(b"\n\n")
            if num_read == 2:
                assert await reply.content.readuntil(b"\n\n") == b"data: [DONE]\n\n"
            reply.close()
        await until(lambda: sum(d.outcome(one.value) for one in RequestEnd))
        assert d.outcome("ok" if num_read == 2 else "client_left") == 1


@in_loop
async def test_one_that_leaves_with_the_whole_of_a_body_has_it() -> None:
    """A body of a known length whose connection the engine keeps open, as in two packets."""

    async def in_two(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        head = {"Content-Type": "application/json", "Content-Length": "12"}
        response = web.StreamResponse(headers=head)
        await response.prepare(http)
        await response.write(b'{"choices"')
        await asyncio.sleep(0.05)
        await response.write(b":1")
        return response

    async with deployment() as d:
        d.decode[0].script = in_two
        body = {"model": "m", "prompt": "hi"}
        async with d.client.post(d.url("/v1/completions"), json=body) as reply:
            assert await reply.content.readexactly(12)
            reply.close()
        await until(lambda: sum(d.outcome(one.value) for one in RequestEnd))
        assert d.outcome("ok") == 1
