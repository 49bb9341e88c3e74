"""Prefixes that prefill pulls from their holder, at the request of the router.

Engines are fake; what they say of their caches travels over real sockets.
"""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from multidict import CIMultiDict

from pdconn.router.openai.requests import RANK_HEADER, REQUEST_ID_HEADER, Route, parse_body
from pdconn.router.prefix.hashing import Extras
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.pulls.pull_outcome import PullEnd
from pdconn.router.router_errors import BadSetting
from pdconn.router.routing.policy import PrefixAware
from pdconn.router.routing.routed_request import RoutedRequest
from tests.fakes.event_loop import in_loop
from tests.fakes.routed import ASKED, PROMPT, Fleet, letters, other_prompt
from tests.router.pulls.pulling import (
    HELD,
    asked_for,
    held_by_decode,
    num_learned,
    pull_of,
    pulling,
    returned,
)


@in_loop
async def test_prefill_gets_a_ticket_for_what_decode_holds():
    async with pulling() as f:
        holder = await held_by_decode(f)
        await f.ask()
        (lend,) = asked_for(holder)
        assert lend.body["prompt"] == ASKED[: HELD + 1]
        assert (lend.body["max_tokens"], lend.ours) == (1, {"lend": HELD})
        assert lend.params["do_remote_decode"] is True
        (prefilled,) = [seen for engine in f.prefill for seen in engine.seen]
        assert prefilled.source["remote_block_ids"] == [[1, 2], [0, 7]], "as the holder wrote it"
        assert prefilled.params["do_remote_decode"] is True
        assert prefilled.body["prompt"] == ASKED
        assert lend.headers[REQUEST_ID_HEADER] != prefilled.headers[REQUEST_ID_HEADER]
        pull = pull_of(f)
        assert (pull.holder, pull.tokens, pull.end) == (holder.url, HELD, PullEnd.TAKEN)
        assert f.metric("prefix_pulls_total", outcome="taken") == 1
        assert f.metric("prefix_pull_tokens_total") == HELD
        assert returned(f) == 0


@pytest.mark.parametrize("alone", [True, False])
@in_loop
async def test_a_request_keeps_its_tokens_only_while_prefill_may_pull_some(alone):
    """They take many times the bytes of its body, which alone are counted."""
    async with pulling() as f:
        await held_by_decode(f)
        f.router.policy = PrefixAware(alone_below=256 if alone else 0)
        body = parse_body(Route.COMPLETIONS, json.dumps({"prompt": ASKED}).encode())
        request = RoutedRequest("r", CIMultiDict(), body)
        decision = await f.router.decide(request)
        assert decision.ranking.alone == alone
        assert (request.tokens is None) == alone


@in_loop
async def test_by_default_no_holder_is_asked():
    """The control: the engines might not lend."""
    async with pulling(pull_above=None) as f:
        holder = await held_by_decode(f)
        await f.ask()
        assert asked_for(holder) == []
        assert f.routed.outcome.pull is None


@in_loop
async def test_a_pull_that_saves_too_little_is_not_worth_a_request():
    async with pulling(pull_above=HELD + 1) as f:
        holder = await held_by_decode(f)
        await f.ask()
        assert asked_for(holder) == []
        (first, *_) = f.routed.decision.ranking.prefill
        assert first.candidate.pull is not None
        assert f"of at least {HELD + 1}" in first.candidate.pull.why


@in_loop
async def test_what_shapes_block_hashes_goes_along():
    async with pulling() as f:
        await f.pod(f.decode[0]).store(other_prompt(1))  # reveals its hash scheme
        holder = await held_by_decode(f, Extras(cache_salt="s"))
        await f.ask(cache_salt="s", temperature=0.5)
        (lend,) = asked_for(holder)
        assert (lend.body["cache_salt"], lend.body["model"]) == ("s", "m")
        assert "temperature" not in lend.body
        await f.ask()
        assert len(asked_for(holder)) == 1, "without the salt no engine holds it"


