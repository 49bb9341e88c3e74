"""A request's way through the proxy when every engine is well."""

import asyncio
import gzip
import json

import pytest
from aiohttp import web

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import running_proxy
from pdconn.router.routing.policy import RoundRobin, ScoredCandidate
from tests.fakes.deployment import deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, CHUNKS, TICKET, error
from tests.router.handover.streams.streaming import asked


@in_loop
async def test_the_ticket_travels_from_prefill_to_decode_untouched():
    async with deployment() as d:
        assert (await d.complete(max_tokens=9, stream=True)).status == 200
        (asked,), (decoded,) = d.prefill[0].seen, d.decode[0].seen
        assert asked.body["max_tokens"] == 1
        assert asked.body["kv_transfer_params"]["do_remote_decode"] is True
        assert decoded.body["max_tokens"] == 9
        # Byte for byte: spaces, number formats, unknown keys.
        assert (TICKET % "lease-1").encode() in decoded.raw
        assert not d.leases.held


@in_loop
async def test_prefill_and_decode_see_the_same_request_id():
    async with deployment() as d:
        made_up = await d.complete()
        ids = {e.seen[0].headers["X-Request-Id"] for e in (d.prefill[0], d.decode[0])}
        assert ids == {made_up.headers["X-Request-Id"]}
        headers = {"X-Request-Id": "mine", "Authorization": "Bearer k", "traceparent": "00-1"}
        async with d.client.post(
            d.url("/v1/completions"), json={"prompt": "x"}, headers=headers
        ) as own:
            assert own.headers["X-Request-Id"] == "mine"
        for engine in (d.prefill[0], d.decode[0]):
            assert {name: engine.seen[1].headers[name] for name in headers} == headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@in_loop
async def test_a_stream_reaches_the_client_byte_for_byte(path):
    chunks: list[bytes] = []

    async def one_at_a_time(engine, seen, http):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Own": "1"})
        await response.prepare(http)
        for number, chunk in enumerate(CHUNKS):
            await response.write(chunk)
            await until(lambda number=number: len(chunks) > number)
        await response.write_eof()
        return response

    async with deployment() as d:
        d.decode[0].script = one_at_a_time
        async with d.client.post(
            d.url(path), json={"prompt": "x", "messages": [], "stream": True}
        ) as response:
            async for chunk, _ in response.content.iter_chunks():
                chunks += [chunk] if chunk else []
        assert tuple(chunks) == CHUNKS  # as they came: not joined, not split
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Own"] == "1"
        assert response.headers["X-Pdconn-Engine"] == d.decode[0].url
        assert d.outcome("ok", path) == 1


@in_loop
async def test_a_whole_answer_keeps_its_bytes_and_its_length():
    async with deployment() as d:
        response = await d.complete()
        assert response.body == ANSWER
        assert response.headers["Content-Length"] == str(len(ANSWER))
        assert "Transfer-Encoding" not in response.headers


@in_loop
async def test_compressed_answers_pass_as_they_are():
    packed = gzip.compress(ANSWER)

    async def compressed(engine, seen, http):
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    async with deployment() as d:
        d.decode[0].script = compressed
        async with d.client.post(
            d.url("/v1/completions"), json={"prompt": "x"}, headers={"Accept-Encoding": "gzip"}
        ) as response:
            assert await response.read() == packed
            assert response.headers["Content-Encoding"] == "gzip"
        assert d.prefill[0].seen[0].headers["Accept-Encoding"] == "identity"
        assert d.decode[0].seen[0].headers["Accept-Encoding"] == "gzip"


@in_loop
async def test_engines_of_a_role_take_turns():
    async with deployment(num_prefill=2, num_decode=3) as d:
        for _ in range(6):
            await d.complete()
        assert [len(e.seen) for e in d.prefill] == [3, 3]
        assert [len(e.seen) for e in d.decode] == [2, 2, 2]


@in_loop
async def test_one_engine_can_hold_both_roles():
    async with deployment() as d:
        both = d.prefill[0]
        async with running_proxy(ProxyConfig.from_options([both.url], [both.url], port=0)) as proxy:
            assert (await d.send(proxy.url + "/v1/completions", b'{"prompt": "x"}')).body == ANSWER
        assert [seen.body.get("max_tokens") for seen in both.seen] == [1, None]


