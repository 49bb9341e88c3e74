"""Tickets for prefixes whose request is given up in any turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.handover.prefix_pull import PrefixPulls
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.pulls.pull_choice import Holder, PullChoice
from pdconn.router.pulls.pull_outcome import PullEnd
from pdconn.router.routing.policy import Candidate
from pdconn.router.routing.routed_request import RoutedRequest
from tests.fakes.event_loop import in_loop

TURNS = 8
ANSWER = b'{"kv_transfer_params": {"do_remote_prefill": true, "lease": "a"}}'
TOKENS = list(range(65))


class Holding:
    """A client of a holder that answers on demand, and the tickets that are returned."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.returned: list[Raw] = []

    async def post_body(self, *asked: Any) -> Holding:
        await self.answers.wait()
        return self

    status = 200

    async def read_rest(self) -> bytes:
        return ANSWER

    async def __aenter__(self) -> Holding:
        return self

    async def __aexit__(self, *why: object) -> None: ...

    def give_back(self, request: RoutedRequest, ticket: Raw) -> None:
        self.returned.append(ticket)


def made(holding: Holding, planner: PullPlanner | None = None) -> PrefixPulls:
    parts: Any = (holding, None, holding)
    return PrefixPulls(planner or PullPlanner.from_floor(1), *parts)


def borrowing(pulls: PrefixPulls, patience_s: float) -> tuple[RoutedRequest, asyncio.Task[Any]]:
    body = parse_body(Route.COMPLETIONS, b'{"prompt": [1]}')
    request = RoutedRequest("r", CIMultiDict(), body, tokens=TOKENS)
    choice = PullChoice(Holder("h", 64), 0.0, patience_s, "", saved=64)
    task = asyncio.create_task(pulls.borrow(request, Candidate("p", pull=choice)))
    return request, task


@pytest.mark.parametrize("turns", range(TURNS))
@in_loop
async def test_a_client_that_leaves_in_any_turn_loses_no_ticket(turns):
    holding = Holding()
    pulls = made(holding)
    _, task = borrowing(pulls, 60.0)
    await asyncio.sleep(0.01)
    holding.answers.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await pulls.close(1.0)
    borrowed = None if task.cancelled() else task.result()
    assert len(holding.returned) == (borrowed is None)


@in_loop
async def test_some_of_them_left_before_the_ticket_came_and_some_after():
    """The control: the turns reach from before the answer until behind it."""
    ends = []
    for turns in range(TURNS):
        holding = Holding()
        pulls = made(holding)
        _, task = borrowing(pulls, 60.0)
        await asyncio.sleep(0.01)
        holding.answers.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        ends.append(task.done())
        task.cancel()
        await asyncio.wait([task])
        await pulls.close(1.0)
    assert (ends[0], ends[-1]) == (False, True)


@in_loop
async def test_a_ticket_that_comes_when_the_wait_ends_is_used_or_returned(monkeypatch):
    """The wait ends in the very turn in which the answer is there."""
    holding = Holding()
    pulls = made(holding)
    request, task = borrowing(pulls, 0.05)
    await asyncio.sleep(0)
    deadline = asyncio.get_running_loop().time() + 0.05
    while asyncio.get_running_loop().time() < deadline - 0.002:
        await asyncio.sleep(0)
    holding.answers.set()
    borrowed = await task
    await pulls.close(1.0)
    assert request.pull is not None
    assert (request.pull.end is PullEnd.LATE) == (borrowed is None)
    assert len(holding.returned) == (borrowed is None)


@in_loop
async def test_a_holder_that_never_answers_is_given_up_and_lends_again():
    holding = Holding()
    planner = PullPlanner.from_floor(1)
    pulls = made(holding, planner)
    request, task = borrowing(pulls, 0.05)
    assert await task is None
    assert request.pull is not None
    assert (request.pull.end, request.tokens) == (PullEnd.LATE, None)
    holders = [Holder("h", 5000)]
    for _ in range(16):
        planner.note_computed("p", 5000, 5.0, 0.0)
    busy = [planner.start_lending("h") for _ in range(3)]  # and the one that still waits
    assert planner.choose("p", 5001, 0, holders, 0.0).holder is None
    await pulls.close(0.0)
    assert planner.choose("p", 5001, 0, holders, 0.0).holder is not None
    for over in busy:
        over()
