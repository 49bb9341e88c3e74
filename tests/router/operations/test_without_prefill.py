"""Prefill is down: decode computes prompts itself, unless it was told to refuse."""

from __future__ import annotations

import json
from functools import partial

import pytest

from pdconn.router.config import ProxyConfig
from pdconn.router.errors import BadSetting
from pdconn.router.routing.policy import POLICIES
from pdconn.router.server import Limits
from tests.fakes import fake_engine
from tests.fakes.fake_engine import ANSWER, in_loop, reset, until

deployment = partial(fake_engine.deployment, limits=Limits(first_backoff_s=0.05))


async def health(d) -> tuple[int, str, int]:
    """Status and word of ``/health``, and the status of ``/readyz``."""
    reply = await d.send("/health", method="GET")
    ready = await d.send("/readyz", method="GET")
    return reply.status, json.loads(reply.body)["status"], ready.status


@pytest.mark.parametrize("policy", list(POLICIES))
@in_loop
async def test_decode_answers_while_prefill_is_down(policy):
    """With decode alive every request got 503: the outage of one role was the service's."""
    async with deployment(num_prefill=2, policy=policy) as d:
        assert await health(d) == (200, "ok", 200)
        for engine in d.prefill:
            await engine.stop()
        for number in range(1, 4):  # tried without success, then known to be down
            reply = await d.complete()
            assert (reply.status, reply.body) == (200, ANSWER)
            assert "kv_transfer_params" not in d.decode[0].seen[-1].body
            assert d.metric("direct_requests_total", reason="no_prefill") == number
        assert d.metric("direct_requests_total", reason="prefix_held") == 0
        assert await health(d) == (200, "degraded", 200)
        decided = json.loads((await d.send("/debug/state", method="GET")).body)["decisions"][0]
        assert decided["alone"]
        assert (decided["prefill"], decided["decode"]) == (None, d.decode[0].url)
        for engine in d.prefill:
            await engine.start()
        await until(lambda: d.metric("engine_up", role="prefill", engine=d.prefill[0].url))
        assert (await d.complete()).status == 200
        assert d.leases.granted == 1, "prefill is used again"


@in_loop
async def test_a_prefill_that_dies_with_the_request_costs_it_nothing():
    async with deployment() as d:
        d.prefill[0].script = reset
        assert (await d.complete()).body == ANSWER
        assert d.metric("direct_requests_total", reason="no_prefill") == 1
        assert d.outcome("ok") == 1


@in_loop
async def test_requests_are_refused_where_decode_shall_not_compute_prompts():
    async with deployment(without_prefill="refuse") as d:
        await d.prefill[0].stop()
        for _ in range(2):
            reply = await d.complete()
            assert reply.status == 503
            assert reply.error["role"] == "prefill"
        assert not d.decode[0].seen
        assert d.metric("direct_requests_total", reason="no_prefill") == 0
        assert await health(d) == (503, "unavailable", 503)
        assert (await d.complete(n=2)).status == 200, "prefill would not have been asked"


@in_loop
async def test_without_decode_nothing_helps():
    async with deployment() as d:
        await d.decode[0].stop()
        assert (await d.complete()).status == 503
        assert await health(d) == (503, "unavailable", 503)


@in_loop
async def test_what_prefill_refuses_is_not_taken_for_an_outage():
    """Its own error reaches the client: decode would refuse the same body later."""

    async def refuse(engine, seen, http):
        return fake_engine.error(400, "too long")

    async with deployment() as d:
        d.prefill[0].script = refuse
        reply = await d.complete()
        assert (reply.status, reply.error["message"]) == (400, "too long")
        assert d.metric("direct_requests_total", reason="no_prefill") == 0


def test_another_word_is_refused():
    with pytest.raises(BadSetting, match=r"--without-prefill: expected one of decode, refuse"):
        ProxyConfig.of(["http://p:1"], ["http://d:1"], without_prefill="wait")
