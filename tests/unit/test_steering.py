"""The whole router over engines that say what their caches hold: where prompts go, and why.

Engines are fake; their events travel over real sockets, hashed as vLLM hashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from pdconn.router import farewell, server, tokens
from pdconn.router import feeding as feeding_module
from pdconn.router.caches import Caches
from pdconn.router.decisions import Course
from pdconn.router.feeding import Feeding
from pdconn.router.fleet.member import Member
from pdconn.router.fleet.sources import Watch
from pdconn.router.handover import RANK_HEADER
from pdconn.router.policy import PrefixAware, Role
from pdconn.router.prefix.hashing import NOTHING, Extras, HashScheme, chain, external
from pdconn.router.steering import Steering
from tests.unit.fake_engine import (
    ANSWER,
    Deployment,
    FakeEngine,
    Reply,
    deployment,
    die_in_stream,
    error,
    hang,
    in_loop,
    leave,
    reset,
    until,
)
from tests.unit.test_subscriber import Publisher

SCHEME = HashScheme("sha256_cbor", 16)
PROMPT = list(range(1000, 1320))
ASKED = [*PROMPT, 7]  # an engine computes the last token of a prompt, whatever it holds


def other_prompt(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + 320))


def free_ports(num_ranks: int) -> list[int]:
    """Ports in a row: events of each rank, then its replays."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            begin = first.getsockname()[1]
            for port in range(begin + 1, begin + 2 * num_ranks):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(begin, begin + 2 * num_ranks))


@dataclass
class Pod:
    """A rank of an engine that says what it holds."""

    name: str
    ports: tuple[int, int]
    publisher: Publisher

    async def store(
        self, prompt: list[int], extras: Extras = NOTHING, group: int = 0, **fields: Any
    ) -> None:
        hashes = [external(full) for full in chain(SCHEME, prompt, extras)]
        said = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": prompt,
            "block_size": SCHEME.block_tokens,
            "medium": "GPU",
            "extra_keys": None if extras == NOTHING else [["a key"]] * len(hashes),
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention",
        }
        await self.publisher.publish({**said, **fields})

    async def remove(self, prompt: list[int], blocks: slice = slice(None), group: int = 0) -> None:
        hashes = [external(full) for full in chain(SCHEME, prompt)][blocks]
        await self.publisher.publish(
            {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group}
        )


@dataclass
class Fleet(Deployment):
    """A deployment whose engines publish."""

    steering: Steering
    pods: dict[str, Pod] = field(default_factory=dict)

    def pod(self, engine: FakeEngine, rank: int = 0) -> Pod:
        return self.pods[engine.url if rank == 0 else f"{engine.url}#{rank}"]

    def of_pod(self, what: str, pod: Pod) -> float | None:
        labels = {"pod": pod.name}
        return self.proxy.metrics.registry.get_sample_value(f"pdconn_router_pod_{what}", labels)

    def of_router(self, name: str, /, **labels: str) -> float | None:
        return self.proxy.metrics.registry.get_sample_value(f"pdconn_router_{name}", labels)

    async def heard(self) -> None:
        """Every pod's events so far are known."""

        def all_of_them() -> bool:
            counts = [self.of_pod("events_total", pod) for pod in self.pods.values()]
            return counts == [pod.publisher.seq for pod in self.pods.values()]

        await until(all_of_them)

    @property
    def course(self) -> Course:
        """Of the newest request."""
        return next(self.steering.decisions.newest())

    async def ask(self, prompt: Any = None, **body: Any) -> Course:
        reply = await self.complete(prompt=ASKED if prompt is None else prompt, **body)
        assert (reply.status, reply.body) == (200, ANSWER)
        return self.course

    async def chat(self, content: Any, **body: Any) -> Course:
        messages = [{"role": "user", "content": content}]
        reply = await self.complete("/v1/chat/completions", messages=messages, **body)
        assert (reply.status, reply.body) == (200, ANSWER)
        return self.course


def spied(made: list[Steering]) -> Any:
    def make(*parts: Any) -> Steering:
        made.append(Steering(*parts))
        return made[-1]

    return make


