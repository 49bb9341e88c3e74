"""The fake engines show of streams what vLLM shows (``tests/vllm/engines/streams``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ABORTED, ANSWER, GONE, MODEL, FakeEngine, Leases, Seen
from tests.router.handover.streams import stream_scenarios
from tests.router.handover.streams.stream_scenarios import SCENARIOS, Act, Pair, asking, show

PARKS_S = 4.0
PREFILL_S = 0.3
"""Longer than the client stays that leaves."""


async def does_nothing() -> None:
    """A fake holds no prompts."""


async def compute_for_long(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    await asyncio.sleep(PREFILL_S)
    return await engine.answer(seen, http)


@asynccontextmanager
async def fakes(policy: str) -> AsyncIterator[Pair]:
    """A pair of fake engines."""
    leases = Leases()
    prefill, decode = FakeEngine(leases), FakeEngine(leases)
    decode.parks_s, decode.policy = PARKS_S, policy
    prefill.script = compute_for_long

    async def is_right(prompt: Sequence[int], whole: bytes) -> bool:
        return whole == ANSWER

    async def is_free() -> bool:
        await until(lambda: not leases.held)
        return True

    for engine in (prefill, decode):
        await engine.start()
    prefill.boot = f"boot of {prefill.port}"
    try:
        async with asking() as session:
            urls = prefill.url, decode.url
            yield Pair(session, *urls, MODEL, policy, PARKS_S, is_right, does_nothing, is_free)
    finally:
        for engine in (prefill, decode):
            await engine.stop()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("scenario", SCENARIOS)
@in_loop
async def test_fakes_show_what_vllm_shows(scenario: Act, policy: str) -> None:
    async with fakes(policy) as pair:
        await show(scenario, pair)


# What the scenarios notice


async def notices(scenario: Act) -> None:
    async with fakes("fail") as pair:
        with pytest.raises(AssertionError):
            await show(scenario, pair)


@in_loop
async def test_they_notice_a_fake_that_reads_another_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Seen, "prompt", "the same for all")
    await notices(stream_scenarios.the_prompt_is_another_one)


@in_loop
async def test_they_notice_a_fake_that_waits_for_a_boot_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(self: Leases, boot: str | None, last: str | None) -> None:
        self.boots |= {boot or "", "0" * len(boot or "")}

    monkeypatch.setattr(Leases, "begin_boot", begin)
    await notices(stream_scenarios.the_ticket_is_of_another_boot)


@in_loop
async def test_they_notice_a_fake_that_computes_where_a_request_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def compute(engine: FakeEngine, seen: Seen) -> bool:
        await pull(engine, seen)
        return True

    pull = FakeEngine.pull
    monkeypatch.setattr(FakeEngine, "pull", compute)
    await notices(stream_scenarios.its_ordinary_ticket_comes_later)


@in_loop
async def test_they_notice_a_fake_that_waits_with_a_single_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Seen, "has_one_token", False)
    await notices(stream_scenarios.the_prompt_has_one_token)


@in_loop
async def test_they_notice_a_fake_that_forgets_that_its_reader_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Leases, "end_reader", lambda self, stream: None)
    monkeypatch.setattr("tests.fakes.event_loop.PATIENCE_S", 0.5)
    async with fakes("fail") as pair:
        with pytest.raises(TimeoutError):
            await show(stream_scenarios.decode_s_client_leaves, pair)


@in_loop
async def test_they_notice_a_fake_that_is_told_of_a_request_that_never_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def end_at_once(engine: FakeEngine, seen: Seen, stream: tuple[str, str]) -> Any:
        return GONE, ABORTED

    monkeypatch.setattr(FakeEngine, "follow", end_at_once)
    await notices(stream_scenarios.prefill_s_client_leaves_before_its_body_has_arrived)
