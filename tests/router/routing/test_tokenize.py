"""What the router does about a prompt's tokens: asks an engine, or routes without them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.router_server import Limits
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import ANSWER, error
from tests.fakes.routed import PROMPT, fleet, letters, num_asked, refuse


@in_loop
async def test_text_is_put_into_tokens_by_an_engine_with_the_clients_key():
    text = "a long beginning, " * 20
    async with fleet() as f:
        f.decode[0].tokenize = letters
        for engine in f.prefill:
            await f.pod(engine).store([ord(letter) for letter in text[:352]])
            await f.events_applied()
            body = {"model": "m", "prompt": text, "temperature": 0.5, "stream": False}
            key = {"Authorization": "Bearer k", "X-Other": "1"}
            async with f.client.post(f.url("/v1/completions"), json=body, headers=key) as response:
                assert response.status == 200
            assert f.routed.prefill == engine.url
            assert f.routed.hit_tokens(engine.url) == 352
            asked = f.decode[0].tokenized[-1]
            assert asked.body == {"model": "m", "prompt": text}
            assert asked.headers["Authorization"] == "Bearer k"
            assert "X-Other" not in asked.headers
            await f.pod(engine).remove([ord(letter) for letter in text[:352]])
        assert "Authorization" not in (await f.complete(prompt=text)).headers
        assert "Authorization" not in f.decode[0].tokenized[-1].headers


@in_loop
async def test_a_chat_is_rendered_with_all_that_shapes_its_prompt():
    """``/tokenize`` knows no documents: a hit was promised for the tokens of another prompt."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "x" * 400}, "y"]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "hi"},
    ]
    shaping = {
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "t", "text": "words"}],
        "reasoning_effort": "high",
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }
    body = {"model": "m", "messages": messages, **shaping, "temperature": 0, "max_tokens": 3}

    def rendering(seen: Any) -> list[int]:
        """A chat template that writes the documents first, as RAG models' do."""
        return [ord(letter) for letter in json.dumps([seen.body.get("documents"), messages])]

    async with fleet() as f:
        f.decode[0].tokenize = rendering
        held = [ord(letter) for letter in json.dumps([shaping["documents"], messages])]
        await f.pod(f.prefill[1]).store(held[: len(held) // 16 * 16])
        await f.events_applied()
        assert (await f.complete("/v1/chat/completions", **body)).status == 200
        (asked,) = f.decode[0].tokenized
        assert asked.path == "/v1/chat/completions/render"
        assert asked.body == {**body, "mm_payload": "none"}
        assert f.routed.prefill == f.prefill[1].url
        assert f.routed.hit_tokens(f.prefill[1].url) > 400


@in_loop
async def test_where_chats_are_not_rendered_nothing_is_promised():
    """The tokens of another prompt would be worse than none."""
    async with fleet() as f:
        tokenize = f.decode[0]

        def no_render(seen: Any) -> Any:
            return error(404, "Not Found") if seen.path.endswith("/render") else letters(seen)

        tokenize.tokenize = no_render
        assert "/render answered 404" in ((await f.chat("some text")).unknown or "")
        assert [seen.path for seen in tokenize.tokenized] == ["/v1/chat/completions/render"]
        assert (await f.ask("some text")).unknown is None


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (IMAGE, "more than text: image_url"),
        ({"image_url": IMAGE["image_url"]}, "more than text: a part without a type"),
        ({"type": "input_audio", "input_audio": {}}, "more than text: input_audio"),
        (7, "messages: "),
    ],
)
@in_loop
async def test_what_is_more_than_text_is_routed_without_its_prefix(part, why):
    async with fleet() as f:
        f.decode[0].tokenize = letters
        routed = await f.chat([{"type": "text", "text": "what is it"}, part])
        assert (routed.decision.lookup, f.decode[0].tokenized) == (None, [])
        assert why in (routed.unknown or "")
        assert f.of_router("decisions_without_lookup_total") == 1
        routed = await f.chat([{"type": "text", "text": "what is it"}])
        assert (routed.unknown, len(f.decode[0].tokenized)) == (None, 1)


def answers(body: bytes | str, status: int = 200) -> Any:
    raw = body.encode() if isinstance(body, str) else body
    return lambda seen: web.Response(body=raw, status=status, content_type="application/json")


LIES = {
    "fails": answers("{}", 500),
    "refuses": answers('{"tokens": [1]}', 401),
    "empty": answers(""),
    "html": answers("<html>"),
    "no tokens": answers('{"count": 3}'),
    "text": answers('{"tokens": "1 2"}'),
    "strings": answers('{"tokens": ["1"]}'),
    "negative": answers('{"tokens": [1, -1]}'),
    "too large": answers(f'{{"tokens": [{2**31}]}}'),
    "huge": answers(f'{{"tokens": [{"9" * 1000}]}}'),
    "infinite": answers('{"tokens": [1e999]}'),
    "not unicode": answers(b'{"tokens": ["\xff"]}'),
    "deep": answers(f'{{"x": {"[" * 100_000}{"]" * 100_000}, "tokens": [1]}}'),
    "too many": answers(json.dumps({"tokens": [1] * 2000})),
    "too long": answers(json.dumps({"tokens": [1], "x": "x" * 8000})),
}