@asynccontextmanager
async def fleet(
    num_prefill: int = 2,
    num_decode: int = 1,
    ranks: int = 1,
    publish: bool = True,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """Engines that publish (prefill ones ``ranks`` times) and a router that knows of them."""
    pods: dict[str, Pod] = {}
    made: list[Steering] = []
    order = itertools.count()

    def word(engine: FakeEngine) -> str:
        mine = ranks if next(order) < num_prefill else 1
        if not publish:
            return engine.url
        ports = free_ports(mine)
        for rank in range(mine):
            name = engine.url if rank == 0 else f"{engine.url}#{rank}"
            pair = ports[rank], ports[mine + rank]
            pods[name] = Pod(name, pair, Publisher(pair))
        host = "tcp://{host}:"
        return f"{engine.url},events={host}{ports[0]},replay={host}{ports[mine]},ranks={mine}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "Steering", spied(made))
        settings = {"policy": PrefixAware.name, **settings}
        try:
            async with deployment(num_prefill, num_decode, word, **settings) as d:
                parts = (d.prefill, d.decode, d.leases, d.proxy, d.client)
                made_fleet = Fleet(*parts, made[0], pods)
                for engine in (*d.prefill, *d.decode):
                    engine.checks_names = False
                await until(
                    lambda: all(made_fleet.of_pod("complete", pod) for pod in pods.values())
                )
                yield made_fleet
                await until(lambda: not len(made[0].flights))  # every table drains
        finally:
            for pod in pods.values():
                await pod.publisher.die()


def num_asked(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.seen) for engine in engines]


# --- Prefixes -----------------------------------------------------------------------------


@in_loop
async def test_a_prompt_goes_to_the_prefill_engine_that_holds_its_prefix():
    async with fleet(num_prefill=3) as f:
        for number, engine in enumerate(f.prefill, start=1):
            await f.pod(engine).store(other_prompt(number))
        await f.heard()
        for number, engine in enumerate(f.prefill, start=1):
            course = await f.ask([*other_prompt(number), 7])
            assert course.prefill == engine.url
            assert course.hit_tokens(engine.url) == 320
        assert num_asked(f.prefill) == [1, 1, 1]
        assert f.of_router("hit_tokens_total", role="prefill") == 3 * 320
        assert f.of_router("prompt_tokens_total") == 3 * 321
        assert f.of_router("unknown_prompts_total") == 0


@in_loop
async def test_what_an_engine_gave_up_draws_nothing_to_it():
    """The control: the same prompt, asked for wherever it lies at the moment."""
    async with fleet(num_prefill=2) as f:
        for here, there in ((0, 1), (1, 0), (0, 1)):
            await f.pod(f.prefill[here]).store(PROMPT)
            await f.heard()
            assert (await f.ask()).prefill == f.prefill[here].url
            await f.pod(f.prefill[here]).remove(PROMPT)
            await f.pod(f.prefill[there]).store(PROMPT)
            await f.heard()
            assert (await f.ask()).prefill == f.prefill[there].url
            await f.pod(f.prefill[there]).remove(PROMPT)
            await f.heard()
        course = await f.ask()
        assert {course.hit_tokens(engine.url) for engine in f.prefill} == {0}


@in_loop
async def test_a_prefix_without_its_window_is_none():
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33}
    async with fleet(num_prefill=2) as f:
        for engine in f.prefill:
            await f.pod(engine).store(PROMPT)
            await f.pod(engine).store(PROMPT, group=1, **window)
        whole, evicted = f.prefill
        for whole, evicted in (f.prefill, f.prefill[::-1]):
            await f.pod(evicted).remove(PROMPT, slice(1, None), group=1)
            await f.heard()
            course = await f.ask()
            assert (course.hit_tokens(whole.url), course.hit_tokens(evicted.url)) == (320, 16)
            assert course.prefill == whole.url
            await f.pod(evicted).store(PROMPT, group=1, **window)
            await f.pod(evicted).remove(PROMPT, slice(0, 1), group=1)  # was there twice
        await f.heard()
        course = await f.ask()
        assert [course.hit_tokens(engine.url) for engine in f.prefill] == [320, 320]


