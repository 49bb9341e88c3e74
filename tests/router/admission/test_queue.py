"""The admission queue: bounded, first come, first served, and no place is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdconn.router.admission.places import AdmissionQueue
from pdconn.router.router_errors import Busy
from tests.fakes.deployment import deployment, leave
from tests.fakes.event_loop import in_loop, until


@in_loop
async def test_without_a_queue_the_next_is_refused_at_once() -> None:
    queue = AdmissionQueue(max_requests=1)
    await queue.take_place()
    with pytest.raises(Busy, match=r"1 requests are in flight$"):
        await queue.take_place()
    queue.give_place_back()
    assert queue.num_requests == 0
    await queue.take_place()


@in_loop
async def test_places_go_to_those_that_wait_in_the_order_of_their_coming() -> None:
    queue, order = AdmissionQueue(max_requests=1, max_queue=3), []
    await queue.take_place()

    async def wait(name: int) -> None:
        await queue.take_place()
        order.append(name)

    waiting = []
    for name in range(3):
        waiting.append(asyncio.create_task(wait(name)))
        await asyncio.sleep(0)
    assert len(queue) == 3
    with pytest.raises(Busy, match="1 requests are in flight, and 3 more wait"):
        await queue.take_place()
    for number in range(3):
        queue.give_place_back()
        await waiting[number]
        assert order == list(range(number + 1))
    queue.give_place_back()
    assert (queue.num_requests, len(queue)) == (0, 0)


@in_loop
async def test_one_that_comes_does_not_overtake_those_that_wait() -> None:
    queue = AdmissionQueue(max_requests=1, max_queue=2)
    await queue.take_place()
    first = asyncio.create_task(queue.take_place())
    await asyncio.sleep(0)
    queue.give_place_back()  # the first one has the place, and has not run yet
    second = asyncio.create_task(queue.take_place())
    await first
    assert not second.done()
    queue.give_place_back()
    await second


@in_loop
async def test_the_wait_is_bounded_and_told() -> None:
    waited: list[float] = []
    queue = AdmissionQueue(1, 1, 0.05, waited.append)
    await queue.take_place()
    with pytest.raises(Busy, match=r"no place became free within 0\.05 s"):
        await queue.take_place()
    assert len(waited) == 1
    assert waited[0] >= 0.05
    assert len(queue) == 0
    queue.give_place_back()
    assert queue.num_requests == 0


@pytest.mark.parametrize("seed", range(20))
@in_loop
async def test_no_place_is_lost_whatever_is_cancelled_and_when(seed: int) -> None:
    chance = random.Random(seed)
    queue = AdmissionQueue(max_requests=3, max_queue=8, max_wait_s=0.02)
    most = 0

    async def request() -> None:
        nonlocal most
        await queue.take_place()
        most = max(most, queue.num_requests)
        try:
            await asyncio.sleep(chance.random() * 0.01)
        finally:
            queue.give_place_back()

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(request()))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.002)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.num_requests, len(queue)) == (0, 0)
    assert most == 3
    assert {type(end) for end in ends} <= {type(None), Busy, asyncio.CancelledError}


@in_loop
async def test_requests_wait_for_a_place_and_are_then_served() -> None:
    async with deployment(max_requests=1, max_queue=2) as d:
        d.decode[0].admitting.clear()
        running = [asyncio.create_task(d.complete()) for _ in range(3)]
        await until(lambda: d.metric("queued_requests") == 2 and len(d.prefill[0].seen) > 0)
        assert len(d.prefill[0].seen) == 1, "one that waits has not been read"
        reply = await d.complete()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert "2 more wait" in reply.error["message"]
        d.decode[0].admitting.set()
        assert {one.status for one in await asyncio.gather(*running)} == {200}
        assert d.metric("queued_requests") == 0
        assert d.metric("queue_seconds_count") == 2
        await until(lambda: (d.outcome("ok"), d.outcome("busy")) == (3, 1))


@in_loop
async def test_one_that_waits_for_too_long_is_told_when_to_come_back() -> None:
    async with deployment(max_requests=1, max_queue=2, queue_timeout_s=0.1) as d:
        d.decode[0].admitting.clear()
        first = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)
        reply = await d.complete()
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        d.decode[0].admitting.set()
        assert (await first).status == 200


@in_loop
async def test_a_client_that_leaves_the_queue_takes_no_place() -> None:
    async with deployment(max_requests=1, max_queue=1) as d:
        d.decode[0].admitting.clear()
        first = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)
        waiting = await d.open()
        await until(lambda: d.metric("queued_requests") == 1)
        await leave(waiting)
        await until(lambda: d.metric("queued_requests") == 0)
        assert d.outcome("client_left") == 1
        d.decode[0].admitting.set()
        assert (await first).status == 200
        assert (await d.complete()).status == 200
        assert len(d.prefill[0].seen) == 2
