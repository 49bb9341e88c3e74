"""How turns are taken: the pace of requests, and which engines run."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdconn.tools.bench.serving.contestants import (
    LocalEngines,
    Target,
    TooLittleMemory,
    running_contestants,
)
from pdconn.tools.bench.serving.replies import CompleteReply, FailedReply, Reply
from pdconn.tools.bench.serving.service import service
from pdconn.tools.bench.serving.turns import (
    WARMUP_REQUESTS,
    RunPlan,
    in_closed_loop,
    measure,
    when_due,
)
from pdconn.tools.lab.engine import no_progress
from pdconn.tools.lab.lab_errors import EngineDied
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import PATIENCE_S, in_loop
from tests.fakes.fake_engine import FakeEngine, Seen, hang
from tests.fakes.openai_server import MODEL, serving


def nothing(prompt: int) -> Reply:
    return FailedReply(prompt, 0.0, "asked by a test")


# The pace


@in_loop
async def test_a_closed_loop_asks_everything_and_never_more_at_a_time() -> None:
    running, most, asked = 0, 0, []

    async def ask(prompt: int, due_s: float | None) -> Reply:
        nonlocal running, most
        assert due_s is None
        asked.append(prompt)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return nothing(prompt)

    replies = await in_closed_loop(ask, 10, 3)
    assert [reply.prompt for reply in replies] == list(range(10)) == sorted(asked)
    assert most == 3


@in_loop
async def test_requests_that_are_due_do_not_wait_for_answers() -> None:
    everyone = asyncio.Event()
    began: list[tuple[int, float, float]] = []

    async def ask(prompt: int, due_s: float | None) -> Reply:
        assert due_s is not None
        began.append((prompt, due_s, time.perf_counter()))
        if len(began) == 3:
            everyone.set()
        await everyone.wait()
        return nothing(prompt)

    start_s = time.perf_counter()
    async with asyncio.timeout(PATIENCE_S):
        replies = await when_due(ask, [0.0, 0.05, 0.1], start_s)
    assert [reply.prompt for reply in replies] == [0, 1, 2]
    assert [due_s - start_s for _, due_s, _ in began] == pytest.approx([0.0, 0.05, 0.1])
    assert all(at_s >= due_s for _, due_s, at_s in began)


@in_loop
async def test_a_request_that_is_sent_late_counts_from_when_it_was_due() -> None:
    late_s = 100.0
    with serving() as server:
        async with service("one", server.url, MODEL, PATIENCE_S) as asked:
            on_time = await asked.complete_prompt(0, (4, 5), 2)
            late = await asked.complete_prompt(1, (4, 5), 2, time.perf_counter() - late_s)
    assert isinstance(on_time, CompleteReply)
    assert isinstance(late, CompleteReply)
    assert on_time.ttft_s < late_s < late.ttft_s


@in_loop
async def test_an_answer_that_takes_too_long_has_failed() -> None:
    async with deployment() as d:
        d.prefill[0].script = hang
        async with service("one", d.proxy.url, MODEL, timeout_s=0.2) as asked:
            reply = await asked.complete_prompt(0, (4, 5), 2)
    assert isinstance(reply, FailedReply)
    assert reply.reason == "no complete answer within 0.2 s"


# Through the router


PREFILL_S = 0.2


async def _slow_prefill(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    await asyncio.sleep(PREFILL_S)
    return engine.prefill_answer()


async def _tokens(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(http)
    for position in range(seen.body["max_tokens"]):
        last = position == seen.body["max_tokens"] - 1
        choice: dict[str, Any] = {"token_ids": [position], "text": ""}
        choice["finish_reason"] = "length" if last else None
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    await response.write_eof()
    return response


@in_loop
async def test_a_handover_is_what_is_left_of_the_first_tokens_time_after_prefill() -> None:
    async with deployment() as d:
        d.prefill[0].script, d.decode[0].script = _slow_prefill, _tokens
        plan = RunPlan(20, 4, requests=3, rounds=1, concurrency=3)
        target = Target("pd", d.proxy.url, d.proxy.admin_url)
        [turn] = await asyncio.to_thread(measure, [target], plan, lambda _: None, watch=False)
        assert len(d.decode[0].seen) == WARMUP_REQUESTS + 3
        for reply in turn.replies:
            assert isinstance(reply, CompleteReply)
            assert reply.content.tokens == (0, 1, 2, 3)
            assert reply.handover_s is not None
            assert reply.handover_s > 0
            # Timers may be a hair early; the proxy rounds to microseconds.
            assert reply.ttft_s - reply.handover_s > 0.95 * PREFILL_S


# Processes that are awake


class Puppet:
    """In an engine's place: notes what is done to it."""

    url = "http://puppet"

    def __init__(self, dead: bool = False) -> None:
        self.dead = dead
        self.done: list[str] = []

    def check_alive(self) -> None:
        if self.dead:
            raise EngineDied("puppet", 1, Path("log"), "")

    def resume(self) -> None:
        self.done.append("resume")

    def pause(self) -> None:
        if self.dead:
            raise ProcessLookupError
        self.done.append("pause")


def ours(puppet: Puppet, directory: Path) -> LocalEngines:
    return LocalEngines("single", (puppet,), directory)  # type: ignore[arg-type]


def test_engines_run_in_their_turn_only_however_it_ends(tmp_path: Path) -> None:
    puppet = Puppet()
    with ours(puppet, tmp_path).active() as url:
        assert (url, puppet.done) == (puppet.url, ["resume"])
    assert puppet.done == ["resume", "pause"]
    with pytest.raises(KeyError), ours(puppet, tmp_path).active():
        raise KeyError
    assert puppet.done[2:] == ["resume", "pause"]


def test_the_turn_of_a_dead_engine_says_that_it_died(tmp_path: Path) -> None:
    with pytest.raises(EngineDied), ours(Puppet(dead=True), tmp_path).active():
        pytest.fail("it cannot serve")


@pytest.mark.parametrize(
    "meminfo", ["MemTotal: 99999999 kB\nMemAvailable: 1024 kB\n", "MemAvailable: 1024 kB"]
)
def test_too_little_memory_is_an_error_before_anything_starts(tmp_path: Path, meminfo: str) -> None:
    file, logs = tmp_path / "meminfo", tmp_path / "logs"
    file.write_text(meminfo, encoding="utf-8")
    names = ["pdconn", "single"]
    with (
        pytest.raises(TooLittleMemory, match=r"3 engines need about .* 0\.0 GiB are free"),
        running_contestants(names, tmp_path, "apart", logs, no_progress, meminfo=file),
    ):
        pytest.fail("it cannot start")
    assert not logs.exists(), "an engine that starts has a log"
