"""``/v1/responses`` and ``/v1/messages``: handed over; their clients' keys and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from pdconn.router.openai.bodies import RETURN_MODEL, find_usage, prefill_body, return_body
from pdconn.router.openai.requests import Direct, Route, parse_body
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, TICKET, error
from tests.fakes.routed import fleet

RESPONSES, MESSAGES = Route.RESPONSES.path, Route.MESSAGES.path
ASK = {
    RESPONSES: {"max_output_tokens": 9, "include": ["message.output_text.logprobs"]},
    MESSAGES: {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}},
}


def parsed(route: Route, **body: Any) -> Any:
    prompt = {route.prompt: "hi" if route.may_be_text else [{"role": "user", "content": "hi"}]}
    return parse_body(route, json.dumps({"model": "m", **prompt, **body}).encode())


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@in_loop
async def test_decode_gets_the_clients_body_and_prefills_ticket(path: str) -> None:
    async with deployment() as d:
        reply = await d.complete(path, **ASK[path])
        assert (reply.status, reply.body) == (200, ANSWER)
        prefill, decode = d.prefill[0].seen[0], d.decode[0].seen[0]
        assert prefill.path == decode.path == path
        assert prefill.params["do_remote_decode"] is True
        assert (TICKET % "lease-1").encode() in decode.raw
        assert {name: decode.body[name] for name in ASK[path]} == ASK[path]
        assert d.outcome("ok", path) == 1
        assert not d.leases.held


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@in_loop
async def test_a_stream_passes_byte_for_byte(path: str) -> None:
    async with deployment() as d:
        d.decode[0].num_chunks = 3
        assert (await d.complete(path, stream=True, **ASK[path])).body == b"data: t\n\n" * 3
        assert d.prefill[0].seen[0].body["stream"] is False


def test_prefill_answers_with_one_token_and_keeps_nothing() -> None:
    sent = json.loads(prefill_body(parsed(Route.RESPONSES, max_output_tokens=9, store=True)))
    assert (sent["max_output_tokens"], sent["store"], sent["stream"]) == (1, False, False)
    assert not {"n", "max_tokens", "max_completion_tokens"} & sent.keys()
    sent = json.loads(prefill_body(parsed(Route.MESSAGES, max_tokens=9, system="s")))
    assert (sent["max_tokens"], sent["system"]) == (1, "s")
    assert not {"n", "store", "max_completion_tokens"} & sent.keys()


def test_prefill_is_sent_a_ticket_for_a_prefix_and_the_name_of_a_stream() -> None:
    body, source = parsed(Route.MESSAGES, max_tokens=9), Raw(b'{"a": 1}')
    for given, ours in (
        ({}, None),
        ({"source": source}, {"from": {"a": 1}}),
        ({"stream": "s"}, {"stream": "s"}),
        ({"source": source, "stream": "s"}, {"from": {"a": 1}, "stream": "s"}),
    ):
        params = json.loads(prefill_body(body, **given))["kv_transfer_params"]
        assert (params["do_remote_decode"], params.get("pdconn")) == (True, ours)


def test_a_tickets_return_has_no_thinking_that_is_longer_than_its_answer() -> None:
    """vLLM would refuse it before it looks at the model's name, and not report it to the lender."""
    body = parsed(Route.MESSAGES, max_tokens=9, thinking={"type": "enabled", "budget_tokens": 5})
    assert "thinking" in json.loads(prefill_body(body))  # it may shape the prompt
    sent = json.loads(return_body(body, json.dumps({"a": 1}).encode()))
    assert sent["model"] == RETURN_MODEL
    assert "thinking" not in sent


FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"background": True}, Direct.STORED_RESPONSE),
        ({"background": False, "previous_response_id": None}, None),
        ({"previous_response_id": "resp_1"}, Direct.STORED_RESPONSE),
        ({"truncation": "auto"}, Direct.TRUNCATED_PROMPT),
        ({"truncation": "disabled"}, None),
        ({"tools": [FUNCTION, FUNCTION]}, None),
        ({"tools": []}, None),
        ({"tools": None}, None),
        ({"tools": [FUNCTION, {"type": "mcp", "server_label": "s"}]}, Direct.SERVER_TOOLS),
        ({"tools": [{"type": "code_interpreter"}]}, Direct.SERVER_TOOLS),
        ({"tools": "odd"}, Direct.SERVER_TOOLS),
    ],
)
def test_a_response_goes_direct_where_one_ticket_cannot_serve_it(fields, reason) -> None:
    assert parsed(Route.RESPONSES, **fields).direct is reason
    # On other routes these fields mean nothing.
    if "truncation" not in fields:
        assert parsed(Route.MESSAGES, **fields).direct is None


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens_details": {"cached_tokens": 7}},
        {"input_tokens_details": {"cached_tokens": 7}},
        {"input_tokens": 3, "cache_read_input_tokens": 7},
    ],
)
def test_every_routes_cached_tokens_are_found(usage: dict[str, Any]) -> None:
    assert find_usage(json.dumps({"usage": usage}).encode()).cached == 7
    assert find_usage(b'{"usage": {"output_tokens": 1}}').cached is None