@in_loop
async def test_another_policy_chooses_instead_and_sees_the_request():
    class LastFirst(RoundRobin):
        def decide(self, question, prefill, decode):
            asked.append((question.num_tokens, [one.engine for one in decode]))
            return super().decide(question, prefill, decode[::-1])

        def _rotated(self, role, candidates):
            return tuple(ScoredCandidate(one, 0.0, "last first") for one in candidates)

    asked = []
    async with deployment(num_decode=2) as d:
        config = ProxyConfig.from_options([d.prefill[0].url], [e.url for e in d.decode], port=0)
        async with running_proxy(config, policy=LastFirst()) as proxy:
            for _ in range(2):
                await d.send(proxy.url + "/v1/completions", b'{"prompt": "a long prompt"}')
        assert [len(e.seen) for e in d.decode] == [0, 2]
        assert asked[0] == (len(b'"a long prompt"') // 4, [e.url for e in d.decode])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"n": 3}, "several_choices"),
        ({"echo": True}, "prompt_logprobs"),
    ],
)
@in_loop
async def test_what_a_ticket_cannot_serve_is_decodes_alone_and_counted(body, reason):
    async with deployment() as d:
        assert (await d.complete(**body)).status == 200
        assert not d.prefill[0].seen
        assert (
            d.decode[0].seen[0].raw == json.dumps({"model": "m", "prompt": "hi", **body}).encode()
        )
        assert d.metric("direct_requests_total", reason=reason) == 1
        assert d.leases.granted == 0


@in_loop
async def test_prefill_without_a_connector_is_logged_once_and_decode_computes(caplog):
    async with deployment() as d:
        d.prefill[0].lends = False
        for _ in range(3):
            assert (await d.complete()).body == ANSWER
        assert "kv_transfer_params" not in d.decode[0].seen[0].body
        assert d.metric("direct_requests_total", reason="no_ticket") == 3
        records = [r for r in caplog.records if "without kv_transfer_params" in r.getMessage()]
        assert len(records) == 1
        assert d.prefill[0].url in records[0].getMessage()


@pytest.mark.parametrize("status", [400, 404, 501])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_an_engines_error_reaches_the_client_as_it_is(role, status):
    async def refuse(engine, seen, http):
        return error(status, "the engine's own words")

    async with deployment() as d:
        engine = getattr(d, role)[0]
        engine.script = refuse
        response = await d.complete(stream=True)
        assert response.status == status
        assert response.error["message"] == "the engine's own words"
        assert response.headers["X-Pdconn-Engine"] == engine.url
        assert d.outcome("client_error") == 1
        assert d.metric("engine_up", role=role, engine=engine.url) == 1
        # Beside a ticket that is returned, which is on its way meanwhile.
        assert len(asked(d.decode[0])) == (1 if role == "decode" else 0)


@in_loop
async def test_a_ticket_that_decode_refused_is_given_back():
    """vLLM notifies no lender of a body that it cannot read; neither does this engine."""

    async def unreadable(engine, seen, http):
        if seen.body["model"] == "m":
            engine.tell_lender = lambda seen: None
            return error(400, "min_tokens must be an integer")
        del engine.tell_lender
        return await engine.answer(seen, http)

    async with deployment() as d:
        d.decode[0].script = unreadable
        assert (await d.complete()).status == 400
        await until(lambda: d.metric("unused_tickets_total", outcome="returned") == 1)
        assert not d.leases.held


@in_loop
async def test_many_requests_at_once_each_get_their_own_ticket():
    async with deployment(num_prefill=2, num_decode=2) as d:
        await asyncio.gather(*(d.complete(prompt=f"p{i}", stream=True) for i in range(64)))
        leases = [seen.body["kv_transfer_params"]["lease"] for e in d.decode for seen in e.seen]
        assert len(set(leases)) == 64
        await until(lambda: d.metric("inflight_requests") == 0)
        assert not d.leases.held


@in_loop
async def test_a_slow_reader_slows_the_engine_and_fills_no_memory():
    async with deployment() as d:
        sent = 0

        async def flood(engine, seen, http):
            nonlocal sent
            response = web.StreamResponse()
            await response.prepare(http)
            for _ in range(4000):
                await response.write(b"x" * 16384)
                sent += 16384
            return response

        d.decode[0].script = flood
        writer = await d.open(stream=True)
        before, at_rest = 0, 0
        async with asyncio.timeout(20):
            while at_rest < 10:  # nothing reads, so it comes to rest
                await asyncio.sleep(0.03)
                at_rest = at_rest + 1 if sent == before > 0 else 0
                before = sent
        assert sent < 4000 * 16384
        await leave(writer)
        await until(lambda: d.decode[0].aborted)


@pytest.mark.parametrize("reuses", [True, False])
@in_loop
async def test_decode_gets_prefills_tokens_of_a_chat_if_they_are_to_be_reused(reuses):
    async def answers(engine, seen, http):
        asked = seen.body.get("return_token_ids")
        assert asked is (True if reuses and seen.path.startswith("/v1/chat") else None)
        tokens = "[5, 6]" if asked else "null"
        text = f'{{"kv_transfer_params": {engine.leases.grant()}, "prompt_token_ids": {tokens}}}'
        return web.Response(text=text, content_type="application/json")

    async with deployment(reuse_tokens=reuses) as d:
        d.prefill[0].script = answers
        await d.complete("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
        await d.complete("/v1/completions", prompt="x")
        chat, completion = (seen.params for seen in d.decode[0].seen)
        assert chat.get("prompt_token_ids") == ([5, 6] if reuses else None)
        assert (chat["lease"], completion["lease"]) == ("lease-1", "lease-2")
        assert "prompt_token_ids" not in completion
        assert not d.leases.held
