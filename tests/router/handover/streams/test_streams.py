"""Decode that is asked before prefill has answered: what it is sent, and when."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pdconn.protocol.early import EarlyTicket
from pdconn.router.metric_table import EarlyStart
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.pulls.pull_outcome import PullEnd
from pdconn.router.router_server import Limits, running_proxy
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import (
    ANSWER,
    CHUNKS,
    FakeEngine,
    Seen,
    error,
)
from tests.router.handover.streams.streaming import (
    WORDS,
    ask_early,
    asked,
    hang_after_following,
    let_compute,
    returned,
    starts,
    streaming,
    teach,
)
from tests.router.pulls.pulling import held_by_decode, pull_of, pulling

# All is well


@in_loop
async def test_both_are_asked_at_once_and_decode_needs_no_ticket():
    async with streaming() as d:
        await teach(d)
        asking = await ask_early(d, stream=True)
        (prefill,), (decode,) = d.prefill[0].seen, d.decode[0].seen
        stream = prefill.ours["stream"]
        assert prefill.params["do_remote_decode"] is True
        early = EarlyTicket(d.prefill[0].boot, d.prefill[0].boot, "127.0.0.1", 7600, stream)
        assert decode.params == early.to_params()
        assert not asking.done()
        let_compute(d)
        assert (await asking).body == b"".join(CHUNKS)
        await until(lambda: not d.leases.held)
        assert starts(d) == {EarlyStart.UNKNOWN_LENDER: 1, EarlyStart.STARTED: 1}
        assert d.metric("handed_over_requests_total") == 2
        assert returned(d) == 0


@in_loop
async def test_each_request_has_a_stream_of_its_own():
    async with streaming() as d:
        await teach(d)
        await asyncio.gather(*(d.complete(prompt=f"p{i}") for i in range(20)))
        streams = [seen.ours["stream"] for seen in d.prefill[0].seen]
        assert len(set(streams)) == 20
        assert sorted(streams) == sorted(stream for _, stream in d.leases.followed)
        await until(lambda: not d.leases.held)


@in_loop
async def test_without_the_option_decode_waits_for_the_ticket():
    """The control."""
    async with deployment() as d:
        d.prefill[0].boot = "boot"
        for _ in range(2):
            assert (await d.complete()).status == 200
        assert not any("stream" in seen.ours for seen in d.prefill[0].seen)
        assert not d.leases.followed
        assert starts(d) == {}


@in_loop
async def test_an_access_log_line_and_the_page_say_when_decode_was_asked(caplog):
    caplog.set_level("INFO")
    async with streaming() as d:
        await teach(d)
        asking = await ask_early(d)
        await asyncio.sleep(0.05)
        let_compute(d)
        request_id = (await asking).headers["X-Request-Id"]
        page = json.loads((await d.send(f"/debug/route/{request_id}", method="GET")).body)
        assert 0 <= page["early_ms"] < page["ticket_ms"]
        steps = {step["step"]: step for step in page["steps"]}
        assert steps["prefill"]["start_ms"] < steps["follow"]["start_ms"]
        assert (
            steps["follow"]["end_ms"] == steps["prefill"]["end_ms"] == steps["decode"]["start_ms"]
        )
        took_ms = steps["decode"]["end_ms"] - steps["decode"]["start_ms"]
        assert page["first_byte_ms"] == pytest.approx(took_ms, abs=0.01)
        assert not any(step["failed"] for step in page["steps"])
        [line] = [text for r in caplog.records if request_id in (text := r.getMessage())]
        assert "early_seconds=0" in line


@in_loop
async def test_the_hand_over_is_measured_without_decodes_wait_for_prefill():
    """With streams and without: else a median over both would compare nothing."""
    handed_over_s = "decode_first_byte_seconds_sum"
    async with streaming() as d:
        await teach(d)
        before_s = d.metric(handed_over_s)
        asking = await ask_early(d)
        await asyncio.sleep(2)
        let_compute(d)
        await asking
        assert d.metric("time_to_ticket_seconds_sum") > 2
        assert d.metric(handed_over_s) - before_s < 1
        d.prefill[0].boot = None  # the control: decode is slow after prefill's answer
        d.decode[0].script = slow
        before_s = d.metric(handed_over_s)
        await d.complete()
        assert d.metric(handed_over_s) - before_s >= 0.1


async def slow(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    await asyncio.sleep(0.1)
    return await engine.answer(seen, http)


# Where prefill lends from


@in_loop
async def test_an_engine_of_another_connector_is_not_followed():
    async with streaming() as d:
        d.prefill[0].boot = None
        for _ in range(3):
            assert (await d.complete()).body == ANSWER
        assert not any("stream" in seen.ours for seen in d.prefill[0].seen)
        assert starts(d) == {EarlyStart.UNKNOWN_LENDER: 3}


@in_loop
async def test_an_engine_that_went_down_is_not_followed_until_it_lends_again():
    async with streaming(limits=Limits(first_backoff_s=0.05)) as d:
        await teach(d)
        await d.prefill[0].stop()
        assert (await d.complete()).status == 200
        d.prefill[0].boot = "its next boot"
        await d.prefill[0].start()
        up = {"role": "prefill", "engine": d.prefill[0].url}
        await until(lambda: d.metric("engine_up", **up) == 1)
        d.decode[0].seen.clear()
        for _ in range(2):
            assert (await d.complete()).status == 200
        assert [seen.stream is not None for seen in d.decode[0].seen] == [False, True]
        assert d.leases.followed[-1][0] == "its next boot"


@in_loop
async def test_a_ticket_of_another_boot_goes_to_decode_in_place_of_the_early_one():
    """Prefill restarts unnoticed: decode would look for the stream where it does not come."""
    async with streaming() as d:
        await teach(d)
        asking = await ask_early(d)
        d.prefill[0].boot = "its next boot"
        let_compute(d)
        assert (await asking).body == ANSWER
        early, late = d.decode[0].seen
        assert (early.stream is not None, late.params["lease"]) == (True, "lease-2")
        await until(lambda: not d.leases.held)
        d.leases.followed.clear()
        assert (await d.complete()).body == ANSWER
        assert d.leases.followed[0][0] == "its next boot", "the newest ticket counts"


@in_loop
async def test_an_engine_whose_ranks_take_turns_is_not_followed():
    async with streaming() as d:
        for boot in "ababa":
            d.prefill[0].boot = boot
            assert (await d.complete()).body == ANSWER
        last = d.prefill[0].seen[-2:]
        assert not any("stream" in seen.ours for seen in last)
        assert starts(d)[EarlyStart.UNKNOWN_LENDER] == 3
        await until(lambda: not d.leases.held)


@in_loop
async def test_an_engine_of_both_roles_is_not_to_follow_itself():
    async with deployment() as d:
        both = d.prefill[0]
        both.boot = "boot"
        config = ProxyConfig.from_options([both.url], [both.url], port=0, streams="on")
        async with running_proxy(config) as proxy:
            for _ in range(2):
                reply = await d.send(proxy.url + "/v1/completions", b'{"prompt": "x"}')
                assert reply.body == ANSWER
            counted = proxy.metrics.registry.get_sample_value(
                "pdconn_router_streams_total", {"start": EarlyStart.SAME_ENGINE.value}
            )
        assert counted == 1
        assert not d.leases.followed


@in_loop
async def test_a_chat_whose_tokens_are_reused_waits_for_them():
    async with streaming(reuse_tokens=True) as d:
        await teach(d)
        await d.complete("/v1/chat/completions")
        assert not d.leases.followed
        assert starts(d)[EarlyStart.NEEDS_TOKENS] == 1
        await d.complete()
        assert d.leases.followed, "the control: it is a completion"


# When decode is asked


@pytest.mark.parametrize("chunk", [0, 100])
@in_loop
async def test_decode_waits_while_prefill_has_more_than_a_chunk_before(chunk):
    """The first prompt has 40 tokens."""
    async with streaming(stream_chunk=chunk) as d:
        await teach(d)
        first = await ask_early(d, prompt=list(range(40)))
        second = asyncio.create_task(d.complete(prompt=[1, 2]))
        await until(lambda: len(d.prefill[0].seen) == 2)
        await asyncio.sleep(0.05)
        assert len(d.leases.followed) == (1 if chunk == 0 else 2)
        let_compute(d)
        for asking in (first, second):
            assert (await asking).body == ANSWER
        await until(lambda: not d.leases.held)
        assert returned(d) == 0


@in_loop
async def test_its_turn_comes_when_the_one_before_has_ended():
    async def ends_first(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        if seen.body["prompt"] == [1, 2]:
            await last.wait()
        else:
            await first.wait()
        return await engine.answer(seen, http)

    first, last = asyncio.Event(), asyncio.Event()
    async with streaming(stream_chunk=0) as d:
        await teach(d)
        d.prefill[0].script = ends_first
        asking = [asyncio.create_task(d.complete(prompt=p)) for p in (list(range(40)), [1, 2])]
        await until(lambda: len(d.prefill[0].seen) == 2)
        assert len(d.leases.followed) <= 1
        first.set()
        await until(lambda: len(d.leases.followed) == 2)
        assert not asking[1].done()
        last.set()
        for one in asking:
            assert (await one).body == ANSWER


@in_loop
async def test_one_whose_turn_does_not_come_is_handed_over_as_usual():
    async def second_first(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        if seen.body["prompt"] != [1, 2]:
            await last.wait()
        return await engine.answer(seen, http)

    last = asyncio.Event()
    async with streaming(stream_chunk=0) as d:
        await teach(d)
        d.prefill[0].script = second_first
        slow = asyncio.create_task(d.complete(prompt=list(range(40))))
        await until(lambda: d.prefill[0].seen)
        assert (await d.complete(prompt=[1, 2])).body == ANSWER
        assert starts(d)[EarlyStart.QUEUED] == 1
        last.set()
        assert (await slow).body == ANSWER


@in_loop
async def test_no_more_requests_than_allowed_wait_at_a_decode_engine():
    async with streaming(max_streams=2) as d:
        await teach(d)
        d.prefill[0].computes.clear()
        asking = [asyncio.create_task(d.complete(prompt=f"p{i}")) for i in range(5)]
        await until(lambda: len(d.prefill[0].seen) == 5 and len(d.leases.followed) == 2)
        await asyncio.sleep(0.05)
        assert len(d.decode[0].seen) == 2
        let_compute(d)
        for one in asking:
            assert (await one).body == ANSWER
        assert (starts(d)[EarlyStart.STARTED], starts(d)[EarlyStart.TOO_MANY]) == (2, 3)
        assert (await d.complete()).body == ANSWER
        assert starts(d)[EarlyStart.STARTED] == 3, "places are given back"


# Prefixes that prefill pulls


@in_loop
async def test_decode_is_asked_when_prefill_is_and_not_while_a_prefix_is_borrowed():
    async def lend_late(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        if "lend" in seen.ours:
            lending.set()
            await go_on.wait()
        return await engine.answer(seen, http)

    lending, go_on = asyncio.Event(), asyncio.Event()
    async with pulling(num_prefill=1, streams="on") as f:
        await f.ask()
        holder = await held_by_decode(f)
        holder.script = lend_late
        asking = asyncio.create_task(f.ask())
        await lending.wait()
        await asyncio.sleep(0.05)
        assert not f.leases.followed
        go_on.set()
        await asking
        assert f.leases.followed
        last = f.prefill[0].seen[-1]
        assert last.source
        assert last.ours["stream"] == f.leases.followed[0][1]
        assert pull_of(f).end is PullEnd.TAKEN


@in_loop
async def test_a_prompt_that_prefill_computes_after_a_failed_pull_has_no_stream():
    """The stream ended with the request that failed, so decode is asked anew."""

    async def cannot_pull(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
        if seen.source:
            await until(lambda: f.leases.followed)
            return error(500, WORDS)
        return await engine.answer(seen, http)

    async with pulling(num_prefill=1, streams="on") as f:
        await f.ask()
        await held_by_decode(f)
        f.prefill[0].script = cannot_pull
        f.decode[0].script = hang_after_following
        await f.ask()
        first, second = f.prefill[0].seen[-2:]
        assert ("stream" in first.ours, "stream" in second.ours) == (True, False)
        early, late = [seen for seen in asked(f.decode[0]) if "lend" not in seen.ours][-2:]
        assert early.stream is not None
        assert late.params["lease"] == f"lease-{f.leases.granted}"


# The fake's own word


@in_loop
async def test_the_fake_decode_follows_the_fake_prefill():
    """The control of all above: it waits for its prefill, and counts what it pulled."""
    async with streaming() as d:
        await teach(d)
        pulls = d.decode[0].counts["pdconn:pulls_total"]
        asking = await ask_early(d)
        await asyncio.sleep(0.05)
        assert d.decode[0].counts["pdconn:pulls_total"] == pulls
        let_compute(d)
        await asking
        assert d.decode[0].counts["pdconn:pulls_total"] == pulls + 1
