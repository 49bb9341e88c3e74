"""Pulls that fail: the prompt is computed all the same, and every ticket comes back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.pulls.pull_outcome import PullEnd
from tests.fakes.deployment import leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import hang, reset
from tests.fakes.routed import ASKED, Fleet
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
async def test_a_holder_that_lost_the_prefix_is_asked_again_some_other_time():
    async with pulling() as f:
        holder = await held_by_decode(f)
        holder.held_tokens = 16
        for number in (1, 2):
            routed = await f.ask()
            assert routed.prefill is not None
            assert pull_of(f).end is PullEnd.REFUSED
            assert len(asked_for(holder)) == number
        assert not any(seen.source for engine in f.prefill for seen in engine.seen)
        assert f.metric("prefix_pulls_total", outcome="refused") == 2


@in_loop
async def test_an_engine_that_lends_nothing_is_left_alone(caplog):
    async with pulling() as f:
        holder = await held_by_decode(f)
        holder.lends = False
        for _ in range(3):
            await f.ask()
        assert len(asked_for(holder)) == 1
        warned = [one.getMessage() for one in caplog.records if "lends no prefix" in one.message]
        assert len(warned) == 1
        assert holder.url in warned[0]


@in_loop
async def test_a_refusal_that_a_client_can_cause_does_not_rest_the_holder():
    """Else a wrong model's name would switch pulls off for all."""
    async with pulling() as f:
        holder = await held_by_decode(f)
        for engine in f.prefill:
            engine.checks_names = True
        holder.checks_names = True
        assert (await f.complete(prompt=ASKED, model="no such model")).status == 404
        assert pull_of(f).end is PullEnd.REFUSED
        await f.ask()
        assert pull_of(f).end is PullEnd.TAKEN


@in_loop
async def test_a_holder_that_answers_late_delays_no_longer_than_computing_would_take():
    """Its ticket, when it comes, is returned."""
    async with pulling() as f:
        holder = await held_by_decode(f)
        holder.admitting.clear()
        began = time.monotonic()
        asking = asyncio.create_task(f.complete(prompt=ASKED))
        await until(lambda: any(engine.seen for engine in f.prefill))
        assert time.monotonic() - began < 20.0
        holder.admitting.set()
        assert (await asking).status == 200
        assert pull_of(f).end is PullEnd.LATE
        assert pull_of(f).took_s < 2 * 2.0
        await until(lambda: returned(f) == 1)


@in_loop
async def test_a_holder_that_dies_costs_a_prompt_that_is_computed():
    async with pulling(num_decode=2) as f:
        holder = await held_by_decode(f)
        holder.script = reset
        await f.ask()
        assert pull_of(f).end is PullEnd.FAILED
        assert f.routed.decode == f.decode[1].url, "the holder is down"


@in_loop
async def test_a_ticket_whose_prefill_dies_is_returned_and_another_one_computes():
    async with pulling(num_prefill=2) as f:
        holder = await held_by_decode(f)
        for engine in f.prefill:
            engine.script = _reset_the_first_one(f)
        routed = await f.ask()
        assert routed.outcome.pull is not None
        assert routed.outcome.pull.end is PullEnd.FAILED
        assert len(asked_for(holder)) == 1
        sources = [bool(seen.source) for engine in f.prefill for seen in engine.seen]
        # The one that died may have been asked once more, on a new connection.
        assert sources.count(False) == 1 <= sources.count(True)
        await until(lambda: returned(f) == 1)


@pytest.mark.parametrize(("status", "times_asked"), [(500, 2), (400, 1)])
@in_loop
async def test_a_prefill_engine_that_fails_failed_pulls_is_asked_to_compute(status, times_asked):
    """vLLM answers 500 where the holder was lost on the way; other refusals are the client's."""
    async with pulling(num_prefill=1) as f:
        await held_by_decode(f)

        async def script(engine, seen, http):
            if seen.source:
                return web.json_response({"error": {"message": "KV load failed"}}, status=status)
            return await engine.answer(seen, http)

        for engine in f.prefill:
            engine.script = script
        learned = num_learned(f)
        answer = await f.complete(prompt=ASKED)
        assert answer.status == (200 if status == 500 else status)
        assert num_learned(f) == learned, "computing did not take as long as both"
        assert pull_of(f).end is PullEnd.FAILED
        sources = [bool(seen.source) for engine in f.prefill for seen in engine.seen]
        assert sources == [True, False][:times_asked]
        await until(lambda: returned(f) == 1)
        assert f.metric("prefix_pulls_total", outcome="failed") == 1
        await f.complete(prompt=ASKED)
        assert len(asked_for(f.decode[0])) == (1 if status == 500 else 2)


def _reset_the_first_one(f: Fleet) -> Any:
    async def script(engine, seen, http):
        if seen.source:
            return await reset(engine, seen, http)
        return await engine.answer(seen, http)

    return script


@pytest.mark.parametrize(
    ("cached", "end", "num_returned"),
    [(HELD, PullEnd.TAKEN, 0), (16, PullEnd.UNUSED, 1), (None, PullEnd.TAKEN, 1)],
    ids=["pulled", "computed", "does not say"],
)
@in_loop
async def test_a_ticket_that_prefill_may_not_have_used_is_returned(cached, end, num_returned):
    async with pulling() as f:
        await held_by_decode(f)
        for engine in f.prefill:
            engine.cached_tokens = cached
        await f.ask()
        assert pull_of(f).end is end
        await until(lambda: returned(f) == num_returned)
        assert f.metric("prefix_pull_tokens_total") == (0 if end is PullEnd.UNUSED else HELD)
        assert all(f.router.trust.get(engine.url, 1.0) == 1.0 for engine in f.prefill)


@pytest.mark.parametrize(("cached", "times_asked"), [(16, 1), (HELD, 2)])
@in_loop
async def test_a_holder_whose_ticket_was_of_no_use_is_not_asked_again_for_that_engine(
    cached, times_asked
):
    """Each prompt would wait until prefill gives a holder up that it cannot reach."""
    async with pulling(num_prefill=1) as f:
        holder = await held_by_decode(f)
        for engine in f.prefill:
            engine.cached_tokens = cached
        for _ in range(2):
            await f.ask()
        assert len(asked_for(holder)) == times_asked


@pytest.mark.parametrize("stage", ["holder", "prefill"])
@in_loop
async def test_a_client_that_leaves_leaves_nothing_lent(stage):
    async with pulling() as f:
        holder = await held_by_decode(f)
        if stage == "holder":
            holder.admitting.clear()
        for engine in f.prefill:
            engine.script = hang
        writer = await f.open(prompt=ASKED)
        if stage == "holder":
            await until(lambda: holder.seen)
        else:
            await until(lambda: any(engine.seen for engine in f.prefill))
        await leave(writer)
        await until(lambda: f.outcome("client_left") == 1)
        holder.admitting.set()
        await until(lambda: f.leases.granted == 1 and not f.leases.held)
