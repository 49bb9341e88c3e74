"""Retries and time-outs that options set: of prefill, of a whole request, of tries."""

from __future__ import annotations

import asyncio
import json
import math
import time
from functools import partial

import aiohttp
import pytest

from pdconn.router.pulls import prefill_patience
from pdconn.router.pulls.prefill_patience import LEAST_SEEN
from pdconn.router.router_server import Limits
from tests.fakes.deployment import Deployment
from tests.fakes.deployment import deployment as deployed
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, error, hang

LIMITS = Limits(first_backoff_s=60.0, patience_s=0.1, last_returns_s=0.2)
deployment = partial(deployed, limits=LIMITS)


# Retries


@pytest.mark.parametrize(("retries", "asked"), [(None, 4), (0, 1), (1, 2), (9, 4)])
@in_loop
async def test_after_a_failure_so_many_other_engines_are_asked(retries, asked) -> None:
    for role in ("prefill", "decode"):
        numbers = {"num_prefill": 4} if role == "prefill" else {"num_decode": 4}
        async with deployment(require_prefill=True, retries=retries, **numbers) as d:
            engines = getattr(d, role)
            await asyncio.gather(*(engine.stop() for engine in engines))
            assert (await d.complete()).status == 503
            tried = [d.metric("retries_total", role=role, engine=one.url) for one in engines]
            assert sum(tried) == asked


@in_loop
async def test_passed_requests_have_the_same_bound() -> None:
    async with deployment(num_prefill=2, num_decode=2, retries=1) as d:
        for engine in (*d.prefill, *d.decode):
            await engine.stop()
        assert (await d.send("/v1/embeddings", b"{}")).status == 503
        down = [d.metric("engine_up", role="prefill", engine=one.url) == 0 for one in d.prefill]
        down += [d.metric("engine_up", role="decode", engine=one.url) == 0 for one in d.decode]
        assert sum(down) == 2


@in_loop
async def test_an_engine_that_does_not_know_a_response_has_not_failed() -> None:
    async def forgets(engine, seen, http):
        return error(404, "no such response")

    async with deployment(num_decode=4, retries=0) as d:
        for engine in d.decode[:3]:
            engine.script = forgets
        for _ in range(4):
            reply = await d.complete("/v1/responses", input="x", previous_response_id="resp_1")
            assert (reply.status, reply.body) == (200, ANSWER)


# Prefill


@in_loop
async def test_a_prefill_that_takes_too_long_is_left_for_another_and_is_not_down() -> None:
    async with deployment(num_prefill=2, prefill_timeout_s=1.0) as d:
        slow, other = d.prefill
        slow.script = hang
        assert (await d.complete()).body == ANSWER
        assert d.decode[0].seen[0].params["lease"] == "lease-1"
        assert len(other.seen) == 1
        await until(lambda: slow.aborted)
        assert d.metric("engine_up", role="prefill", engine=slow.url) == 1
        assert d.metric("retries_total", role="prefill", engine=slow.url) == 1


@in_loop
async def test_decode_computes_what_no_prefill_had_the_time_for_and_that_is_its_reason() -> None:
    async with deployment(num_prefill=2, prefill_timeout_s=0.05) as d:
        for engine in d.prefill:
            engine.script = hang
        assert (await d.complete()).body == ANSWER
        assert not d.decode[0].seen[0].params
        assert d.metric("direct_requests_total", reason="no_prefill_in_time") == 1
        assert d.metric("direct_requests_total", reason="no_prefill") == 0
        assert json.loads((await d.send("/health", method="GET")).body)["status"] == "ok"


@in_loop
async def test_where_prefill_is_required_the_client_learns_that_it_was_late() -> None:
    async with deployment(prefill_timeout_s=0.05, require_prefill=True) as d:
        d.prefill[0].script = hang
        reply = await d.complete()
        assert reply.status == 503
        assert reply.error["engines"] == [
            {"engine": d.prefill[0].url, "why": "no ticket within 0.05 s"}
        ]
        assert not d.decode[0].seen