@in_loop
async def test_decode_that_holds_nearly_all_serves_alone_and_that_is_counted():
    async with fleet(alone_below=64) as f:
        await f.pod(f.decode[0]).store(PROMPT)
        await f.heard()
        course = await f.ask([*PROMPT, *range(64)])
        assert (course.decision.alone, course.prefill) == (True, None)
        assert num_asked(f.prefill) == [0, 0]
        assert b"kv_transfer_params" not in f.decode[0].seen[0].raw
        assert f.metric("direct_total", reason="prefix_held") == 1
        assert f.of_router("decisions_total", policy="prefix", decision="alone") == 1
        # One token more, and it is worth a hand-over.
        course = await f.ask([*PROMPT, *range(65)])
        assert (course.decision.alone, f.leases.granted) == (False, 1)
        assert sum(num_asked(f.prefill)) == 1
        assert f.metric("direct_total", reason="prefix_held") == 1
        assert f.of_router("decisions_total", policy="prefix", decision="handed over") == 1


@pytest.mark.parametrize("policy", ["prefix", "round-robin", "random"])
@in_loop
async def test_what_decode_has_to_serve_alone_is_counted_so_by_every_policy(policy):
    async with fleet(policy=policy) as f:
        await f.ask(n=2)
        assert f.of_router("decisions_total", policy=policy, decision="alone") == 1
        assert f.metric("direct_total", reason="several_choices") == 1
        await f.ask()
        assert f.of_router("decisions_total", policy=policy, decision="handed over") == 1


@in_loop
async def test_decode_too_is_chosen_by_what_it_holds():
    async with fleet(num_decode=3, alone_below=0) as f:
        for number, engine in enumerate(f.decode, start=1):
            await f.pod(engine).store(other_prompt(number) * 20)
        await f.heard()
        for number, engine in enumerate(f.decode, start=1):
            assert (await f.ask([*other_prompt(number) * 20, 7])).decode == engine.url
        assert f.leases.granted == 3


@in_loop
async def test_the_rank_that_holds_the_prefix_is_named_and_no_other():
    async with fleet(num_prefill=1, ranks=3, alone_below=0) as f:
        (engine,) = f.prefill
        for rank in range(3):
            await f.pod(engine, rank).store(other_prompt(rank + 1))
        await f.pod(f.decode[0]).store(other_prompt(1))
        await f.heard()
        for rank in (2, 0, 1):
            await f.ask([*other_prompt(rank + 1), 7])
            assert engine.seen[-1].headers[RANK_HEADER] == str(rank)
            assert RANK_HEADER not in f.decode[0].seen[-1].headers  # it has one only
        # What none of them holds is for the engine to place.
        await f.ask(other_prompt(9))
        await f.chat("hi")
        assert [RANK_HEADER in seen.headers for seen in engine.seen[-2:]] == [False, False]


@in_loop
async def test_salt_and_adapter_lead_to_other_caches():
    async with fleet(num_prefill=3) as f:
        plain, salted, adapted = f.prefill
        adapter = {"id": "ada", "root": "/lora/ada", "parent": "m"}
        stray = {"id": "stray", "root": "/lora/stray", "parent": None}
        f.decode[0].models = [{"id": "m", "root": "/m", "parent": None}, adapter, stray]
        for engine in f.prefill:
            await f.pod(engine).store([1] * 16)  # tells how it hashes
        await f.pod(plain).store(PROMPT)
        await f.pod(salted).store(PROMPT, Extras(cache_salt="mine"))
        lora = Extras(lora=("ada", "/lora/ada"))
        await f.pod(adapted).store(PROMPT, lora, lora_name="ada", lora_id=1)
        await f.heard()
        for body, engine in (
            ({}, plain),
            ({"cache_salt": "mine"}, salted),
            ({"model": "ada"}, adapted),
            ({"model": "stray"}, plain),  # no adapter: it has no parent
            ({"cache_salt": ""}, plain),
        ):
            course = await f.ask(**body)
            assert (course.prefill, course.hit_tokens(engine.url)) == (engine.url, 320), body
        for body in ({"cache_salt": "yours"}, {"model": "ada", "cache_salt": "mine"}):
            course = await f.ask(**body)
            assert {course.hit_tokens(engine.url) for engine in f.prefill} == {0}, body


