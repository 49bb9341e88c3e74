"""vLLM shows of streams what the fake engines of the router's tests show.

(:mod:`tests.router.handover.streams.stream_scenarios` states the requests, and what they show).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from pdconn.lender.streams import PARK_S
from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.lab_client import answer_of
from pdconn.tools.lab.spec import SERVED_NAME
from pdconn.tools.openai.completions import read_completion
from tests.fakes.event_loop import in_loop
from tests.router.handover.streams.stream_scenarios import (
    NUM_TOKENS,
    SCENARIOS,
    Act,
    Pair,
    asking,
    prefill_is_never_asked,
    prefill_s_client_leaves_before_its_body_has_arrived,
    show,
)
from tests.vllm.engines.engines import Expected, PdPair

FEW = pytest.mark.only(layout="BLHNC", prefix_caching=False)
CACHES = pytest.mark.only(layout="BHLNC", prefix_caching=True)


@asynccontextmanager
async def vllm(pair: PdPair, expected: Expected) -> AsyncIterator[Pair]:
    """The pair, as a router sees it."""

    async def is_right(prompt: Sequence[int], whole: bytes) -> bool:
        answer = answer_of([read_completion(whole)])
        right = await asyncio.to_thread(expected.answer, tuple(prompt), NUM_TOKENS)
        return compare(right, answer) is None

    async def forget() -> None:
        async with session.post(pair.decode.url + "/reset_prefix_cache") as response:
            assert json.loads(await response.read()) == {"success": True}

    async def is_free() -> bool:
        return await asyncio.to_thread(pair.lent_after_one_more) == 0.0

    urls, policy = (pair.prefill.url, pair.decode.url), pair.configuration.policy
    async with asking() as session:
        yield Pair(session, *urls, SERVED_NAME, policy, PARK_S, is_right, forget, is_free)


WAITING = (prefill_is_never_asked, prefill_s_client_leaves_before_its_body_has_arrived)
"""Those in which decode waits for as long as a reader is parked."""
EVERY = [
    pytest.param(each, marks=[pytest.mark.matrix] if each in WAITING else []) for each in SCENARIOS
]


async def check(scenario: Act, pair: PdPair, expected: Expected) -> None:
    async with vllm(pair, expected) as seen:
        await show(scenario, seen)


@FEW
@pytest.mark.parametrize("scenario", EVERY)
@in_loop
async def test_vllm_that_recomputes_shows_what_fakes_show(
    scenario: Act, pair: PdPair, expected: Expected
) -> None:
    await check(scenario, pair, expected)


@pytest.mark.matrix
@CACHES
@pytest.mark.parametrize("scenario", SCENARIOS)
@in_loop
async def test_vllm_that_fails_and_caches_shows_what_fakes_show(
    scenario: Act, pair: PdPair, expected: Expected
) -> None:
    await check(scenario, pair, expected)