@in_loop
async def test_a_response_goes_on_at_the_engine_that_keeps_the_one_before() -> None:
    async def forgets(engine, seen, http):
        return error(404, "no such response")

    async with deployment(num_decode=3) as d:
        for engine in d.decode[:2]:
            engine.script = forgets
        for _ in range(3):
            reply = await d.complete(RESPONSES, previous_response_id="resp_1")
            assert (reply.status, reply.body) == (200, ANSWER)
            assert reply.headers["X-Pdconn-Engine"] == d.decode[2].url
        assert not d.prefill[0].seen
        d.decode[2].script = forgets
        reply = await d.complete(RESPONSES, previous_response_id="resp_1")
        assert (reply.status, reply.error["message"]) == (404, "no such response")
        await until(lambda: not len(d.proxy.router.loads.inflight))


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@in_loop
async def test_its_prompt_is_looked_up_by_the_tokens_that_an_engine_renders(path: str) -> None:
    prompt = list(range(1000, 1320))
    async with fleet(num_prefill=2) as f:
        for engine in (*f.prefill, *f.decode):
            engine.tokenize = lambda seen: [*prompt, 7]
        await f.pod(f.prefill[1]).store(prompt)
        await f.events_applied()
        assert (await f.complete(path, **ASK[path])).status == 200
        assert f.routed.unknown is None
        assert f.routed.hit_tokens(f.prefill[1].url) == 320
        assert f.routed.prefill == f.prefill[1].url
        rendered = [seen for seen in f.decode[0].tokenized if seen.path == f"{path}/render"]
        assert rendered[0].body["mm_payload"] == "none"


@in_loop
async def test_a_message_with_an_image_is_not_rendered_twice() -> None:
    image = [{"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}]
    async with fleet(num_prefill=1) as f:
        f.decode[0].tokenize = lambda seen: [1]
        reply = await f.complete(MESSAGES, messages=[{"role": "user", "content": image}])
        assert reply.status == 200
        assert "image" in f.routed.unknown
        assert not f.decode[0].tokenized


@in_loop
async def test_anthropics_clients_read_the_routers_refusals() -> None:
    async with deployment() as d:
        reply = await d.complete(MESSAGES, messages="hi")
        assert (reply.status, json.loads(reply.body)["type"]) == (400, "error")
        assert reply.error["type"] == "BadRequestError"
        reply = await d.complete("/v1/chat/completions", messages="hi")
        assert "type" not in json.loads(reply.body)


@in_loop
async def test_anthropics_clients_may_send_their_key_where_they_do(tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    keys.chmod(0o600)
    async with deployment(api_key_file=str(keys)) as d:
        body = {"model": "m", "messages": []}
        for header, status in (("secret", 200), ("wrong", 401)):
            headers = {"x-api-key": header}
            async with d.client.post(d.url(MESSAGES), json=body, headers=headers) as reply:
                assert reply.status == status
        assert "x-api-key" not in d.decode[0].seen[0].headers, "it is the router's"


@pytest.mark.parametrize("with_keys", [False, True])
@in_loop
async def test_engines_with_a_key_of_their_own_get_it_where_vllm_looks_for_it(
    tmp_path, with_keys: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    keys.chmod(0o600)
    settings = {"api_key_file": str(keys), "forward_authorization": True} if with_keys else {}
    async with deployment(**settings) as d:
        body, headers = {"model": "m", "messages": []}, {"x-api-key": "secret"}
        async with d.client.post(d.url(MESSAGES), json=body, headers=headers) as reply:
            assert reply.status == 200
        for engine in (d.prefill[0], d.decode[0]):
            assert engine.seen[0].headers["Authorization"] == "Bearer secret"
        headers["Authorization"] = "Bearer secret"
        async with d.client.post(d.url(MESSAGES), json=body, headers=headers) as reply:
            assert reply.status == 200
        assert d.decode[0].seen[1].headers.getall("Authorization") == ["Bearer secret"]
