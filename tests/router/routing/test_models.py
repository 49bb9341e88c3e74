"""Several models behind one router: engines' lists decide, and all else is as with one model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdconn.router.routing import models as catalog
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, error, reset
from tests.router.openai.test_passed import answers, form, num_others

A, B = "model-a", "model-b"
ADAPTER = {"id": "ada", "root": "/ada", "parent": A}


def listed(name: str) -> list[dict[str, Any]]:
    return [{"id": name, "root": name, "parent": None, "max_model_len": 4096}]


@asynccontextmanager
async def two_models(**settings: Any) -> AsyncIterator[Deployment]:
    """Of each model two prefill and two decode engines."""
    async with deployment(4, 4, **settings) as d:
        for engines in (d.prefill, d.decode):
            for number, engine in enumerate(engines):
                engine.models = listed(A if number < 2 else B)
                engine.checks_names = False
        yield d


def asked(d: Deployment) -> list[list[int]]:
    """Requests at each engine, prefill and decode."""
    return [[len(one.seen) for one in engines] for engines in (d.prefill, d.decode)]


@pytest.mark.parametrize("policy", ["prefix", "round-robin", "random"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@in_loop
async def test_a_request_goes_to_engines_that_serve_its_model(policy: str, path: str) -> None:
    async with two_models(policy=policy) as d:
        for number in range(6):
            reply = await d.complete(path, model=A if number % 2 else B)
            assert (reply.status, reply.body) == (200, ANSWER)
        for engines in asked(d):
            assert (sum(engines[:2]), sum(engines[2:])) == (3, 3)
        for engine in (*d.prefill, *d.decode):
            assert {seen.body["model"] for seen in engine.seen} <= {engine.models[0]["id"]}
        assert d.metric("handed_over_requests_total") == 6


@in_loop
async def test_a_model_that_no_engine_serves_is_404_in_the_shape_clients_know() -> None:
    async with two_models() as d:
        reply = await d.complete(model="nobody's")
        assert (reply.status, reply.error["code"]) == (404, 404)
        assert reply.error["type"] == "NotFoundError"
        assert reply.error["param"] == "model"
        assert reply.error["message"] == 'The model "nobody\'s" does not exist.'
        assert asked(d) == [[0] * 4, [0] * 4]
        assert d.outcome("refused") == 1


@in_loop
async def test_a_request_that_names_no_model_is_told_which_there_are() -> None:
    async with two_models() as d:
        reply = await d.send("/v1/completions", b'{"prompt": "x"}')
        assert reply.status == 400
        assert "model: expected one of model-a, model-b" in reply.error["message"]


@in_loop
async def test_a_request_without_a_model_is_told_so_where_only_adapters_are_listed() -> None:
    async with deployment() as d:
        d.prefill[0].models, d.decode[0].models = [], [ADAPTER]
        reply = await d.send("/v1/completions", b'{"prompt": "x"}')
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert "got nothing" in reply.error["message"]


@in_loop
async def test_with_one_model_names_are_the_engines_to_judge() -> None:
    """Byte for byte as without the router, and no name is needed."""
    async with deployment() as d:
        assert (await d.send("/v1/completions", b'{"prompt": "x"}')).status == 200
        reply = await d.complete(model="nobody's")
        assert reply.error["message"] == "The model `nobody's` does not exist."
        assert reply.error["type"] == "X", "the engine's own words"


@in_loop
async def test_the_list_of_models_is_the_union_each_model_once() -> None:
    async with two_models() as d:
        d.decode[3].models = [*listed(B), {"id": "more", "own": 1}]
        reply = await d.send("/v1/models", method="GET")
        page = json.loads(reply.body)
        assert page["object"] == "list"
        assert [card["id"] for card in page["data"]] == [A, B, "more"]
        assert page["data"][2] == {"id": "more", "own": 1}


@in_loop
async def test_an_adapter_goes_where_it_is_loaded() -> None:
    async with two_models() as d:
        for engine in (d.prefill[1], d.decode[0]):
            engine.models = [*listed(A), ADAPTER]
        for _ in range(3):
            assert (await d.complete(model="ada")).body == ANSWER
        assert asked(d) == [[0, 3, 0, 0], [3, 0, 0, 0]]


@in_loop
async def test_an_adapter_that_is_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "UNKNOWN_AGAIN_S", 0.0)
    async with two_models() as d:
        assert (await d.complete(model="ada")).status == 404
        for engine in (*d.prefill[:2], *d.decode[:2]):
            engine.models = [*listed(A), ADAPTER]
        assert (await d.complete(model="ada")).body == ANSWER


@in_loop
async def test_names_that_no_engine_serves_do_not_make_the_router_ask_each_time() -> None:
    async with two_models() as d:
        await d.complete(model=A)
        before = d.num_listed()
        for number in range(20):
            assert (await d.complete(model=f"m{number}")).status == 404
        assert d.num_listed() - before <= 8, "at most one round"


@in_loop
async def test_without_prefill_of_its_model_decode_of_its_model_computes() -> None:
    async with two_models() as d:
        await d.complete(model=A)
        for engine in d.prefill[:2]:
            await engine.stop()
        for _ in range(2):
            assert (await d.complete(model=A)).body == ANSWER
        assert d.metric("direct_requests_total", reason="no_prefill") == 2
        assert asked(d)[0][2:] == [0, 0]
        assert asked(d)[1][2:] == [0, 0]
        assert (await d.complete(model=B)).body == ANSWER
        assert d.metric("direct_requests_total", reason="no_prefill") == 2


@in_loop
async def test_no_engine_of_another_model_is_asked_after_failures() -> None:
    async with two_models() as d:
        await d.complete(model=A)
        for engine in (*d.prefill[:2], *d.decode[:2]):
            engine.script = reset
        assert (await d.complete(model=A)).status == 503
        assert asked(d)[0][2:] == asked(d)[1][2:] == [0, 0]


@in_loop
async def test_a_ticket_is_returned_through_its_own_model() -> None:
    async def too_much(engine, seen, http):
        return error(429, "full")

    async with two_models() as d:
        for engine in d.decode[:2]:
            engine.script = too_much
        assert (await d.complete(model=A)).status == 429
        await until(lambda: d.metric("unused_tickets_total", outcome="refused"))
        assert asked(d)[1][2:] == [0, 0]


@in_loop
async def test_passed_requests_go_to_their_model_too() -> None:
    async with two_models() as d:
        answers(d)
        for _ in range(8):
            raw = json.dumps({"model": B, "input": "x"}).encode()
            assert (await d.send("/v1/embeddings", raw)).status == 200
        assert num_others(d) == [0, 0, 2, 2, 0, 0, 2, 2]
        sent = form(model=A)
        async with d.client.post(d.url("/v1/audio/transcriptions"), data=sent) as reply:
            assert reply.status == 200
        assert sum(num_others(d)[4:6]) == 1
        assert (await d.send("/score", b'{"model": "other"}')).status == 404


@in_loop
async def test_an_engine_that_has_not_told_its_models_gets_nothing_where_models_differ() -> None:
    async with two_models() as d:
        d.decode[0].models = "junk"
        for _ in range(4):
            assert (await d.complete(model=A)).body == ANSWER
        assert asked(d)[1] == [0, 4, 0, 0]