@in_loop
async def test_a_list_of_adapters_that_is_refused_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(tokens, "TIMEOUT_S", 0.5)
    async with fleet(num_prefill=1) as f:
        await f.pod(f.prefill[0]).store([1] * 16)
        lora = Extras(lora=("ada", "/a"))
        await f.pod(f.prefill[0]).store(PROMPT, lora, lora_name="ada", lora_id=1)
        await f.heard()
        f.decode[0].models = [{"id": 1}]  # junk
        course = await f.ask(model="ada")
        assert (course.unknown, course.hit_tokens(f.prefill[0].url)) == (None, 0)
        f.decode[0].models = [{"id": "ada", "root": "/a", "parent": "m"}]
        async with asyncio.timeout(10):
            while not (await f.ask(model="ada")).hit_tokens(f.prefill[0].url):
                await asyncio.sleep(0.05)


# --- Tokens -------------------------------------------------------------------------------


def letters(seen: Any) -> list[int]:
    """A tokenizer: a letter is a token, a chat its messages' letters."""
    body = seen.body
    text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
    return [ord(letter) for letter in text]


@in_loop
async def test_text_is_put_into_tokens_by_an_engine_with_the_clients_key():
    text = "a long beginning, " * 20
    async with fleet() as f:
        f.decode[0].tokenize = letters
        for engine in f.prefill:
            await f.pod(engine).store([ord(letter) for letter in text[:352]])
            await f.heard()
            body = {"model": "m", "prompt": text, "temperature": 0.5, "stream": False}
            key = {"Authorization": "Bearer k", "X-Other": "1"}
            async with f.client.post(f.url("/v1/completions"), json=body, headers=key) as response:
                assert response.status == 200
            assert f.course.prefill == engine.url
            assert f.course.hit_tokens(engine.url) == 352
            asked = f.decode[0].tokenized[-1]
            assert asked.body == {"model": "m", "prompt": text}
            assert asked.headers["Authorization"] == "Bearer k"
            assert "X-Other" not in asked.headers
            await f.pod(engine).remove([ord(letter) for letter in text[:352]])
        assert "Authorization" not in (await f.complete(prompt=text)).headers
        assert "Authorization" not in f.decode[0].tokenized[-1].headers


@in_loop
async def test_a_chat_is_put_into_tokens_with_the_fields_that_tokenize_knows():
    known = {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x" * 400}, "y"]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "hi"},
        ],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    unknown = {"temperature": 0, "max_tokens": 3, "user": "u", "tool_choice": "auto", "seed": 1}
    async with fleet() as f:
        f.decode[0].tokenize = letters
        held = [ord(letter) for letter in json.dumps(known["messages"])]
        await f.pod(f.prefill[1]).store(held[: len(held) // 16 * 16])
        await f.heard()
        reply = await f.complete("/v1/chat/completions", **known, **unknown)
        assert reply.status == 200
        (asked,) = f.decode[0].tokenized
        assert asked.body == known
        assert f.course.prefill == f.prefill[1].url
        assert f.course.unknown is None
        assert f.course.hit_tokens(f.prefill[1].url) > 400


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (IMAGE, "more than text: image_url"),
        ({"image_url": IMAGE["image_url"]}, "more than text: a part of unnamed type"),
        ({"type": "input_audio", "input_audio": {}}, "more than text: input_audio"),
        (7, "messages: "),
    ],
)
@in_loop
async def test_what_is_more_than_text_is_routed_without_its_prefix(part, why):
    async with fleet() as f:
        f.decode[0].tokenize = letters
        course = await f.chat([{"type": "text", "text": "what is it"}, part])
        assert (course.looked, f.decode[0].tokenized) == (None, [])
        assert why in (course.unknown or "")
        assert f.of_router("unknown_prompts_total") == 1
        course = await f.chat([{"type": "text", "text": "what is it"}])
        assert (course.unknown, len(f.decode[0].tokenized)) == (None, 1)


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
async def test_a_tokenize_that_fails_or_lies_costs_the_prefix_and_not_the_request(lie, monkeypatch):
    monkeypatch.setattr(tokens, "MOST_TOKENS", 1000)
    monkeypatch.setattr(tokens, "MAX_NBYTES", 8000)
    async with fleet() as f:
        await f.pod(f.prefill[0]).store(PROMPT)
        await f.heard()
        f.decode[0].tokenize = LIES[lie]
        for course in (await f.ask("some text"), await f.chat("some text")):
            assert course.looked is None
            assert course.unknown
        assert f.leases.granted == 2
        assert f.of_router("unknown_prompts_total") == 2
        f.decode[0].tokenize = letters  # the control
        assert (await f.ask("some text")).unknown is None


