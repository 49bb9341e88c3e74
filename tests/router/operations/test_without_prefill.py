"""Requests without a ticket: decode computes prompts itself, unless prefill is required.

The share that is handed over is counted, with the reasons of the rest.
"""

from __future__ import annotations

import json
from functools import partial

import pytest

from pdconn.router.openai.requests import Direct
from pdconn.router.router_server import Limits
from pdconn.router.routing.policy import POLICIES
from tests.fakes.deployment import deployment as deployed
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, error, reset

deployment = partial(deployed, limits=Limits(first_backoff_s=0.05, last_returns_s=0.2))


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
    async with deployment(require_prefill=True) as d:
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
        return error(400, "too long")

    async with deployment() as d:
        d.prefill[0].script = refuse
        reply = await d.complete()
        assert (reply.status, reply.error["message"]) == (400, "too long")
        assert d.metric("direct_requests_total", reason="no_prefill") == 0


@in_loop
async def test_what_prefill_does_not_lend_is_refused_where_prefill_is_required():
    async with deployment(require_prefill=True) as d:
        d.prefill[0].lends = False
        reply = await d.complete()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert "not handed over: no_ticket" in reply.error["message"]
        assert not d.decode[0].seen
        assert d.outcome("no_handover") == 1
        d.prefill[0].lends = True
        assert (await d.complete()).body == ANSWER


@in_loop
async def test_a_spent_ticket_is_not_computed_again_where_prefill_is_required():
    async with deployment(num_decode=2, require_prefill=True) as d:
        d.decode[0].script = reset
        reply = await d.complete()
        assert reply.status == 503
        assert "not handed over: ticket_spent" in reply.error["message"]
        assert not d.decode[1].seen
        assert (await d.complete()).body == ANSWER, "another one is handed over to the other engine"


@pytest.mark.parametrize("required", [False, True])
@in_loop
async def test_what_no_ticket_could_serve_is_served_either_way(required):
    async with deployment(require_prefill=required) as d:
        assert (await d.complete(n=2)).status == 200
        assert (await d.complete("/v1/responses", background=True)).status == 200
        assert d.outcome("no_handover") == 0


def share(d) -> float:
    """As docs/metrics.md computes it, over all time."""
    direct = sum(
        d.metric("direct_requests_total", reason=reason.value)
        for reason in Direct
        if reason is not Direct.PREFIX_HELD
    )
    handed_over = d.metric("handed_over_requests_total")
    return handed_over / (handed_over + direct)


@in_loop
async def test_every_answer_of_decode_counts_once_as_handed_over_or_with_a_reason():
    async with deployment(num_decode=2) as d:
        await d.complete()
        assert share(d) == 1
        await d.complete(n=2)
        assert share(d) == 1 / 2
        d.prefill[0].lends = False
        await d.complete()
        d.prefill[0].lends = True
        d.decode[0].script = d.decode[1].script = None
        await d.complete()
        assert share(d) == 2 / 4
        d.decode[0].script = reset  # whichever turn it is, one of two requests meets it
        await d.complete()
        await d.complete()
        assert d.metric("direct_requests_total", reason="ticket_spent") == 1
        assert d.outcome("ok") == 6
        assert share(d) == 3 / 6


@in_loop
async def test_what_decode_did_not_answer_counts_as_neither():
    async def refuse(engine, seen, http):
        return error(400, "too long")

    async with deployment() as d:
        d.prefill[0].script = refuse
        await d.complete()
        d.prefill[0].script = None
        await d.decode[0].stop()
        await d.complete()
        await d.complete(n=2)
        assert d.metric("handed_over_requests_total") == 0
        assert all(d.metric("direct_requests_total", reason=one.value) == 0 for one in Direct)