@pytest.mark.parametrize("lie", LIES)
@in_loop
async def test_a_tokenize_that_fails_or_lies_costs_the_prefix_and_not_the_request(lie):
    limits = Limits(most_tokens=1000, most_token_nbytes=8000)
    async with fleet(limits=limits) as f:
        await f.pod(f.prefill[0]).store(PROMPT)
        await f.events_applied()
        f.decode[0].tokenize = LIES[lie]
        for routed in (await f.ask("some text"), await f.chat("some text")):
            assert routed.decision.lookup is None
            assert routed.unknown
        assert f.leases.granted == 2
        assert f.of_router("decisions_without_lookup_total") == 2
        f.decode[0].tokenize = letters  # the control
        assert (await f.ask("some text")).unknown is None


@in_loop
async def test_a_tokenize_that_is_slow_or_dies_costs_the_prefix_and_not_the_request():
    async with fleet(num_decode=2, tokenize_timeout_s=1.0) as f:
        for engine in f.decode:
            engine.tokenize = letters
            engine.tokenizes.clear()
        assert "within 1 s" in ((await f.ask("some text")).unknown or "")
        for engine in f.decode:
            engine.tokenizes.set()
        assert (await f.ask("some text")).unknown is None
        for engine in f.decode:
            engine.tokenize = lambda seen: 1 // 0  # a 500 and a closed connection
        assert (await f.ask("some text")).unknown


@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
@in_loop
async def test_without_publishers_or_a_prefix_policy_nothing_is_tokenized(policy):
    async with fleet(publish=policy != "prefix", policy=policy) as f:
        for engine in (*f.prefill, *f.decode):
            engine.tokenize = letters
        routed = await f.ask("some text")
        await f.chat("some text")
        assert routed.unknown in (
            "no engine publishes KV events",
            "round-robin does not look at prompts",
        )
        assert not any(engine.tokenized for engine in (*f.prefill, *f.decode))


@in_loop
async def test_with_a_publisher_text_is_tokenized():
    """The control for the test above."""
    async with fleet() as f:
        f.decode[0].tokenize = letters
        assert (await f.ask("some text")).unknown is None
        assert f.decode[0].tokenized


@pytest.mark.parametrize(
    "prompt",
    [[-1, 2], [2**31], [10**30], [1.5], [True], [1, "x"], [[1, 2], [3]], [["x"]], ["text"], [], ""],
)
@in_loop
async def test_a_prompt_of_odd_tokens_is_the_engines_to_judge(prompt):
    async with fleet() as f:
        await f.pod(f.prefill[0]).store(PROMPT)
        await f.events_applied()
        assert (await f.complete(prompt=prompt)).body == ANSWER
        assert f.routed.decision.lookup is None
        assert f.routed.unknown


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt_embeds": "AAAA"}),
        ("/v1/completions", {"prompt_embeds": "AAAA", "prompt": None}),
        ("/v1/chat/completions", {"prompt_embeds": "AAAA"}),
    ],
)
@in_loop
async def test_a_body_that_brings_no_prompt_in_words_is_routed_without(path, body):
    async with fleet() as f:
        f.decode[0].tokenize = letters
        assert (await f.send(path, json.dumps(body))).body == ANSWER
        assert "has no" in (f.routed.unknown or "")
        assert not f.decode[0].tokenized


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "cache_salt": "\xff"}',
        b'{"messages": [{"role": "user", "content": "hi"}], "model": 7}',
    ],
)
@in_loop
async def test_text_that_is_not_unicode_is_the_engines_to_judge(raw):
    async with fleet() as f:
        for engine in (*f.prefill, *f.decode):
            engine.script = refuse
            engine.tell_lender = lambda seen: None  # it would have to read the body
        reply = await f.send("/v1/chat/completions", raw)
        assert (reply.status, reply.error["message"]) == (400, "the engine's own words")


@in_loop
async def test_a_prompt_longer_than_any_model_takes_is_refused_by_the_engine_as_it_is():
    async with fleet(limits=Limits(most_tokens=1000)) as f:
        for engine in f.prefill:
            engine.script = refuse
        for num_tokens, unknown in ((1000, False), (1001, True)):
            reply = await f.complete(prompt=[5] * num_tokens)
            assert (reply.status, reply.error["message"]) == (400, "the engine's own words")
            assert bool(f.routed.unknown) == unknown
    async with fleet(limits=Limits(most_token_nbytes=100)) as f:
        for engine in f.prefill:
            engine.script = refuse
        assert (await f.complete(prompt=[5] * 100)).status == 400
        assert "more than 100 bytes" in (f.routed.unknown or "")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"prompt": [1, 2'])
@in_loop
async def test_a_body_that_is_not_json_is_refused_without_a_decision(raw):
    async with fleet() as f:
        assert (await f.send("/v1/completions", raw)).status == 400
        assert not len(f.router.decisions)
        assert num_asked(f.prefill) == [0, 0]
