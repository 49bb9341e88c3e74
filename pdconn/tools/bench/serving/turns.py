"""Measures all contestants, round by round.

A turn begins with warm-up requests that are not counted: frozen processes have cold caches, and the
first handover between two engines includes their handshake.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdconn.tools.bench.bench_errors import BadOption
from pdconn.tools.bench.serving.contestants import Contestant
from pdconn.tools.bench.serving.replies import FailedReply, Reply, TurnResult
from pdconn.tools.bench.serving.schedule import due_times, order, prompts
from pdconn.tools.bench.serving.service import Service, TargetFailed, service
from pdconn.tools.lab.quiet import Neighbours
from pdconn.tools.output.progress_line import LogStep

Ask = Callable[[int, float | None], Awaitable[Reply]]

WARMUP_REQUESTS = 2
_WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The load that every contestant receives.

    ``rate`` is requests per second, independent of answers; None for ``concurrency`` clients that
    each wait for an answer before the next request.  ``model`` is the model's name at services;
    None for the first that each lists.

    Raises:
        BadOption: an invalid value.
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
                raise BadOption(field, f"at least {least}", value)
        for field, seconds in (("rate", self.rate), ("timeout", self.timeout_s)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise BadOption(field, "more than 0", seconds)


def measure(
    contestants: Sequence[Contestant], plan: RunPlan, log_step: LogStep, *, watch: bool
) -> list[TurnResult]:
    """Measure every contestant in every round.

    ``watch``: measure the CPU share of other processes, if this process started everything that is
    measured.

    Raises:
        TargetFailed: a contestant answers none of the first requests.
        LabError: a local engine died.
    """
    by_name = {one.name: one for one in contestants}
    turns = []
    for number in range(1, plan.rounds + 1):
        for name in order(list(by_name), number):
            with by_name[name].active() as url:
                admin = by_name[name].admin_of(url)
                turn = asyncio.run(_turn(name, url, plan, number, admin=admin, watch=watch))
            turns.append(turn)
            log_step(f"round {number} of {plan.rounds}: {name}: {_in_words(turn)}")
    return turns


async def _turn(
    name: str, url: str, plan: RunPlan, number: int, *, admin: str | None, watch: bool
) -> TurnResult:
    async with service(name, url, plan.model, plan.timeout_s, admin=admin) as target:
        await _warm_up(target, name, url, plan, number)
        neighbours = Neighbours([os.getpid()]) if watch else None
        wanted = prompts(plan.requests, plan.prompt_tokens, plan.seed, number)

        def ask(prompt: int, due_s: float | None) -> Awaitable[Reply]:
            return target.complete_prompt(prompt, wanted[prompt], plan.output_tokens, due_s)

        began_s = time.perf_counter()
        if plan.rate is None:
            replies = await in_closed_loop(ask, plan.requests, plan.concurrency)
        else:
            replies = await when_due(
                ask, due_times(plan.requests, plan.rate, plan.seed, number), began_s
            )
        seconds = time.perf_counter() - began_s
        others = None if neighbours is None else neighbours.share()
        replies = [await target.with_handover(reply) for reply in replies]
    return TurnResult(number, name, tuple(replies), seconds, others)


async def in_closed_loop(ask: Ask, count: int, concurrency: int) -> list[Reply]:
    """Send ``count`` prompts from ``concurrency`` clients; each waits for its answer."""
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
    """Send each request at its time after ``began_s``, regardless of pending answers."""

    async def one(prompt: int, at_s: float) -> Reply:
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        return await ask(prompt, at_s)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(one(prompt, began_s + after_s))
            for prompt, after_s in enumerate(due_s)
        ]
    return [task.result() for task in tasks]


async def _warm_up(target: Service, name: str, url: str, plan: RunPlan, number: int) -> None:
    """Send uncounted requests; fail if all requests of the first round are unanswered."""
    tokens = min(_WARMUP_TOKENS, plan.output_tokens)
    replies = [
        await target.complete_prompt(prompt, token_ids, tokens)
        for prompt, token_ids in enumerate(
            prompts(WARMUP_REQUESTS, plan.prompt_tokens, plan.seed, -number)
        )
    ]
    failed = [reply for reply in replies if isinstance(reply, FailedReply)]
    if number == 1 and len(failed) == len(replies):
        raise TargetFailed(name, url, failed[-1].reason)


def _in_words(turn: TurnResult) -> str:
    failed = [reply for reply in turn.replies if isinstance(reply, FailedReply)]
    text = f"{len(turn.replies)} requests in {turn.seconds:.1f} s"
    if failed:
        text += f", {len(failed)} failed: {failed[0].reason}"
    return text