FLOOR_S = 0.5


async def taught(d: Deployment) -> None:
    """Every prefill engine has answered often enough for a limit."""
    while not all(len(engine.seen) >= LEAST_SEEN for engine in d.prefill):
        assert (await d.complete()).body == ANSWER


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learned limit is half a second at least."""
    monkeypatch.setattr(prefill_patience, "FLOOR_S", FLOOR_S)


@pytest.mark.usefixtures("hasty")
@in_loop
async def test_a_prefill_that_takes_many_times_as_long_as_usual_is_left_for_another() -> None:
    async with deployment(num_prefill=2) as d:
        await taught(d)
        d.prefill[0].script = hang
        for _ in range(2):
            assert (await d.complete()).body == ANSWER
        assert d.metric("retries_total", role="prefill", engine=d.prefill[0].url) == 1
        assert d.metric("engine_up", role="prefill", engine=d.prefill[0].url) == 1
        assert d.metric("direct_requests_total", reason="no_prefill_in_time") == 0


@pytest.mark.usefixtures("hasty")
@in_loop
async def test_one_that_stands_still_gets_no_further_requests() -> None:
    async with deployment(num_prefill=2, health_timeout_s=0.2) as d:
        await taught(d)
        stopped = d.prefill[0]
        stopped.script, stopped.health_status = hang, 503
        await asyncio.gather(d.complete(), d.complete())
        await until(lambda: d.metric("engine_up", role="prefill", engine=stopped.url) == 0)
        asked = len(stopped.seen)
        for _ in range(4):
            assert (await d.complete()).body == ANSWER
        assert len(stopped.seen) == asked


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_well", [True, False])
@in_loop
async def test_the_last_prefill_is_waited_for_while_it_is_healthy(is_well: bool) -> None:
    """What it has begun would be begun anew by decode, which has others to serve."""
    async with deployment() as d:
        await taught(d)
        (only,) = d.prefill
        only.computes.clear()
        only.health_status = 200 if is_well else 503
        asked = asyncio.create_task(d.complete())
        done, _ = await asyncio.wait([asked], timeout=4 * FLOOR_S)
        assert bool(done) != is_well
        only.computes.set()
        assert (await asked).body == ANSWER
        direct = d.metric("direct_requests_total", reason="no_prefill_in_time")
        assert direct == (0 if is_well else 1)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_down", [True, False])
@in_loop
async def test_the_last_prefill_is_the_one_that_is_the_last_when_the_time_is_up(
    is_down: bool,
) -> None:
    async with deployment(num_prefill=2) as d:
        await taught(d)
        before = [len(engine.seen) for engine in d.prefill]
        for engine in d.prefill:
            engine.computes.clear()
        asked = asyncio.create_task(d.complete())
        await until(lambda: [len(engine.seen) for engine in d.prefill] != before)
        first, other = sorted(
            d.prefill, key=lambda one: before[d.prefill.index(one)] - len(one.seen)
        )
        other.health_status = 503 if is_down else 200
        await d.send("/health", method="GET")
        assert d.metric("engine_up", role="prefill", engine=other.url) == (0 if is_down else 1)
        await asyncio.wait([asked], timeout=4 * FLOOR_S)
        assert bool(first.aborted) != is_down
        for engine in d.prefill:
            engine.computes.set()
        assert (await asked).body == ANSWER
        assert d.metric("direct_requests_total", reason="no_prefill_in_time") == 0


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("stands_still", [False, True])
@in_loop
async def test_if_all_prefills_are_slow_a_request_leaves_one_of_them_and_no_more(
    stands_still: bool,
) -> None:
    """Each would throw away what it has computed, and all would be slower still."""
    async with deployment(num_prefill=4, health_timeout_s=0.2) as d:
        await taught(d)
        for engine in d.prefill:
            engine.computes.clear()
            engine.health_status = 503 if stands_still else 200
        asked = asyncio.create_task(d.complete())
        done, _ = await asyncio.wait([asked], timeout=6 * FLOOR_S)
        left = sum(d.metric("retries_total", role="prefill", engine=one.url) for one in d.prefill)
        assert (bool(done), left) == ((True, 4) if stands_still else (False, 1))
        for engine in d.prefill:
            engine.computes.set()
        assert (await asked).body == ANSWER


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("given", [{"prefill_timeout_s": math.inf}, {"retries": 0}])
@in_loop
async def test_without_a_limit_or_another_engine_prefill_takes_as_long_as_it_likes(given) -> None:
    """The control: by default it would be left."""
    async with deployment(num_prefill=2, **given) as d:
        await taught(d)
        d.prefill[0].computes.clear()
        both = [asyncio.create_task(d.complete()) for _ in range(2)]
        done, late = await asyncio.wait(both, timeout=4 * FLOOR_S)
        assert (len(done), len(late)) == (1, 1)
        d.prefill[0].computes.set()
        assert [(await one).body for one in both] == [ANSWER, ANSWER]
        assert d.metric("retries_total", role="prefill", engine=d.prefill[0].url) == 0


# A whole request


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_an_answer_that_does_not_begin_in_time_is_504_and_no_block_stays_lent(role) -> None:
    async with deployment(request_timeout_s=1.0) as d:
        getattr(d, role)[0].script = hang
        reply = await d.complete()
        assert reply.status == 504
        assert reply.error["message"] == "no answer within 1 s"
        assert reply.error["type"] == "GatewayTimeoutError"
        assert d.outcome("timed_out") == 1
        await until(lambda: getattr(d, role)[0].aborted)
        await until(lambda: not d.leases.held)


@in_loop
async def test_an_answer_that_does_not_end_in_time_is_broken_off() -> None:
    """Its client must not take what it got for the whole."""
    async with deployment(request_timeout_s=1.0) as d:
        d.decode[0].num_chunks, d.decode[0].chunk_pause_s = 10_000, 0.01
        with pytest.raises(aiohttp.ClientError):
            await d.complete(stream=True)
        assert d.outcome("timed_out") == 1
        await until(lambda: d.decode[0].aborted)
        assert d.metric("engine_up", role="decode", engine=d.decode[0].url) == 1


@in_loop
async def test_what_is_served_in_time_is_served_whole() -> None:
    """The control: the same stream, and time enough for it."""
    async with deployment(request_timeout_s=60.0) as d:
        d.decode[0].num_chunks = 20
        assert (await d.complete(stream=True)).body == b"data: t\n\n" * 20
        assert d.outcome("ok") == 1


@in_loop
async def test_the_wait_for_a_place_counts_as_the_requests_time() -> None:
    async with deployment(
        request_timeout_s=1.0, max_requests=1, max_queue=1, queue_timeout_s=60
    ) as d:
        d.decode[0].script = hang

        async def took_s() -> float:
            began = time.monotonic()
            assert (await d.complete()).status == 504
            return time.monotonic() - began

        first, second = sorted(await asyncio.gather(took_s(), took_s()))
        assert second < 1.5 * first, "it would be twice as long if only the first did not wait"
        assert d.metric("queued_requests") == 0


@in_loop
async def test_a_passed_request_ends_in_time_too() -> None:
    async with deployment(request_timeout_s=1.0) as d:
        for engine in (*d.prefill, *d.decode):
            engine.tokenizes.clear()
            engine.tokenize = lambda seen: [1]
        assert (await d.send("/tokenize", b"{}")).status == 504
        assert d.outcome("timed_out", "/tokenize") == 1
        for engine in (*d.prefill, *d.decode):
            engine.tokenizes.set()
        assert (await d.send("/tokenize", b"{}")).status == 200
        await until(lambda: not len(d.proxy.router.loads.inflight))