@in_loop
async def test_a_chat_is_asked_for_by_its_tokens():
    async with pulling() as f:
        for engine in (*f.prefill, *f.decode):
            engine.tokenize = letters
        messages = [{"role": "user", "content": "hello " * 60}]
        tokens = [ord(letter) for letter in json.dumps(messages)]
        await f.pod(f.decode[0]).store(tokens[: len(tokens) // 16 * 16])
        await f.events_applied()
        await f.chat("hello " * 60)
        (lend,) = asked_for(f.decode[0])
        assert lend.path == "/v1/completions"
        assert lend.body["prompt"] == tokens[: len(lend.body["prompt"])]
        assert "messages" not in lend.body


@in_loop
async def test_a_rank_that_holds_it_is_named():
    async with pulling(num_prefill=2, ranks=2) as f:
        holder, other = f.prefill
        await f.pod(holder, rank=1).store(PROMPT)
        await f.events_applied()
        busy = f.router.loads.inflight.start_request(holder.url, 100_000)
        routed = await f.ask()
        busy.finish()
        assert routed.prefill == other.url
        (lend,) = asked_for(holder)
        assert lend.headers[RANK_HEADER] == "1"


@in_loop
async def test_one_that_has_requests_waiting_is_not_asked():
    async with pulling() as f:
        holder = await held_by_decode(f)
        holder.metrics_page = "vllm:num_requests_waiting 3.0\n"
        await f.router.loads.poll_now()
        await f.ask()
        assert asked_for(holder) == []
        holder.metrics_page = "vllm:num_requests_waiting 0.0\n"
        await f.router.loads.poll_now()
        await f.ask()
        assert len(asked_for(holder)) == 1


@in_loop
async def test_pulls_that_turn_out_slow_are_taken_no_more():
    """What is learned: this link takes longer than computing, so it is tried once or twice."""
    async with pulling() as f:
        holder = await held_by_decode(f)
        assert f.router.pulls is not None

        async def slow(engine, seen, http):
            await asyncio.sleep(0.4 if seen.source else 0.02)
            return await engine.answer(seen, http)

        for engine in f.prefill:
            engine.script = slow
            for tokens, seconds in ((0, 0.0), (HELD, 0.1)) * 30:  # what computing took of late
                f.router.pulls.note_computed(engine.url, tokens, seconds, time.monotonic())
        for _ in range(8):
            await f.ask()
        assert 1 <= len(asked_for(holder)) <= 2 * len(f.prefill)


@in_loop
async def test_the_page_explains_a_pull():
    async with pulling() as f:
        holder = await held_by_decode(f)
        await f.ask()
        page = await f.send(f"/debug/route/{f.routed.decision.request_id}", method="GET")
        shown = json.loads(page.body)
        assert shown["pull"]["holder"] == holder.url
        assert (shown["pull"]["tokens"], shown["pull"]["outcome"]) == (HELD, "taken")
        assert f"holds {HELD} tokens more" in shown["pull"]["why"]
        assert "to pull" in shown["prefill_order"][0]["why"]


async def stored_at_prefill(f: Fleet, prompt: list[int] = PROMPT) -> None:
    for engine in f.prefill:
        await f.pod(engine).store(prompt, medium="STORAGE", locality="LOCAL")
    await f.events_applied()


@pytest.mark.parametrize(("loads_in_s", "num_pulls"), [(0.001, 0), (1.0, 1)])
@in_loop
async def test_a_store_competes_with_a_holder(loads_in_s, num_pulls):
    """Prefill's own store has the prompt, too, and was seen to be fast, or slow."""
    async with pulling() as f:
        holder = await held_by_decode(f)
        await stored_at_prefill(f)
        assert f.router.pulls is not None
        for engine in f.prefill * 8:
            f.router.pulls.note_loaded(engine.url, HELD, 0, loads_in_s, time.monotonic())
        await f.ask()
        assert len(asked_for(holder)) == num_pulls
        page = await f.send(f"/debug/route/{f.routed.decision.request_id}", method="GET")
        shown = json.loads(page.body)["prefill_order"][0]["why"]
        assert ("to pull" if num_pulls else "to load") in shown


@in_loop
async def test_loading_is_learned_from_what_was_loaded():
    """And computing is not: control, without a store, the other way round."""
    async with pulling(pull_above=1000) as f:
        for is_stored in (False, True):
            if is_stored:
                await stored_at_prefill(f)
            before, loading = sum(num_learned(f)), f.router.pulls.chooser.loading
            await f.ask()
            seen = [loading.line_of(e.url, time.monotonic()).num_seen for e in f.prefill]
            assert (sum(num_learned(f)) - before, sum(seen)) == (int(not is_stored), int(is_stored))


@in_loop
async def test_a_holder_lends_what_is_in_its_memory_not_what_is_in_its_store():
    async with pulling() as f:
        holder = f.decode[0]
        await f.pod(holder).store(PROMPT, medium="STORAGE", locality="LOCAL")
        await f.pod(holder).store(PROMPT[:160])
        await f.events_applied()
        await f.ask()
        (lend,) = asked_for(holder)
        assert lend.ours == {"lend": 160}


def test_a_floor_that_makes_no_sense_is_refused():
    with pytest.raises(BadSetting, match="--pull-above"):
        ProxyConfig.from_options(["http://p:1"], ["http://d:1"], pull_above=0)
