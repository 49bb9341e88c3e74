"""The whole router over engines that say what their caches hold: where prompts go, and why.

Engines are fake; their events travel over real sockets, hashed as vLLM hashes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.openai.requests import RANK_HEADER
from pdconn.router.prefix.hashing import Extras
from pdconn.router.router_server import Limits
from tests.fakes.deployment import Reply, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import die_in_stream, hang, reset
from tests.fakes.routed import ASKED, PROMPT, Fleet, fleet, letters, num_asked, other_prompt, refuse

# --- Prefixes -----------------------------------------------------------------------------


@in_loop
async def test_a_prompt_goes_to_the_prefill_engine_that_holds_its_prefix():
    async with fleet(num_prefill=3) as f:
        for number, engine in enumerate(f.prefill, start=1):
            await f.pod(engine).store(other_prompt(number))
        await f.events_applied()
        for number, engine in enumerate(f.prefill, start=1):
            routed = await f.ask([*other_prompt(number), 7])
            assert routed.prefill == engine.url
            assert routed.hit_tokens(engine.url) == 320
        assert num_asked(f.prefill) == [1, 1, 1]
        assert f.of_router("predicted_hit_tokens_total", role="prefill") == 3 * 320
        assert f.of_router("prompt_tokens_total") == 3 * 321
        assert f.of_router("decisions_without_lookup_total") == 0


@pytest.mark.parametrize(("is_ours", "others"), [(True, 0), (False, 512)])
@in_loop
async def test_a_request_of_its_own_that_has_ended_since_the_report_is_not_one_of_others(
    is_ours, others
):
    async with fleet(num_prefill=1) as f:
        (engine,) = f.prefill
        engine.metrics_page = "vllm:num_requests_running 1\n"
        flight = f.router.loads.inflight.start_request(engine.url, 320)
        if not is_ours:
            flight.finish()
        await f.router.loads.poll_now()
        flight.finish()
        if is_ours:  # a report that comes by itself meanwhile says what is right, too
            engine.metrics_page = "vllm:num_requests_running 0\n"
        best = (await f.ask()).decision.ranking.prefill[0]
        assert best.why == f"321 uncached + 0 queued + {others} of others + 0 pressure"


@in_loop
async def test_what_an_engine_gave_up_draws_nothing_to_it():
    """The control: the same prompt, asked for wherever it lies at the moment."""
    async with fleet(num_prefill=2) as f:
        for here, there in ((0, 1), (1, 0), (0, 1)):
            await f.pod(f.prefill[here]).store(PROMPT)
            await f.events_applied()
            assert (await f.ask()).prefill == f.prefill[here].url
            await f.pod(f.prefill[here]).remove(PROMPT)
            await f.pod(f.prefill[there]).store(PROMPT)
            await f.events_applied()
            assert (await f.ask()).prefill == f.prefill[there].url
            await f.pod(f.prefill[there]).remove(PROMPT)
            await f.events_applied()
        routed = await f.ask()
        assert {routed.hit_tokens(engine.url) for engine in f.prefill} == {0}


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
            await f.events_applied()
            routed = await f.ask()
            assert (routed.hit_tokens(whole.url), routed.hit_tokens(evicted.url)) == (320, 16)
            assert routed.prefill == whole.url
            await f.pod(evicted).store(PROMPT, group=1, **window)
            await f.pod(evicted).remove(PROMPT, slice(0, 1), group=1)  # was there twice
        await f.events_applied()
        routed = await f.ask()
        assert [routed.hit_tokens(engine.url) for engine in f.prefill] == [320, 320]


@in_loop
async def test_decode_that_holds_nearly_all_serves_alone_and_that_is_counted():
    async with fleet(alone_below=64) as f:
        await f.pod(f.decode[0]).store(PROMPT)
        await f.events_applied()
        routed = await f.ask([*PROMPT, *range(64)])
        assert (routed.alone, routed.prefill) == (True, None)
        assert num_asked(f.prefill) == [0, 0]
        assert b"kv_transfer_params" not in f.decode[0].seen[0].raw
        assert f.metric("direct_requests_total", reason="prefix_held") == 1
        assert f.of_router("decisions_total", policy="prefix", decision="decode_alone") == 1
        # One token more, and it is worth a hand-over.
        routed = await f.ask([*PROMPT, *range(65)])
        assert (routed.alone, f.leases.granted) == (False, 1)
        assert sum(num_asked(f.prefill)) == 1
        assert f.metric("direct_requests_total", reason="prefix_held") == 1
        assert f.of_router("decisions_total", policy="prefix", decision="hand_over") == 1


@pytest.mark.parametrize("policy", ["prefix", "round-robin", "random"])
@in_loop
async def test_what_decode_has_to_serve_alone_is_counted_so_by_every_policy(policy):
    async with fleet(policy=policy) as f:
        await f.ask(n=2)
        assert f.of_router("decisions_total", policy=policy, decision="decode_alone") == 1
        assert f.metric("direct_requests_total", reason="several_choices") == 1
        await f.ask()
        assert f.of_router("decisions_total", policy=policy, decision="hand_over") == 1


@in_loop
async def test_decode_too_is_chosen_by_what_it_holds():
    async with fleet(num_decode=3, alone_below=0) as f:
        for number, engine in enumerate(f.decode, start=1):
            await f.pod(engine).store(other_prompt(number) * 20)
        await f.events_applied()
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
        await f.events_applied()
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
        for engine in (*f.prefill, *f.decode):
            engine.models = [{"id": "m", "root": "/m", "parent": None}, adapter, stray]
        for engine in f.prefill:
            await f.pod(engine).store([1] * 16)  # reveals its hash scheme
        await f.pod(plain).store(PROMPT)
        await f.pod(salted).store(PROMPT, Extras(cache_salt="mine"))
        lora = Extras(lora=("ada", "/lora/ada"))
        await f.pod(adapted).store(PROMPT, lora, lora_name="ada", lora_id=1)
        await f.events_applied()
        for body, engine in (
            ({}, plain),
            ({"cache_salt": "mine"}, salted),
            ({"model": "ada"}, adapted),
            ({"model": "stray"}, plain),  # no adapter: it has no parent
            ({"cache_salt": ""}, plain),
        ):
            routed = await f.ask(**body)
            assert (routed.prefill, routed.hit_tokens(engine.url)) == (engine.url, 320), body
        for body in ({"cache_salt": "yours"}, {"model": "ada", "cache_salt": "mine"}):
            routed = await f.ask(**body)
            assert {routed.hit_tokens(engine.url) for engine in f.prefill} == {0}, body


@in_loop
async def test_a_list_of_adapters_that_is_refused_is_asked_for_again():
    async with fleet(num_prefill=1, tokenize_timeout_s=1.5) as f:
        await f.pod(f.prefill[0]).store([1] * 16)
        lora = Extras(lora=("ada", "/a"))
        await f.pod(f.prefill[0]).store(PROMPT, lora, lora_name="ada", lora_id=1)
        await f.events_applied()
        for engine in (*f.prefill, *f.decode):
            engine.models = [{"id": 1}]  # junk
        routed = await f.ask(model="ada")
        assert (routed.unknown, routed.hit_tokens(f.prefill[0].url)) == (None, 0)
        for engine in (*f.prefill, *f.decode):
            engine.models = [{"id": "ada", "root": "/a", "parent": "m"}]
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
        await f.events_applied()
        liar.cached_tokens, honest.cached_tokens = 0, 160
        chosen = [(await f.ask()).prefill for _ in range(20)]
        # 320 tokens times 0.8 ** n are a tie with 160 from n = 2 on, and worse from n = 6 on.
        lied_to = chosen.index(honest.url)
        assert lied_to in (2, 6)
        assert chosen[lied_to:] == [honest.url] * (20 - lied_to)
        assert f.router.trust[liar.url] == pytest.approx(0.8**lied_to)
        assert f.router.trust[honest.url] == 1.0
        honestly = 160 * (20 - lied_to)
        assert f.of_router("reported_tokens_total", kind="cached") == honestly
        assert f.of_router("reported_tokens_total", kind="predicted") == 320 * lied_to + honestly


@in_loop
async def test_a_pod_that_holds_what_it_promises_keeps_trust_and_traffic():
    """The control, and one that reports nothing is believed too."""
    async with fleet() as f:
        honest, half = f.prefill
        await f.pod(honest).store(PROMPT)
        await f.pod(half).store(PROMPT[:160])
        await f.events_applied()
        for honest.cached_tokens in (None, 320, 10_000):
            assert {(await f.ask()).prefill for _ in range(8)} == {honest.url}
            assert f.router.trust.get(honest.url, 1.0) == 1.0


@in_loop
async def test_trust_comes_back_when_promises_are_kept_again():
    async with fleet(num_prefill=1) as f:
        (engine,) = f.prefill
        await f.pod(engine).store(PROMPT)
        await f.events_applied()
        for engine.cached_tokens, num_asks in ((0, 10), (320, 20)):
            for _ in range(num_asks):
                await f.ask()
            before, f.router.trust = dict(f.router.trust), dict(f.router.trust)
            assert (before[engine.url] < 0.2) == (engine.cached_tokens == 0)
        assert f.router.trust[engine.url] > 0.98


@pytest.mark.parametrize(
    "cached", [-5, 10**30, 10**400, 1e300, "320", [320], True, {}], ids=lambda one: str(one)[:40]
)
@in_loop
async def test_nonsense_about_what_was_cached_is_ignored(cached):
    async with fleet(num_prefill=1) as f:
        await f.pod(f.prefill[0]).store(PROMPT)
        await f.events_applied()
        f.prefill[0].cached_tokens = cached
        routed = await f.ask()
        assert routed.cached_tokens is None
        assert f.router.trust == {}
        assert f.of_router("reported_tokens_total", kind="prompt") == 0
        f.prefill[0].cached_tokens = 320
        assert (await f.ask()).cached_tokens == 320
        assert (await f.send("/debug/state", method="GET")).status == 200


# --- In flight ----------------------------------------------------------------------------


@in_loop
async def test_what_is_queued_at_prefill_sends_the_next_prompt_elsewhere():
    async with fleet() as f:
        for engine in f.prefill:
            engine.admitting.clear()
        asking = [asyncio.create_task(f.complete(prompt=ASKED)) for _ in range(1)]
        await until(lambda: sum(num_asked(f.prefill)) == 1)
        assert sorted(f.router.loads.inflight.requests_at(e.url)[1] for e in f.prefill) == [0, 321]
        asking.append(asyncio.create_task(f.complete(prompt=ASKED)))
        await until(lambda: sum(num_asked(f.prefill)) == 2)
        assert num_asked(f.prefill) == [1, 1]  # the same prompt would go to the same engine
        for engine in f.prefill:
            engine.admitting.set()
        await asyncio.gather(*asking)
        assert len(f.router.loads.inflight) == 0
        again = {(await f.ask()).prefill for _ in range(3)}
        assert len(again) == 1  # the control


@in_loop
async def test_every_request_in_flight_finishes_however_it_ends():
    endings = [(None, None), (reset, None), (refuse, None), (None, reset), (None, refuse),
               (None, die_in_stream), (die_in_stream, None)]  # fmt: skip
    async with fleet(num_prefill=1, limits=Limits(patience_s=0.1)) as f:
        for prefill, decode in endings:
            f.prefill[0].script, f.decode[0].script = prefill, decode
            for stream in (False, True):
                await asyncio.gather(
                    *(quietly(f, prompt=ASKED, stream=stream) for _ in range(3)),
                )
            await until(lambda: not len(f.router.loads.inflight))
            for engine in (f.prefill[0], f.decode[0]):
                engine.script = None
                f.router.engines.mark_up(engine.url)
        assert f.router.loads.inflight._requests == f.router.loads.inflight._tokens == {}


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
async def test_the_request_in_flight_of_a_client_that_leaves_finishes(stage):
    async with fleet(num_prefill=1, limits=Limits(patience_s=0.1)) as f:
        prefill, decode = f.prefill[0], f.decode[0]
        decode.tokenize = letters
        inflight = f.router.loads.inflight
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
            await until(lambda: len(inflight) == 3)  # the control: they were under way
            await until(lambda: len((prefill if stage == "prefill" else decode).seen) == 3)
        for writer in writers:
            await leave(writer)
        await until(lambda: f.outcome("client_left") == 3)
        await until(lambda: not len(inflight))
        assert inflight._requests == inflight._tokens == {}
        decode.tokenizes.set()
        await until(lambda: f.metric("inflight_requests") == 0)
