"""Prefill to decode through real vLLM and NIXL, in every layout, against one engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from tests.forked.engines import ForkedProcess
from tests.vllm.engines.engines import (
    MAX_TOKENS,
    PREEMPTING,
    WIDE_BESIDE,
    Expected,
    PdPair,
    Prompt,
    all_at_once,
    one_after_another,
    pairing_prompts,
)

ALL_PROMPTS = "BHLNC-plain"


def test_prompts_one_after_another_through_a_proxy_that_knows_nothing(
    pair: PdPair, expected: Expected
) -> None:
    """Prefill, then decode with ``kv_transfer_params`` passed on untouched.

    All lengths about which blocks, windows and retention change; in one pair 200 prompts.
    """
    prompts = one_after_another(1 if str(pair.configuration) == ALL_PROMPTS else 3)
    before = pair.decode.metrics()
    answers = {
        prompt: prefill_then_decode(pair.prefill, pair.decode, prompt, MAX_TOKENS)
        for prompt in prompts
    }
    after = pair.decode.metrics()
    assert expected.mismatches(answers) == []

    def change(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    pulled = change("pdconn:pulls_total")
    assert pulled >= 0.75 * len(prompts)  # the rest were one token long or wholly cached
    assert change("pdconn:pulls_verified_total") == (pulled if pair.verifies else 0)
    hits = change("pdconn:saved_by_hits_bytes_total")
    if not pair.configuration.prefix_caching:
        assert hits == 0
    elif pair.configuration != PREEMPTING:  # its few blocks hold no prompt until the next like it
        assert hits > 0
    assert change("vllm:nixl_num_failed_transfers_total") == 0


def test_decode_knows_prefill_beforehand_if_configured_to(pair: PdPair) -> None:
    prompt = tuple(range(300, 400))
    prefill_then_decode(pair.prefill, pair.decode, prompt, 1)
    lender = pair.prefill_engine.spec
    assert pair.has_logged(f" at {lender.host}:{lender.side_channel_port}\n")
    assert pair.has_logged("pdconn: warm: ", 60.0 if pair.configuration.warms else 0.0) == (
        pair.configuration.warms
    )


def test_a_pair_is_forked_and_the_engine_that_it_is_compared_with_is_not(
    pair: PdPair, started_alone: tuple[Engine, Engine]
) -> None:
    """An environment that stops :mod:`tests.forked` would cost every start ten seconds."""
    made = {each.spec.name: each._process for each in (pair.prefill_engine, pair.decode_engine)}
    assert {n: isinstance(p, ForkedProcess) and p.forked for n, p in made.items()} == {
        "prefill": True,
        "decode": True,
    }
    assert not isinstance(started_alone[0]._process, ForkedProcess)


def test_32_prompts_at_once_through_our_proxy(pair: PdPair, expected: Expected) -> None:
    prompts = all_at_once()
    assert len(prompts) == 32
    before = pair.decode.metrics().get("pdconn:pulls_total", 0.0)
    with pair.proxy() as url, ThreadPoolExecutor(32) as pool:
        client = Client(url)
        answers = dict(
            zip(prompts, pool.map(lambda p: client.complete(p, MAX_TOKENS), prompts), strict=True)
        )
    assert expected.mismatches(answers) == []
    pulled = pair.decode.metrics()["pdconn:pulls_total"] - before
    assert pulled >= len({prompt[:2] for prompt in prompts if len(prompt) > 1})  # no two alike


@pytest.mark.only(layout=PREEMPTING.layout, prefix_caching=PREEMPTING.prefix_caching)
def test_100_requests_at_a_decode_that_preempts_are_all_answered_right(
    pair: PdPair, expected: Expected
) -> None:
    """A preempted request loses its blocks, and computes again what it had pulled."""
    num_tokens = 90
    prompts = make_prompts([80 + 2 * number for number in range(100)], seed=31)
    expected.ask(prompts, num_tokens)
    before = pair.decode.metrics()

    def through(prompt: Prompt) -> Answer:
        return prefill_then_decode(pair.prefill, pair.decode, prompt, num_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        seen = dict(zip(prompts, pool.map(through, prompts), strict=True))
    after = pair.decode.metrics()
    wrong = [
        f"{len(prompt)} tokens: {found}"
        for prompt, answer in seen.items()
        if (found := compare(expected.answer(prompt, num_tokens), answer))
    ]
    assert wrong == []
    assert len(seen) == 100
    preempted = "vllm:num_preemptions_total"
    assert after[preempted] - before.get(preempted, 0.0) > 0
    assert after["pdconn:pulls_total"] - before.get("pdconn:pulls_total", 0.0) >= 100


@pytest.mark.only(prefix_caching=False)
def test_one_descriptor_per_block_where_blocks_are_outermost(pair: PdPair) -> None:
    """NIXL's own count: whole block rows where a row is one piece, pages otherwise.

    Rows that lie beside each other on both sides travel as one piece, so these are upper bounds.
    """
    before = pair.decode.metrics()
    prompt = tuple(range(100, 100 + 1500))
    prefill_then_decode(pair.prefill, pair.decode, prompt, 1)
    after = pair.decode.metrics()

    def change(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    descriptors = change("vllm:nixl_num_descriptors_sum")
    full_blocks = -(-1499 // 32)
    window_blocks = 3 * 2  # two groups of two layers, 64 tokens over 32-token blocks
    blocks = full_blocks + window_blocks
    layers_per_block = 2
    if pair.configuration.layout == "LBHNC":
        groups = 3
        assert groups * layers_per_block <= descriptors <= blocks * layers_per_block
    else:
        assert 0 < descriptors <= blocks


def test_prefill_gets_all_its_blocks_back(pair: PdPair) -> None:
    """One more request, and nothing is lent; a ticket that is not redeemed is the control."""
    prompt = tuple(range(200, 700))
    prefill_then_decode(pair.prefill, pair.decode, prompt, 1)
    assert pair.lent_after_one_more() == 0.0
    with pair.lending([prompt]):
        assert pair.lent_after_one_more(seconds=1.0) > 0.0


@pytest.mark.only(layout=WIDE_BESIDE.layout, prefix_caching=WIDE_BESIDE.prefix_caching)
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=["1 to 2", "2 to 1"])
def test_a_head_slice_is_pulled_by_each_rank_and_put_together_again(
    pair: PdPair, expected: Expected, ranks: tuple[int, int]
) -> None:
    wide = Client(pair.others["wide"].url)
    prefill, decode = (pair.prefill, wide) if ranks == (1, 2) else (wide, pair.decode)
    single, together = pairing_prompts(10 + ranks[0])
    before = decode.metrics()

    def through(prompt: Prompt) -> Answer:
        return prefill_then_decode(prefill, decode, prompt, MAX_TOKENS)

    seen = {prompt: through(prompt) for prompt in single}
    with ThreadPoolExecutor(len(together)) as pool:
        seen |= dict(zip(together, pool.map(through, together), strict=True))
    assert expected.mismatches(seen) == []
    after = decode.metrics()

    def change(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert change("pdconn:pulls_total") == ranks[1] * len(seen)
    assert change("pdconn:saved_by_hits_bytes_total") > 0
