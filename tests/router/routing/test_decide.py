"""The whole router over engines that say what their caches hold: where prompts go, and why.

Engines are fake; their events travel over real sockets, hashed as vLLM hashes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.handover import abandoned as farewell
from pdconn.router.handover.handover import RANK_HEADER
from pdconn.router.prefix.hashing import Extras
from pdconn.router.routing import tokenize as tokens
from tests.fakes.fake_engine import (
    Reply,
    die_in_stream,
    hang,
    in_loop,
    leave,
    reset,
    until,
)
from tests.fakes.routed import (
    ASKED,
    PROMPT,
    Fleet,
    fleet,
    letters,
    num_asked,
    other_prompt,
    refuse,
)

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
    monkeypatch.setattr(tokens, "TIMEOUT_S", 1.5)
    async with fleet(num_prefill=1) as f:
        await f.pod(f.prefill[0]).store([1] * 16)
        lora = Extras(lora=("ada", "/a"))
        await f.pod(f.prefill[0]).store(PROMPT, lora, lora_name="ada", lora_id=1)
        await f.heard()
        f.decode[0].models = [{"id": 1}]  # junk
        course = await f.ask(model="ada")
        assert (course.unknown, course.hit_tokens(f.prefill[0].url)) == (None, 0)
        f.decode[0].models = [{"id": "ada", "root": "/a", "parent": "m"}]
        async with asyncio.timeout(20):
            while not (await f.ask(model="ada")).hit_tokens(f.prefill[0].url):
                await asyncio.sleep(0.05)


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
