"""Measures everyone, round by round.

A turn begins with requests that are not counted: what was frozen has lost its caches, and
the first hand-over between two engines is their greeting.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdconn.bench.errors import BadCase
from pdconn.bench.serving.client import Service, TargetFailed, service
from pdconn.bench.serving.contestants import Contestant
from pdconn.bench.serving.replies import FailedReply, Reply, Taken
from pdconn.bench.serving.schedule import due_times, order, prompts
from pdconn.lab.quiet import Neighbours

Say = Callable[[str], None]
Ask = Callable[[int, float | None], Awaitable[Reply]]

WAKING = 2
_WAKING_TOKENS = 4


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What everyone is asked.

    ``rate`` is requests per second that come by themselves; None for ``concurrency``
    clients who each send their next request when the last is answered.  ``model`` is what
    services call it; None: the first that each says it serves.

    Raises:
        BadCase: a value that cannot be meant.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    rounds: int
    rate: float | None = None
    concurrency: int = 1
    seed: int = 0
    timeout_s: float = 120.0
    model: str | None = None

    def __post_init__(self) -> None:
        for field, value, least in (
            ("prompt", self.prompt_tokens, 1),
            ("output", self.output_tokens, 1),
            ("requests", self.requests, 1),
            ("rounds", self.rounds, 1),
            ("concurrency", self.concurrency, 1),
        ):
            if value < least:
                raise BadCase(field, f"at least {least}", value)
        for field, seconds in (("rate", self.rate), ("timeout", self.timeout_s)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise BadCase(field, "more than 0", seconds)


def measure(
    contestants: Sequence[Contestant], plan: RunPlan, say: Say, *, watch: bool
) -> list[Taken]:
    """Every contestant's turn of every round.

    ``watch``: note what other programs take of this machine, where everything that is
    measured was started by this process.

    Raises:
        TargetFailed: a contestant answers none of the first requests.
        LabError: an engine of our own died.
    """
    by_name = {one.name: one for one in contestants}
    taken = []
    for number in range(1, plan.rounds + 1):
        for name in order(list(by_name), number):
            with by_name[name].awake() as url:
                turn = asyncio.run(_turn(name, url, plan, number, watch))
            taken.append(turn)
            say(f"round {number} of {plan.rounds}: {name}: {_in_words(turn)}")
    return taken


async def _turn(name: str, url: str, plan: RunPlan, number: int, watch: bool) -> Taken:
    async with service(name, url, plan.model, plan.timeout_s) as asked:
        await _wake(asked, name, url, plan, number)
        neighbours = Neighbours([os.getpid()]) if watch else None
        wanted = prompts(plan.requests, plan.prompt_tokens, plan.seed, number)

        def ask(prompt: int, due_s: float | None) -> Awaitable[Reply]:
            return asked.ask(prompt, wanted[prompt], plan.output_tokens, due_s)

        began_s = time.perf_counter()
        if plan.rate is None:
            replies = await in_closed_loop(ask, plan.requests, plan.concurrency)
        else:
            replies = await when_due(
                ask, due_times(plan.requests, plan.rate, plan.seed, number), began_s
            )
        seconds = time.perf_counter() - began_s
        others = None if neighbours is None else neighbours.share()
        told = [await asked.with_handover(reply) for reply in replies]
    return Taken(number, name, tuple(told), seconds, others)


async def in_closed_loop(ask: Ask, count: int, concurrency: int) -> list[Reply]:
    """``concurrency`` clients share ``count`` prompts; each waits for its answer."""
    replies: dict[int, Reply] = {}
    left = iter(range(count))

    async def client() -> None:
        for prompt in left:
            replies[prompt] = await ask(prompt, None)

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, count)):
            clients.create_task(client())
    return [replies[prompt] for prompt in range(count)]


async def when_due(ask: Ask, due_s: Sequence[float], began_s: float) -> list[Reply]:
    """Each request at its time after ``began_s``, whoever still waits for an answer."""

    async def one(prompt: int, at_s: float) -> Reply:
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        return await ask(prompt, at_s)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(one(prompt, began_s + after_s))
            for prompt, after_s in enumerate(due_s)
        ]
    return [task.result() for task in tasks]


async def _wake(asked: Service, name: str, url: str, plan: RunPlan, number: int) -> None:
    """Requests that are not counted.  Where nobody answers the first time, nobody will."""
    tokens = min(_WAKING_TOKENS, plan.output_tokens)
    replies = [
        await asked.ask(prompt, words, tokens)
        for prompt, words in enumerate(prompts(WAKING, plan.prompt_tokens, plan.seed, -number))
    ]
    failed = [reply for reply in replies if isinstance(reply, FailedReply)]
    if number == 1 and len(failed) == len(replies):
        raise TargetFailed(name, url, failed[-1].why)


def _in_words(turn: Taken) -> str:
    failed = [reply for reply in turn.replies if isinstance(reply, FailedReply)]
    said = f"{len(turn.replies)} requests in {turn.seconds:.1f} s"
    if failed:
        said += f", {len(failed)} failed: {failed[0].why}"
    return said
