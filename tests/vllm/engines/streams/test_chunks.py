"""Requests that decode follows over many steps of prefill: real vLLM, real NIXL, and faults.

Every answer is compared with that of one engine alone, checksums with what prefill has lent, and
at the end no engine has a block in use (:mod:`tests.vllm.engines.streams.chunked`).  That a wrong
byte is noticed is shown in ``test_requests``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from pdconn.lender.streams import PARK_S
from pdconn.protocol.early import EarlyTicket
from pdconn.tools.lab.compare_answers import Answer, make_prompts
from pdconn.tools.lab.engine import wait_ready
from tests.vllm.engines.streams.chunked import (
    BLOCK,
    LONG,
    NUM_TOKENS,
    STEP_TOKENS,
    Chunked,
    answers_of,
    ask_legs,
    await_streams,
    ends,
)

pytestmark = pytest.mark.matrix

[UNHEARD] = make_prompts([700], seed=61)


@pytest.fixture(scope="module", autouse=True)
def unheard(engines: Chunked) -> Iterator[Future[tuple[Answer, float]] | None]:
    """A request whose prefill never comes, and the seconds that it took; it waits beside others."""

    def ask() -> tuple[Answer, float]:
        began, decode = time.monotonic(), engines.client("decode")
        answer = decode.complete(UNHEARD, NUM_TOKENS, kv_transfer_params=early.to_params())
        return answer, time.monotonic() - began

    if "beside" not in engines.engines:  # those that cache decide alike
        yield None
        return
    early = EarlyTicket.like(engines.like(), "nobody-asks-prefill-for-this")
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask)


def test_blocks_are_announced_and_read_before_the_last_step(engines: Chunked) -> None:
    like = engines.like()
    announced = engines.metric("pdconn:blocks_announced_total", "prefill")
    early = engines.metric("pdconn:early_bytes_total", "decode")
    prompts = make_prompts([LONG, LONG - 1, LONG + BLOCK - 1, 2 * STEP_TOKENS + 1], seed=31)
    answers = [answers_of(engines, [prompt], like)[0] for prompt in prompts]
    assert engines.wrong(prompts, answers) == []
    announced = engines.metric("pdconn:blocks_announced_total", "prefill") - announced
    # All but the last step of each, and what was over before it was known who follows.
    assert announced > sum(len(prompt) - 4 * STEP_TOKENS for prompt in prompts[:3]) // BLOCK
    assert engines.metric("pdconn:early_bytes_total", "decode") > early


@pytest.mark.parametrize("engines", ["caching"], indirect=True)  # it runs beside that pair
def test_an_engine_of_two_ranks_follows_one_of_one(engines: Chunked) -> None:
    like = engines.like("wide")
    followed = engines.metric("pdconn:pulls_followed_total", "wide")
    prompts = make_prompts([LONG, 1000, STEP_TOKENS, 3 * BLOCK + 1], seed=37)
    assert engines.wrong(prompts, answers_of(engines, prompts, like, "wide")) == []
    assert engines.metric("pdconn:pulls_followed_total", "wide") - followed == 2 * len(prompts)


def test_requests_that_prefill_preempts_are_answered_right(engines: Chunked) -> None:
    """Others generate on prefill, whose blocks are all in use."""
    like, prefill = engines.like(), engines.client("prefill")
    before = prefill.metrics()["vllm:num_preemptions_total"]
    generating = make_prompts([100] * 16, seed=41)
    prompts = make_prompts([1500 + 60 * number for number in range(12)], seed=42)
    with ThreadPoolExecutor(len(generating)) as pool:
        others = [pool.submit(prefill.complete, prompt, 400) for prompt in generating]
        time.sleep(0.2)
        answers = answers_of(engines, prompts, like)
        assert all(len(other.result().tokens) == 400 for other in others)
    assert engines.wrong(prompts, answers) == []
    assert prefill.metrics()["vllm:num_preemptions_total"] > before


def test_clients_that_leave_cost_no_right_answer(engines: Chunked) -> None:
    """Those of prefill, of decode, or of both, at any time."""
    like, draw = engines.like(), random.Random(5)
    prompts = make_prompts([900 + 90 * number for number in range(24)], seed=51)
    for begin in range(0, len(prompts), 6):
        some = prompts[begin : begin + 6]
        with ThreadPoolExecutor(2 * len(some)) as pool:
            asked = []
            for number, prompt in enumerate(some):
                # A request that is left before it enters prefill is waited for: see below.
                left = [draw.uniform(0.05, 1.0), draw.uniform(0.01, 1.0)]
                if number % 3 < 2:
                    left[number % 3] = 120.0
                legs = ask_legs(pool, engines, prompt, like, leaves_s=(left[0], left[1]))
                asked.append(legs)
            answers = [ends(legs.decode) for legs in asked]
            left_early = [ends(legs.prefill) for legs in asked]
        kept = [(p, a) for p, a in zip(some, answers, strict=True) if isinstance(a, Answer)]
        assert len(kept) >= 2
        assert any(not isinstance(each, Answer) for each in (*answers, *left_early))
        assert engines.wrong([p for p, _ in kept], [a for _, a in kept]) == []
    assert engines.wrong(prompts[:6], answers_of(engines, prompts[:6], like)) == []
    assert engines.used("prefill", "decode") == {}


@pytest.mark.parametrize("engines", ["plain"], indirect=True)
def test_a_stream_whose_prefill_never_comes_is_computed(
    engines: Chunked, unheard: Future[tuple[Answer, float]]
) -> None:
    answer, took_s = unheard.result()
    assert engines.wrong([UNHEARD], [answer]) == []
    assert PARK_S / 2 < took_s < PARK_S + 5


def test_a_stream_of_another_boot_is_computed_at_once(engines: Chunked) -> None:
    early = EarlyTicket.like(engines.like(), "this-is-of-another-boot")
    other = replace(early, incarnation="0" * len(early.incarnation))
    [prompt] = make_prompts([700], seed=62)
    began = time.monotonic()
    answer = engines.client("decode").complete(
        prompt, NUM_TOKENS, kv_transfer_params=other.to_params()
    )
    assert time.monotonic() - began < PARK_S / 2
    assert engines.wrong([prompt], [answer]) == []


@pytest.mark.parametrize("engines", ["caching"], indirect=True)
def test_prefill_killed_amid_many_streams_costs_no_right_answer(engines: Chunked) -> None:
    """At some point of each; every point of one is in ``test_kills``."""
    like, streams = engines.like(), engines.metric("pdconn:streams_total", "prefill")
    prompts = make_prompts([LONG - 40 * number for number in range(6)], seed=71)
    prefill = engines.engines["prefill"]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        asked = [ask_legs(pool, engines, prompt, like) for prompt in prompts]
        await_streams(engines, streams + 1)
        time.sleep(0.15)
        prefill.kill_command()
        answers = [legs.decode.result() for legs in asked]
        assert any(not isinstance(ends(legs.prefill), Answer) for legs in asked)
    assert engines.wrong(prompts, answers) == []
    prefill.launch()
    wait_ready([prefill])
    # Streams of the boot that is over are computed at once; those of the new one are followed.
    again = answers_of(engines, prompts[:2], like)
    assert engines.wrong(prompts[:2], again) == []
    assert engines.wrong(prompts[:2], answers_of(engines, prompts[:2], engines.like())) == []


@pytest.mark.parametrize("engines", ["caching"], indirect=True)
def test_decode_killed_amid_many_streams_costs_prefill_no_block(engines: Chunked) -> None:
    """Of three prompts one waits until the leases of the others end."""
    like, streams = engines.like(), engines.metric("pdconn:streams_total", "prefill")
    prompts = make_prompts([LONG - 40 * number for number in range(3)], seed=81)
    decode = engines.engines["decode"]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        asked = [ask_legs(pool, engines, prompt, like) for prompt in prompts]
        await_streams(engines, streams + 2)
        decode.kill_command()
        assert all(not isinstance(ends(legs.decode), Answer) for legs in asked)
        assert all(isinstance(ends(legs.prefill), Answer) for legs in asked)
    assert engines.used("prefill") == {}
    decode.launch()
    wait_ready([decode])
    assert engines.wrong(prompts[:2], answers_of(engines, prompts[:2], engines.like())) == []