@in_loop
async def test_a_tokenize_that_is_slow_or_dies_costs_the_prefix_and_not_the_request(monkeypatch):
    monkeypatch.setattr(tokens, "TIMEOUT_S", 0.1)
    async with fleet(num_decode=2) as f:
        for engine in f.decode:
            engine.tokenize = letters
            engine.tokenizes.clear()
        assert "within 0.1 s" in ((await f.ask("some text")).unknown or "")
        for engine in f.decode:
            engine.tokenizes.set()
        assert (await f.ask("some text")).unknown is None
        for engine in f.decode:
            engine.tokenize = lambda seen: 1 // 0  # a 500 and a closed connection
        assert (await f.ask("some text")).unknown


@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
@in_loop
async def test_where_nobody_publishes_or_nobody_looks_nothing_is_tokenized(policy):
    async with fleet(publish=policy != "prefix", policy=policy) as f:
        for engine in (*f.prefill, *f.decode):
            engine.tokenize = letters
        course = await f.ask("some text")
        await f.chat("some text")
        assert course.unknown in (
            "no engine tells what its prefix cache holds",
            "round-robin does not look at prompts",
        )
        assert not any(engine.tokenized for engine in (*f.prefill, *f.decode))


@in_loop
async def test_where_somebody_publishes_text_is_tokenized():
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
        await f.heard()
        assert (await f.complete(prompt=prompt)).body == ANSWER
        assert f.course.looked is None
        assert f.course.unknown


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
        assert "brings no" in (f.course.unknown or "")
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


async def refuse(engine, seen, http):
    return error(400, "the engine's own words")


