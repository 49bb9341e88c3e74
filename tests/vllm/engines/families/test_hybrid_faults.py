"""Aborts and kills amid hand-overs of states: nobody gets a wrong token, no block is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pdconn.lab.client import Client, prefill_only
from pdconn.lab.compare import Answer, compare, make_prompts
from pdconn.lab.engine import Engine, running, wait_ready
from tests.vllm.engines.engines import PdPair, cache_beside
from tests.vllm.engines.families.handover import NUM_TOKENS, Handover, engine
from tests.vllm.engines.families.models import GRANITE_4_H

pytestmark = pytest.mark.matrix

DELAY_S = 1.5
"""How late reads are posted, so that aborts and kills come while pulls run."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Handover, Engine]]:
    work = tmp_path_factory.mktemp("granite-faults")
    family, model = GRANITE_4_H, GRANITE_4_H.write(work / "model")
    late = {"reads": {"delay": 1.0, "delay_s": DELAY_S}}
    decode = engine("decode", family, model, "kv_consumer", debug_faults=late, prefix_caching=True)
    recompute = {**(decode.kv_transfer_config or {}), "kv_load_failure_policy": "recompute"}
    specs = [
        engine("alone", family, model, None),
        engine("prefill", family, model, "kv_producer", prefix_caching=True),
        replace(decode, kv_transfer_config=recompute, env={**decode.env, "UCX_TLS": "tcp"}),
    ]
    with running(specs, work, cache=cache_beside(model)) as started:
        clients = {each.spec.name: Client(each.url) for each in started}
        yield Handover(family, clients), started[1]


def handed_over(engines: Handover, seed: int, count: int) -> list[tuple[tuple[int, ...], Answer]]:
    """Prompts of several blocks, and what is right."""
    return [engines.expected(prompt) for prompt in make_prompts([90, 200, 700] * count, seed)]


def test_aborted_pulls_leave_nothing_behind(engines: tuple[Handover, Engine]) -> None:
    made, _ = engines
    asked = handed_over(made, 21, 2)
    decode, prefill = made.clients["decode"], made.clients["prefill"]
    impatient = Client(decode.url, timeout_s=DELAY_S / 3)

    def abort(prompt: tuple[int, ...]) -> None:
        ticket = prefill_only(prefill, prompt)
        with pytest.raises(TimeoutError):
            impatient.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)

    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(abort, [prompt for prompt, _ in asked]))
    for prompt, want in asked:
        ticket = prefill_only(prefill, prompt)
        seen = decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert compare(want, seen) is None, len(prompt)
    assert PdPair.used(decode, 30.0) == 0.0
    assert PdPair.used(prefill, 40.0) == 0.0


def test_a_killed_prefill_engine_costs_no_right_answer(engines: tuple[Handover, Engine]) -> None:
    """Some of its tickets are being read, others were not claimed yet."""
    made, prefill = engines
    asked = handed_over(made, 22, 3)
    decode = made.clients["decode"]
    tickets = [prefill_only(made.clients["prefill"], prompt) for prompt, _ in asked]
    failed = made.metric("pulls_total")
    with ThreadPoolExecutor(len(asked)) as pool:
        first = [
            pool.submit(decode.complete, prompt, NUM_TOKENS, kv_transfer_params=ticket)
            for (prompt, _), ticket in list(zip(asked, tickets, strict=True))[:4]
        ]
        prefill.kill()
        rest = [
            decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
            for (prompt, _), ticket in list(zip(asked, tickets, strict=True))[4:]
        ]
        seen = [each.result() for each in first] + rest
    wrong = [
        (len(prompt), found)
        for (prompt, want), answer in zip(asked, seen, strict=True)
        if (found := compare(want, answer))
    ]
    assert wrong == []
    assert made.metric("pulls_total") - failed < len(asked)  # the others were computed
    prefill.launch()
    wait_ready([prefill])
    assert made.mismatches(make_prompts([65, 300], seed=23)) == []
    assert PdPair.used(decode, 30.0) == 0.0
