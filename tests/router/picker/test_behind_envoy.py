"""A picker behind a real Envoy does with requests what the proxy does with them.

Engines get the same bodies and headers, clients the same answers and refusals; what differs is
where answers pass.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from pdconn.router.picker.exchange import Exchange
from pdconn.router.router_limits import Limits
from tests.fakes.deployment import Deployment, deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, CHUNKS, MODEL, FakeEngine
from tests.router.picker.gateway import (
    BUFFERED,
    MODES,
    PIECES,
    Filter,
    behind_envoy,
    config_over,
    running_gateway,
)

PATH = "/v1/completions"
#: Headers of the gateway itself; a body in pieces has no length.
GATEWAYS = (
    "content-length",
    "host",
    "transfer-encoding",
    "user-agent",
    "x-envoy",
    "x-forwarded-proto",
    "x-gateway",
    "x-request-id",
)

BODIES: Mapping[str, tuple[str, Any]] = {
    "completion": (PATH, {"model": MODEL, "prompt": "hi", "max_tokens": 7}),
    "chat": ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user"}]}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "é"}),
    "messages": ("/v1/messages", {"model": MODEL, "messages": [{"role": "user"}]}),
    "several": (PATH, {"model": MODEL, "prompt": ["a", "b"]}),
    "session": (PATH, {"model": MODEL, "prompt": "hi", "session_id": "s", "keep": 9}),
    "passed": ("/v1/embeddings", {"model": MODEL, "input": "hi"}),
    "long": (PATH, {"model": MODEL, "prompt": "x" * 300_000}),
}
REFUSED: Mapping[str, tuple[str, str, bytes]] = {
    "no JSON": ("POST", PATH, b"{"),
    "no prompt": ("POST", PATH, b'{"model": "m"}'),
    "memory": ("POST", PATH, b'{"prompt": "x", "kv_transfer_params": {"remote_host": "a"}}'),
    "path": ("POST", "/sleep", b"{}"),
    "escaped path": ("POST", "/v1/../sleep", b"{}"),
    "method": ("GET", PATH, b""),
    "too long": ("POST", PATH, b'{"prompt": "' + b"x" * (2 << 20) + b'"}'),
    "a response nobody keeps": ("GET", "/v1/responses/abc", b""),
    "no model": ("GET", "/v1/models/nope", b""),
}


def seen_by(engine: FakeEngine) -> list[tuple[str, dict[str, str], Any]]:
    """What an engine got, without what a gateway adds."""
    return [
        (
            seen.path,
            {
                name.lower(): value
                for name, value in seen.headers.items()
                if not name.lower().startswith(GATEWAYS)
            },
            json.loads(seen.raw) if seen.raw else None,
        )
        for seen in (*engine.seen, *engine.others)
    ]


async def exchanged(d: Deployment, path: str, body: Any) -> tuple[Any, ...]:
    """An answer, and what the engines got for it."""
    headers = {"Authorization": "Bearer k", "X-Custom": "1", "X-data-parallel-rank": "3"}
    async with d.client.post(d.url(path), json=body, headers=headers) as response:
        answer = response.status, await response.read()
    return answer, [seen_by(engine) for engine in (*d.prefill, *d.decode)]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_engines_get_what_the_proxy_sends_them(mode: str, name: str) -> None:
    path, body = BODIES[name]
    async with deployment() as by_proxy:
        wanted = await exchanged(by_proxy, path, body)
    async with deployment(running=behind_envoy(Filter(mode))) as by_picker:
        assert await exchanged(by_picker, path, body) == wanted
    assert any(wanted[1])


@in_loop
async def test_a_header_that_is_not_taken_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr("pdconn.router.picker.messages._change", lambda mutation, old, new: None)
    path, body = BODIES["completion"]
    async with deployment() as by_proxy:
        wanted = await exchanged(by_proxy, path, body)
    async with deployment(running=behind_envoy(Filter())) as by_picker:
        assert await exchanged(by_picker, path, body) != wanted


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_clients_get_the_refusals_of_the_proxy(mode: str) -> None:
    async with (
        deployment(max_body_mib=1) as by_proxy,
        deployment(max_body_mib=1, running=behind_envoy(Filter(mode))) as by_picker,
    ):
        for name, (method, path, raw) in REFUSED.items():
            wanted = await by_proxy.send(path, io.BytesIO(raw), method)
            got = await by_picker.send(path, io.BytesIO(raw), method)
            assert (name, got.status, got.body) == (name, wanted.status, wanted.body)
            assert got.headers["Content-Type"] == wanted.headers["Content-Type"]
        assert not any(engine.seen for engine in (*by_picker.prefill, *by_picker.decode))


@pytest.mark.parametrize("shape", [Filter(BUFFERED), Filter(PIECES), Filter(PIECES, echoes=True)])
@in_loop
async def test_a_stream_arrives_whole_and_is_counted(shape: Filter) -> None:
    async with deployment(running=behind_envoy(shape)) as d:
        reply = await d.complete(stream=True)
        assert (reply.status, reply.body) == (200, b"".join(CHUNKS))
        assert reply.headers["X-Pdconn-Engine"] == d.decode[0].url
        assert d.decode[0].seen[0].params["do_remote_prefill"]
        await until(lambda: d.outcome("ok") == 1)
        assert not len(d.proxy.router.loads.inflight)


@in_loop
async def test_no_byte_of_an_answer_passes_the_picker(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    go_on = Exchange.go_on

    async def noting(self: Exchange, message: Any, headers: Mapping[str, str]) -> bool:
        kinds.append(message.WhichOneof("request"))
        return await go_on(self, message, headers)

    monkeypatch.setattr(Exchange, "go_on", noting)
    async with deployment(running=behind_envoy(Filter())) as d:
        await d.complete(stream=True)
        assert kinds == ["response_headers"]
    kinds.clear()
    async with deployment(running=behind_envoy(Filter(PIECES, echoes=True))) as d:
        await d.complete(stream=True)
        assert kinds.count("response_body") > 0  # the control


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_client_that_leaves_while_prefill_computes_leaves_nothing_lent(mode: str) -> None:
    limits = Limits(patience_s=0.2)
    async with deployment(running=behind_envoy(Filter(mode)), limits=limits) as d:
        d.prefill[0].computes.clear()
        writer = await d.open()
        await until(lambda: len(d.prefill[0].seen) == 1)
        await leave(writer)
        await until(lambda: d.outcome("client_left") == 1)
        d.prefill[0].computes.set()
        await until(lambda: not len(d.proxy.router.loads.inflight) and not d.leases.held)
        assert not any(seen.params.get("do_remote_prefill") for seen in d.decode[0].seen[:-1])


@in_loop
async def test_a_client_that_leaves_before_decode_answers_has_its_ticket_returned() -> None:
    stands = asyncio.Event()

    async def stand(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        if seen.body["model"] == MODEL:
            await stands.wait()
        return web.json_response({}, status=404)

    async with deployment(running=behind_envoy(Filter())) as d:
        await d.complete()  # the gateway reports answers
        d.decode[0].script = stand
        writer = await d.open()
        await until(lambda: len(d.decode[0].seen) == 2)
        await leave(writer)
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        stands.set()
        assert d.outcome("client_left") == 1


@in_loop
async def test_a_client_that_leaves_a_stream_ends_it_at_decode() -> None:
    left = asyncio.Event()

    async def slow(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        try:
            while True:
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.02)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
            raise

    async with deployment(running=behind_envoy(Filter())) as d:
        d.decode[0].script = slow
        writer = await d.open(stream=True)
        await until(lambda: d.proxy.router.decisions.newest() is not None and d.decode[0].seen)
        await asyncio.sleep(0.1)
        await leave(writer)
        async with asyncio.timeout(10):
            await left.wait()
        await until(lambda: not len(d.proxy.router.loads.inflight))


@in_loop
async def test_decode_computes_where_no_prefill_is_up() -> None:
    async with deployment(running=behind_envoy(Filter())) as d:
        await d.prefill[0].stop()
        reply = await d.complete()
        assert (reply.status, reply.body) == (200, ANSWER)
        assert d.decode[0].seen[0].params == {}


@in_loop
async def test_a_decode_engine_that_cannot_be_reached_is_followed_by_the_next_with_the_ticket() -> (
    None
):
    """No engine has seen the ticket."""
    async with deployment(num_decode=2, running=behind_envoy(Filter())) as d:
        await d.complete()  # its turn is over
        await d.decode[1].stop()
        reply = await d.complete()
        assert (reply.status, reply.body) == (200, ANSWER)
        assert reply.headers["X-Pdconn-Engine"] == d.decode[0].url
        assert d.decode[0].seen[-1].params["do_remote_prefill"]


@in_loop
async def test_a_ticket_that_an_engine_may_have_used_goes_to_no_other() -> None:
    async def fail(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": 500}}, status=500)

    async with deployment(num_decode=2, running=behind_envoy(Filter())) as d:
        for engine in d.decode:
            engine.script = fail
        assert (await d.complete()).status == 500
        tickets = [
            seen for engine in d.decode for seen in engine.seen if seen.body["model"] == MODEL
        ]
        assert len(tickets) == 1
        await until(lambda: d.metric("unused_tickets_total", outcome="refused") == 1)


@in_loop
async def test_a_response_is_asked_of_the_engine_that_keeps_it() -> None:
    async with deployment(num_decode=2, running=behind_envoy(Filter())) as d:
        keeper = d.decode[1]
        keeper.other = lambda seen: web.json_response({"id": "r1", "by": keeper.port})
        for _ in range(3):
            reply = await d.send("/v1/responses/r1", method="GET")
            assert json.loads(reply.body)["by"] == keeper.port
            before = len(keeper.seen)
            body = {"input": "x", "previous_response_id": "r1"}
            assert (await d.complete("/v1/responses", **body)).status == 200
            assert len(keeper.seen) == before + 1


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_decode_is_asked_before_prefill_has_answered(mode: str) -> None:
    """Early tickets: both legs at once."""
    running = behind_envoy(Filter(mode))
    async with deployment(running=running, streams="on") as d:
        await d.complete()  # where prefill lends is learned
        d.prefill[0].computes.clear()
        asked = asyncio.create_task(d.complete())
        await until(lambda: len(d.decode[0].seen) == 2)
        assert d.decode[0].seen[1].stream is not None
        assert not asked.done()
        d.prefill[0].computes.set()
        assert (await asked).status == 200
        await until(lambda: not len(d.proxy.router.loads.inflight))
        assert not d.leases.held


@in_loop
async def test_a_client_that_leaves_both_legs_ends_both() -> None:
    limits = Limits(patience_s=0.2)
    async with deployment(running=behind_envoy(Filter()), streams="on", limits=limits) as d:
        await d.complete()
        d.prefill[0].computes.clear()
        writer = await d.open()
        await until(lambda: len(d.decode[0].seen) == 2)
        await leave(writer)
        await until(lambda: not len(d.proxy.router.loads.inflight))
        await until(lambda: d.prefill[0].aborted)
        d.prefill[0].computes.set()
        assert not d.leases.held


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_bodies_of_64_mib_pass(mode: str) -> None:
    body = {"model": MODEL, "prompt": "x" * ((64 << 20) - 100)}
    async with deployment(running=behind_envoy(Filter(mode))) as d:
        raw = json.dumps(body).encode()
        reply = await d.send(PATH, io.BytesIO(raw))
        assert (reply.status, reply.body) == (200, ANSWER)
        assert len(d.decode[0].seen[0].raw) > len(raw)  # with its ticket


@in_loop
async def test_a_burst_of_requests_on_a_new_connection_is_served() -> None:
    """Envoy begins all of their calls before it has read how many a connection takes."""
    path, body = BODIES["completion"]
    async with (
        deployment(running=behind_envoy(Filter()), max_requests=1000) as d,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):

        async def ask() -> int:
            async with client.post(d.url(path), json=body) as response:
                return response.status

        assert await asyncio.gather(*(ask() for _ in range(600))) == 600 * [200]


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_slow_clients_do_not_keep_others_waiting(mode: str) -> None:
    async with deployment(running=behind_envoy(Filter(mode)), max_requests=1000) as d:
        port = int(d.proxy.url.rpartition(":")[2])
        writers = []
        for _ in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"
            )
            writers.append(writer)
        for _ in range(20):
            assert (await d.complete()).status == 200
        for writer in writers:
            await leave(writer)
        await until(lambda: d.metric("inflight_requests") == 0)


@in_loop
async def test_another_mode_is_refused_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with deployment(running=behind_envoy(Filter("STREAMED"))) as d:
        reply = await d.complete()
        assert reply.status == 500
        assert "request_body_mode" in reply.error["message"]
        assert "request_body_mode" in caplog.text
        assert not d.prefill[0].seen


@in_loop
async def test_answers_that_have_begun_go_on_without_the_picker() -> None:
    goes_on = asyncio.Event()

    async def slow(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"data: 1\n\n")
        await goes_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with deployment() as d:
        d.decode[0].script = slow
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with running_gateway(config_over(d), Filter()) as gateway:
            response = await d.client.post(gateway.url + PATH, json=body)
            assert await response.content.readany() == b"data: 1\n\n"
            await gateway.stop_picker()
            goes_on.set()
            assert await response.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_request_without_a_body_is_answered_and_counted(mode: str) -> None:
    path = "/v1/responses/r1/cancel"
    async with deployment(num_decode=2, running=behind_envoy(Filter(mode))) as d:
        for engine in d.decode:
            engine.other = lambda seen: web.json_response({"id": "r1"})
        reply = await d.send(path)
        assert (reply.status, json.loads(reply.body)) == (200, {"id": "r1"})
        assert reply.headers["X-Pdconn-Engine"] in [engine.url for engine in d.decode]
        route = "/v1/responses/{id}/cancel"
        await until(lambda: d.outcome("ok", route) == 1)


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_the_body_of_a_get_goes_to_no_engine(mode: str) -> None:
    async with deployment(running=behind_envoy(Filter(mode))) as d:
        d.decode[0].other = lambda seen: web.json_response({"id": "r1"})
        reply = await d.send("/v1/responses/r1", b"{}", method="GET")
        assert (reply.status, json.loads(reply.body)) == (200, {"id": "r1"})
        assert [seen.raw for seen in d.decode[0].others if seen.path == "/v1/responses/r1"] == [
            b"",
            b"",
        ]
        await until(lambda: d.outcome("ok", "/v1/responses/{id}") == 1)


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_client_that_leaves_in_its_body_is_counted_as_such(mode: str) -> None:
    async with deployment(running=behind_envoy(Filter(mode))) as d:
        port = int(d.proxy.url.rpartition(":")[2])
        for number in range(1, 6):  # the gateway ends its call in one of two ways
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"
            )
            await until(lambda: d.metric("inflight_requests") == 1)
            await leave(writer)
            await until(lambda: d.metric("inflight_requests") == 0)
            assert d.outcome("client_left") == number


@pytest.mark.parametrize("path", ["/v1%2Fresponses/abc", "/v1/responses/a%2fb", "/v1%2fmodels/m"])
@in_loop
async def test_an_escaped_slash_separates_no_parts_of_a_path(path: str) -> None:
    async with (
        deployment() as by_proxy,
        deployment(running=behind_envoy(Filter())) as by_picker,
    ):
        for d in (by_proxy, by_picker):
            async with d.client.get(URL(d.url(path), encoded=True)) as response:
                assert response.status == 404
                assert (await response.json())["error"]["param"] == "path"
            name = URL(d.url("/v1/models/a%2Fb%25"), encoded=True)
            async with d.client.get(name) as response:
                assert "'a/b%'" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("name", ["../../metrics", "a?stream=true", "a#b", "a/../../sleep"])
@in_loop
async def test_a_response_whose_id_would_name_another_page_is_looked_up_nowhere(name: str) -> None:
    async with deployment(num_decode=2, running=behind_envoy(Filter())) as d:
        assert (await d.complete("/v1/responses", previous_response_id=name)).status == 200
        assert not [seen.path for engine in d.decode for seen in engine.others]
        await d.complete("/v1/responses", previous_response_id="resp_a-1")
        assert d.decode[0].others  # the control


@in_loop
async def test_no_more_requests_than_allowed_wait_at_decode_with_early_tickets() -> None:
    async with deployment(running=behind_envoy(Filter()), streams="on", max_streams=2) as d:
        await d.complete()  # where prefill lends is learned
        d.prefill[0].computes.clear()
        asked = [asyncio.create_task(d.complete(prompt=f"{number}")) for number in range(5)]
        await until(lambda: len(d.prefill[0].seen) == 6)
        await until(lambda: len(d.decode[0].seen) >= 3)
        d.prefill[0].computes.set()
        assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
        assert sum(seen.stream is not None for seen in d.decode[0].seen) == 2
        # None waits any more.
        before = len(d.decode[0].seen)
        d.prefill[0].computes.clear()
        again = asyncio.create_task(d.complete(prompt="again"))
        await until(lambda: len(d.decode[0].seen) > before)
        assert d.decode[0].seen[-1].stream is not None
        d.prefill[0].computes.set()
        await again


@pytest.mark.parametrize("is_checked", [True, False])
@in_loop
async def test_a_trusted_client_cannot_have_its_ticket_sent_to_two_engines(
    monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """The control: Envoy heeds the client where the picker does not refuse it."""

    async def fail(engine: FakeEngine, seen: Any, http: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": 500}}, status=500)

    if not is_checked:
        monkeypatch.setattr(
            "pdconn.router.picker.picker_service._check_tries", lambda headers: None
        )
    running = behind_envoy(Filter(trusts_clients=True))
    async with deployment(num_decode=2, running=running) as d:
        for engine in d.decode:
            engine.script = fail
        body = {"model": MODEL, "prompt": "hi"}
        headers = {"X-Envoy-Retry-On": "5xx", "X-Envoy-Max-Retries": "3"}
        async with d.client.post(d.url(PATH), json=body, headers=headers) as response:
            assert response.status == (400 if is_checked else 500)
        seen = [one for engine in d.decode for one in engine.seen if one.body["model"] == MODEL]
        assert (len(seen) > 1) is not is_checked


@in_loop
async def test_a_body_above_the_gateways_own_limit_gets_its_413() -> None:
    """Its answer comes in place of the body, and goes on as it is."""
    async with deployment(running=behind_envoy(Filter(buffer_nbytes=1 << 20))) as d:
        reply = await d.send(PATH, io.BytesIO(b'{"prompt": "' + b"x" * (5 << 20) + b'"}'))
        assert reply.status == 413
        assert not d.prefill[0].seen
        await until(lambda: d.metric("inflight_requests") == 0)
        assert (await d.complete()).status == 200