@in_loop
async def test_a_prompt_longer_than_any_model_takes_is_refused_by_the_engine_as_it_is(monkeypatch):
    monkeypatch.setattr(tokens, "MOST_TOKENS", 1000)
    async with fleet() as f:
        for engine in f.prefill:
            engine.script = refuse
        for num_tokens, unknown in ((1000, False), (1001, True)):
            reply = await f.complete(prompt=[5] * num_tokens)
            assert (reply.status, reply.error["message"]) == (400, "the engine's own words")
            assert bool(f.course.unknown) == unknown
        monkeypatch.setattr(tokens, "MAX_NBYTES", 100)
        assert (await f.complete(prompt=[5] * 100)).status == 400
        assert "more than 100 bytes" in (f.course.unknown or "")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"prompt": [1, 2'])
@in_loop
async def test_a_body_that_is_not_json_is_refused_and_decided_about_by_nobody(raw):
    async with fleet() as f:
        assert (await f.send("/v1/completions", raw)).status == 400
        assert not len(f.steering.decisions)
        assert num_asked(f.prefill) == [0, 0]


# --- Trust --------------------------------------------------------------------------------


@in_loop
async def test_a_pod_that_promises_what_it_does_not_hold_loses_trust_and_traffic():
    async with fleet() as f:
        liar, honest = f.prefill
        await f.pod(liar).store(PROMPT)
        await f.pod(honest).store(PROMPT[:160])
        await f.heard()
        liar.cached_tokens, honest.cached_tokens = 0, 160
        chosen = [(await f.ask()).prefill for _ in range(20)]
        # 320 tokens times 0.8 ** n are a tie with 160 from n = 2 on, and worse from n = 6 on.
        lied_to = chosen.index(honest.url)
        assert lied_to in (2, 6)
        assert chosen[lied_to:] == [honest.url] * (20 - lied_to)
        assert f.steering.trust[liar.url] == pytest.approx(0.8**lied_to)
        assert f.steering.trust[honest.url] == 1.0
        assert f.of_router("reported_tokens_total", what="cached") == 160 * (20 - lied_to)


@in_loop
async def test_a_pod_that_holds_what_it_promises_keeps_trust_and_traffic():
    """The control, and one that reports nothing is believed too."""
    async with fleet() as f:
        honest, half = f.prefill
        await f.pod(honest).store(PROMPT)
        await f.pod(half).store(PROMPT[:160])
        await f.heard()
        for honest.cached_tokens in (None, 320, 10_000):
            assert {(await f.ask()).prefill for _ in range(8)} == {honest.url}
            assert f.steering.trust.get(honest.url, 1.0) == 1.0


@in_loop
async def test_trust_comes_back_when_promises_are_kept_again():
    async with fleet(num_prefill=1) as f:
        (engine,) = f.prefill
        await f.pod(engine).store(PROMPT)
        await f.heard()
        for engine.cached_tokens, num_asks in ((0, 10), (320, 20)):
            for _ in range(num_asks):
                await f.ask()
            before, f.steering.trust = dict(f.steering.trust), dict(f.steering.trust)
            assert (before[engine.url] < 0.2) == (engine.cached_tokens == 0)
        assert f.steering.trust[engine.url] > 0.98


@pytest.mark.parametrize(
    "cached", [-5, 10**30, 10**400, 1e300, "320", [320], True, {}], ids=lambda one: str(one)[:40]
)
@in_loop
async def test_nonsense_about_what_was_cached_is_ignored(cached):
    async with fleet(num_prefill=1) as f:
        await f.pod(f.prefill[0]).store(PROMPT)
        await f.heard()
        f.prefill[0].cached_tokens = cached
        course = await f.ask()
        assert course.cached_tokens is None
        assert f.steering.trust == {}
        assert f.of_router("reported_tokens_total", what="all") == 0
        f.prefill[0].cached_tokens = 320
        assert (await f.ask()).cached_tokens == 320
        assert (await f.send("/debug/state", method="GET")).status == 200


# --- Engines that come, go and garble -----------------------------------------------------


@in_loop
async def test_an_engine_that_starts_anew_holds_nothing_of_before():
    async with fleet() as f:
        engine = f.prefill[0]
        pod = f.pod(engine)
        await pod.store(PROMPT)
        await f.heard()
        assert (await f.ask()).hit_tokens(engine.url) == 320
        await pod.publisher.die()
        pod.publisher = Publisher(pod.ports)
        await pod.store(other_prompt(1)[:16])
        await until(lambda: f.of_pod("blocks", pod) == 1)
        assert (await f.ask()).hit_tokens(engine.url) == 0
        assert f.of_pod("restarts_total", pod) == 1
        await pod.store(PROMPT)
        await until(lambda: f.of_pod("blocks", pod) == 21)
        assert (await f.ask()).prefill == engine.url


@in_loop
async def test_events_that_cannot_be_read_are_counted_and_the_router_goes_on():
    async with fleet() as f:
        engine = f.prefill[1]
        pod = f.pod(engine)
        for garbage in ((b"",), (b"", b"\0" * 8), (b"x", b"\xff" * 8, b"\xc1"), (b"",) * 9):
            await pod.publisher.wire(*garbage)
        await pod.publisher.publish({"type": "BlockMoved"})
        await pod.store(PROMPT, token_ids=["x"] * 320)  # cannot tell how it hashes
        await pod.store(other_prompt(1)[:16])
        await until(lambda: f.of_pod("blocks", pod) == 21)
        page = (await f.send("/metrics", method="GET")).body.decode()
        label = f'{{pod="{engine.url}"}}'
        assert f"pdconn_router_pod_malformed_total{label} 4.0" in page
        assert f"pdconn_router_pod_undecodable_total{label} 1.0" in page
        assert f"pdconn_router_pod_complete{label} 0.0" in page
        other = f'{{pod="{f.prefill[0].url}"}}'
        assert f"pdconn_router_pod_malformed_total{other} 0.0" in page
        assert f"pdconn_router_pod_complete{other} 1.0" in page
        assert (await f.ask()).prefill == engine.url


def fleet_file(engines: dict[FakeEngine, str], pods: dict[FakeEngine, Pod]) -> str:
    tables = []
    for engine, role in engines.items():
        table = f'[[engine]]\nurl = "{engine.url}"\nroles = ["{role}"]\n'
        if engine in pods:
            events, replay = pods[engine].ports
            table += f'events = "tcp://{{host}}:{events}"\nreplay = "tcp://{{host}}:{replay}"\n'
        tables.append(table)
    return "\n".join(tables)


@asynccontextmanager
async def router_by_file(tmp_path: Any, monkeypatch: Any, num_prefill: int = 2) -> AsyncIterator:
    """A fleet, and a second router over the same engines, told of them by a file."""
    made: list[Steering] = []
    monkeypatch.setattr(server, "Watch", partial(Watch, interval_s=0.02))
    path = tmp_path / "fleet.toml"
    async with fleet(num_prefill) as f:
        all_of_them = {**dict.fromkeys(f.prefill, "prefill"), f.decode[0]: "decode"}
        pods = {engine: f.pod(engine) for engine in f.prefill}

        def write(engines: dict[FakeEngine, str], pods: dict[FakeEngine, Pod] = pods) -> None:
            (tmp_path / "new").write_text(fleet_file(engines, pods))
            (tmp_path / "new").rename(path)

        write(all_of_them)
        monkeypatch.setattr(server, "Steering", spied(made))
        config = server.ProxyConfig.of([], [], fleet=str(path), port=0)
        async with server.running_proxy(config) as proxy:
            parts = (f.prefill, f.decode, f.leases, proxy, f.client)
            yield Fleet(*parts, made[0], {pod.name: pod for pod in pods.values()}), write


@in_loop
async def test_an_engine_that_leaves_the_fleet_leaves_every_table(tmp_path, monkeypatch):
    async with router_by_file(tmp_path, monkeypatch) as (f, write):
        gone, stays = f.prefill
        for engine in f.prefill:
            await f.pod(engine).store(PROMPT)
        await f.heard()
        gone.cached_tokens = stays.cached_tokens = 0
        for _ in range(8):
            await f.ask()
        assert set(f.steering.trust) == {gone.url, stays.url}
        write({stays: "prefill", f.decode[0]: "decode"})
        caches = f.steering.caches
        await until(lambda: gone.url not in caches.index.pods)
        assert (set(caches.feeds), set(f.steering.trust)) == ({stays.url}, {stays.url})
        page = (await f.send("/metrics", method="GET")).body.decode()
        assert (gone.url in page, stays.url in page) == (False, True)
        assert caches.index.num_hashes == 20
        assert (await f.ask()).prefill == stays.url
        write({stays: "prefill", f.decode[0]: "decode"}, {})  # it publishes no more
        await until(lambda: not caches.feeds)
        assert caches.index.num_hashes == 0
        assert "no engine tells" in ((await f.ask()).unknown or "")


@in_loop
async def test_an_engine_that_publishes_elsewhere_now_is_believed_from_there_only(
    tmp_path, monkeypatch
):
    """Else blocks of the old address stay for ever, or count twice and outlive a removal."""
    async with router_by_file(tmp_path, monkeypatch, num_prefill=1) as (f, write):
        (engine,) = f.prefill
        await f.pod(engine).store(PROMPT)
        await f.pod(engine).store(other_prompt(2))
        await f.heard()
        index = f.steering.caches.index
        assert index.num_hashes == 40
        ports = tuple(free_ports(1))
        moved = Pod(engine.url, ports, Publisher(ports))
        try:
            await moved.store(PROMPT)
            write({engine: "prefill", f.decode[0]: "decode"}, {engine: moved})
            await until(lambda: index.num_hashes == 20)
            assert (await f.ask()).hit_tokens(engine.url) == 320
            await moved.remove(PROMPT)
            await until(lambda: index.num_hashes == 0)
            assert (await f.ask()).hit_tokens(engine.url) == 0
            assert f.steering.caches.feeds[engine.url].source.events.endswith(str(ports[0]))
        finally:
            await moved.publisher.die()


@in_loop
async def test_a_new_address_is_listened_to_once_the_old_one_is_forgotten(monkeypatch):
    class Slow:
        def __init__(self, source, sink, context):
            self.port = source.events[-1]

        def start(self):
            said.append(f"start {self.port}")

        async def close(self):
            await may_close.wait()
            said.append(f"closed {self.port}")

    class Forgetful(Caches):
        def forget(self, source):
            said.append(f"forgot {source.events[-1]}")

    said: list[str] = []
    may_close = asyncio.Event()
    monkeypatch.setattr(feeding_module, "Subscriber", Slow)
    feeding = Feeding(Forgetful())
    other = Member("http://q:1", frozenset({Role.PREFILL}), "tcp://h:9")
    for port in (1, 2, 1, 3):
        feeding.fleet_changed(
            [Member("http://p:1", frozenset({Role.PREFILL}), f"tcp://h:{port}"), other]
        )
    assert said == ["start 1", "start 9"]
    may_close.set()
    await until(lambda: "start 3" in said)
    assert said[2:].index("start 3") > max(i for i, one in enumerate(said[2:]) if "forgot" in one)
    assert [one for one in said if "start" in one] == ["start 1", "start 9", "start 3"]
    await feeding.close()


@in_loop
async def test_hundreds_of_ranks_are_listened_to(caplog):
    """Each takes up to 4 sockets, and a context of ZeroMQ has 1023 unless told otherwise."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        pytest.skip(f"needs 4096 open files, has {soft}")
    caches, engine = Caches(), frozenset({Role.PREFILL})
    feeding = Feeding(caches)
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"  # nobody is there
    feeding.fleet_changed(Member(f"http://p{number}:1", engine, address) for number in range(400))
    await asyncio.sleep(0.05)  # whoever cannot listen says so at once
    assert "failed" not in caplog.text
    assert len(feeding.statuses()) == 400
    await feeding.close()
    assert (feeding.statuses(), caches.feeds) == ({}, {})


# --- Flights ------------------------------------------------------------------------------


@in_loop
async def test_what_is_queued_at_prefill_sends_the_next_prompt_elsewhere():
    async with fleet() as f:
        for engine in f.prefill:
            engine.door.clear()
        asking = [asyncio.create_task(f.complete(prompt=ASKED)) for _ in range(1)]
        await until(lambda: sum(num_asked(f.prefill)) == 1)
        assert sorted(f.steering.flights.num_tokens(e.url) for e in f.prefill) == [0, 321]
        asking.append(asyncio.create_task(f.complete(prompt=ASKED)))
        await until(lambda: sum(num_asked(f.prefill)) == 2)
        assert num_asked(f.prefill) == [1, 1]  # the same prompt would go to the same engine
        for engine in f.prefill:
            engine.door.set()
        await asyncio.gather(*asking)
        assert len(f.steering.flights) == 0
        again = {(await f.ask()).prefill for _ in range(3)}
        assert len(again) == 1  # the control


@in_loop
async def test_every_flight_lands_however_its_request_ends(monkeypatch):
    monkeypatch.setattr(farewell, "_PATIENCE_S", 0.1)
    endings = [(None, None), (reset, None), (refuse, None), (None, reset), (None, refuse),
               (None, die_in_stream), (die_in_stream, None)]  # fmt: skip
    async with fleet(num_prefill=1) as f:
        for prefill, decode in endings:
            f.prefill[0].script, f.decode[0].script = prefill, decode
            for stream in (False, True):
                await asyncio.gather(
                    *(quietly(f, prompt=ASKED, stream=stream) for _ in range(3)),
                )
            await until(lambda: not len(f.steering.flights))
            for engine in (f.prefill[0], f.decode[0]):
                engine.script = None
                f.steering.engines.mark_up(engine.url)
        assert f.steering.flights._requests == f.steering.flights._tokens == {}


async def quietly(f: Fleet, **body: Any) -> Reply | None:
    try:
        return await f.complete(**body)
    except Exception:  # noqa: BLE001 - a broken stream has many names
        return None


async def only_a_head(engine, seen, http):
    response = web.StreamResponse()
    await response.prepare(http)
    await hang(engine, seen, http)
    return response


@pytest.mark.parametrize("stage", ["tokenize", "prefill", "decode", "head", "stream"])
@in_loop
async def test_the_flight_of_a_client_who_leaves_lands(stage, monkeypatch):
    monkeypatch.setattr(farewell, "_PATIENCE_S", 0.1)
    async with fleet(num_prefill=1) as f:
        prefill, decode = f.prefill[0], f.decode[0]
        decode.tokenize = letters
        flights = f.steering.flights
        if stage == "tokenize":
            decode.tokenizes.clear()
        elif stage == "stream":
            decode.num_chunks, decode.chunk_pause_s = 100_000, 0.01
        else:
            engine = prefill if stage == "prefill" else decode
            engine.script = only_a_head if stage == "head" else hang
        writers = [await f.open(stream=True) for _ in range(3)]
        if stage == "tokenize":
            await until(lambda: len(decode.tokenized) == 3)
        else:
            await until(lambda: len(flights) == 3)  # the control: they were under way
            await until(lambda: len((prefill if stage == "prefill" else decode).seen) == 3)
        for writer in writers:
            await leave(writer)
        await until(lambda: f.outcome("client_left") == 3)
        await until(lambda: not len(flights))
        assert flights._requests == flights._tokens == {}
        decode.tokenizes.set()
        await until(lambda: f.metric("inflight") == 0)
