"""Routes that one engine serves as they are: which engine, what passes, and what never does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pdconn.router.openai.forms import check_form
from pdconn.router.openai.passed import PASSED, Asks
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import error

JSON_ROUTES = [r for r in PASSED if not r.is_form and r.asks is not Asks.HOLDER]


def answers(d: Deployment, body: bytes = b'{"of": "the engine"}') -> None:
    for engine in (*d.prefill, *d.decode):
        engine.other = lambda seen: web.Response(body=body, content_type="application/json")


def num_others(d: Deployment) -> list[int]:
    return [len(engine.others) for engine in (*d.prefill, *d.decode)]


@pytest.mark.parametrize("route", JSON_ROUTES, ids=lambda route: route.path)
@in_loop
async def test_one_engine_gets_the_body_byte_for_byte(route) -> None:
    raw = b'{"model": "m",  "input": "\xc3\xa9"}'
    async with deployment() as d:
        answers(d)
        for engine in (*d.prefill, *d.decode):  # these the fake knows of itself
            engine.tokenize = lambda seen: web.Response(body=b'{"of": "the engine"}')
        reply = await d.send(route.path, raw)
        assert (reply.status, reply.body) == (200, b'{"of": "the engine"}')
        engines = (*d.prefill, *d.decode)
        seen = [one for engine in engines for one in (*engine.others, *engine.tokenized)]
        assert [(one.path, one.raw) for one in seen] == [(route.path, raw)]
        assert seen[0].headers["X-Request-Id"] == reply.headers["X-Request-Id"]
        assert d.outcome("ok", route.path) == 1
        assert not d.leases.granted
        if route.asks is Asks.DECODE:
            assert reply.headers["X-Pdconn-Engine"] == d.decode[0].url


@in_loop
async def test_the_engine_with_the_fewest_requests_is_asked_and_equals_take_turns() -> None:
    async with deployment(num_prefill=1, num_decode=2) as d:
        answers(d)
        for _ in range(6):
            await d.send("/v1/embeddings", b"{}")
        assert num_others(d) == [2, 2, 2]
        inflight = d.proxy.router.loads.inflight
        flights = [inflight.start_request(engine.url, 0) for engine in d.decode]
        await d.send("/v1/embeddings", b"{}")
        await d.send("/v1/embeddings", b"{}")
        assert num_others(d) == [4, 2, 2]
        for flight in flights:
            flight.finish()


@in_loop
async def test_another_engine_is_asked_after_a_failure() -> None:
    async with deployment(num_decode=2) as d:
        answers(d)
        await d.prefill[0].stop()
        await d.decode[0].stop()
        for _ in range(3):
            assert (await d.send("/score", b"{}")).status == 200
        assert num_others(d) == [0, 0, 3]
        await d.decode[1].stop()
        reply = await d.send("/score", b"{}")
        assert reply.status == 503
        assert d.outcome("no_engine", "/score") == 1
        assert not len(d.proxy.router.loads.inflight)


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@in_loop
async def test_no_route_lets_a_client_name_memory(field: str) -> None:
    async with deployment() as d:
        answers(d)
        for route in JSON_ROUTES:
            for body in ({field: {"a": 1}}, {"vllm_xargs": {field: "{}"}}):
                reply = await d.send(route.path, json.dumps(body).encode())
                assert (reply.status, "may not" in reply.error["message"]) == (400, True)
        assert num_others(d) == [0, 0]


@in_loop
async def test_bodies_are_bounded_as_on_other_routes() -> None:
    async with deployment(max_body_mib=0.01, max_requests=1) as d:
        answers(d)
        assert (await d.send("/pooling", b"x" * 20_000)).status == 413
        assert (await d.send("/pooling", b"not JSON")).status == 400
        assert num_others(d) == [0, 0]
        assert d.outcome("refused", "/pooling") == 2


# Stored responses


@pytest.mark.parametrize(("method", "end"), [("GET", ""), ("POST", "/cancel")])
@in_loop
async def test_the_engine_that_keeps_a_response_is_found(method: str, end: str) -> None:
    async with deployment(num_decode=3) as d:
        keeper = d.decode[1]
        for engine in (*d.prefill, *d.decode):
            engine.other = lambda seen: error(404, "no such response")
        keeper.other = lambda seen: web.json_response({"id": "resp_1"})
        for _ in range(3):
            reply = await d.send(f"/v1/responses/resp_1{end}?starting_after=2", method=method)
            assert (reply.status, json.loads(reply.body)) == (200, {"id": "resp_1"})
        assert keeper.others[0].path == f"/v1/responses/resp_1{end}?starting_after=2"
        keeper.other = d.decode[0].other
        reply = await d.send(f"/v1/responses/resp_1{end}", method=method)
        assert (reply.status, reply.error["message"]) == (404, "no such response")
        assert not d.prefill[0].others
        await until(lambda: not len(d.proxy.router.loads.inflight))


# Forms


def form(**fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, value)
    data.add_field("file", b"\x00\xffRIFF", filename="a.wav", content_type="audio/wav")
    return data


@in_loop
async def test_a_form_with_a_file_reaches_decode_with_its_boundary() -> None:
    async with deployment() as d:
        answers(d)
        sent = form(model="whisper")
        async with d.client.post(d.url("/v1/audio/transcriptions"), data=sent) as reply:
            assert reply.status == 200
        [seen] = d.decode[0].others
        boundary = seen.headers["Content-Type"].partition("boundary=")[2]
        assert boundary.encode() in seen.raw
        assert b"\x00\xffRIFF" in seen.raw
        assert check_form(seen.headers["Content-Type"], seen.raw) == "whisper"
        assert not d.prefill[0].others


@in_loop
async def test_labels_and_messages_name_a_route_without_its_pattern() -> None:
    async with deployment() as d:
        answers(d)
        assert (await d.send("/v1/responses/resp_1", method="GET")).status == 200
        assert d.outcome("ok", "/v1/responses/{id}") == 1
        assert "A-Za-z" not in (await d.send("/v1/nothing", b"{}")).error["message"]


# vLLM's own routes

ADMIN = Path(__file__).with_name("admin_routes.txt").read_text(encoding="utf-8").splitlines()
"""What vLLM 0.32 serves beside its API; ``test_vllm_routes.py`` compares."""


@in_loop
async def test_what_operates_an_engine_never_reaches_one() -> None:
    tricks = [
        "POST /v1/responses/../sleep/cancel",
        "POST /v1/responses/..%2F..%2Fsleep",
        "GET /v1/responses/a%2Fb",
        "POST //sleep",
        "POST /sleep/",
        "POST /v1/embeddings/../../sleep",
        "POST /v1/embeddings%2F..%2F..%2Fsleep",
        "PUT /v1/embeddings",
        "CONNECT /sleep",
    ]
    async with deployment() as d:
        answers(d)
        for line in (*ADMIN, *tricks):
            method, _, path = line.partition(" ")
            port = int(d.proxy.url.rsplit(":", 1)[1])
            status = await raw_status(port, method, path)
            assert status in (400, 404, 405), line
        assert num_others(d) == [0, 0]
        assert (await d.send("/v1/embeddings", b"{}")).status == 200  # the control


async def raw_status(port: int, method: str, path: str) -> int:
    """Of a request whose path no client library has tidied."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    )
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])
