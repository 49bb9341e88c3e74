"""What clients ask beside the generating routes, and what the router adds to answers."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import CHUNKS, error

NAME = "org/model-1.5"
CARD = {"id": NAME, "object": "model", "max_model_len": 8192}


@in_loop
async def test_one_model_is_described_as_in_the_list() -> None:
    """It was 404; LiteLLM, LangChain and editors ask it before all else."""
    async with deployment(num_decode=2) as d:
        d.decode[1].models = [CARD]
        for path in (f"/v1/models/{NAME}", "/v1/models/org%2Fmodel-1.5"):
            reply = await d.send(path, method="GET")
            assert (reply.status, json.loads(reply.body)) == (200, CARD)
        reply = await d.send("/v1/models/nobody's", method="GET")
        assert (reply.status, reply.error["param"]) == (404, "model")
        assert d.outcome("ok", "/v1/models/{name}") == 2


@in_loop
async def test_where_engines_tell_of_no_models_their_words_are_passed_on() -> None:
    async with deployment() as d:
        for engine in (*d.prefill, *d.decode):
            engine.keys = {"Bearer good": [CARD]}
        assert (await d.send(f"/v1/models/{NAME}", method="GET")).status == 401
        for engine in (*d.prefill, *d.decode):
            await engine.stop()
        assert (await d.send(f"/v1/models/{NAME}", method="GET")).status == 503


@pytest.mark.parametrize("said", [None, "yes"])
@in_loop
async def test_a_stream_asks_proxies_not_to_hold_it_back(said: str | None) -> None:
    """nginx buffers answers: tokens came in bursts of 4 or 8 KB."""

    async def stream(engine, seen, http):  # type: ignore[no-untyped-def]
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        headers |= {} if said is None else {"X-Accel-Buffering": said}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        for chunk in CHUNKS:
            await response.write(chunk)
        return response

    async with deployment() as d:
        d.decode[0].script = stream
        for _ in range(2):  # one may arrive whole
            reply = await d.complete(stream=True)
            assert reply.headers.getall("X-Accel-Buffering") == [said or "no"]
            assert reply.body == b"".join(CHUNKS)


@in_loop
async def test_other_answers_do_not() -> None:
    """The control."""
    async with deployment() as d:
        assert "X-Accel-Buffering" not in (await d.complete()).headers
        d.decode[0].script = None
        d.decode[0].other = lambda seen: error(404, "no")
        assert "X-Accel-Buffering" not in (await d.send("/v1/embeddings", b"{}")).headers
