"""Prefixes that go on from where they are: second turns, and prompts that another prefill knows.

Every engine lends and pulls.  ``decode`` has answered a first turn, so it alone holds what it
generated; ``other`` has never seen any of it, and has another layout, ``wide`` another
number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pdconn.lab.client import Client, lend_prefix, prefill_only, prefill_then_decode
from pdconn.lab.compare import compare, make_prompts
from tests.vllm.engines.engines import PdPair
from tests.vllm.engines.families.handover import (
    COARSE,
    NUM_TOKENS,
    Handover,
    Prompt,
    engine,
    handing_over,
)
from tests.vllm.engines.families.models import GEMMA_4, GPT_OSS, GRANITE_4_H, Family

pytestmark = pytest.mark.matrix

LONGEST = 4608
FIRST = 3100
"""Tokens of the prompts whose hand-over is timed."""


@pytest.fixture(scope="module", params=[GPT_OSS, GEMMA_4, GRANITE_4_H], ids=lambda one: one.name)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Handover]:
    family: Family = request.param
    work = tmp_path_factory.mktemp(family.name)
    model = family.write(work / "model")
    both: dict[str, Any] = {"prefix_caching": True, "max_model_len": LONGEST}
    specs = [
        engine("prefill", family, model, "kv_both", **both),
        engine("decode", family, model, "kv_both", **both),
        engine("other", family, model, "kv_both", layout="BLHNC", **both),
    ]
    if 2 in family.tensor_parallel:
        specs.append(engine("wide", family, model, "kv_both", ranks=2, **both))
    with handing_over(family, work, specs, model, prefix_caching=True) as made:
        yield made


def lend_most(holder: Client, prompt: Prompt) -> tuple[Mapping[str, Any], int]:
    """A ticket for as much of the prompt as the engine holds, and how much that is."""
    wanted = len(prompt) - 2
    told = lend_prefix(holder, prompt, wanted)
    assert told is not None
    held = told["pdconn"].get("held", wanted)
    if held < wanted:
        assert told == {"pdconn": {"lend": wanted, "held": held}}
        told = lend_prefix(holder, prompt, held)
        assert told is not None
    assert told["remote_num_tokens"] == held
    return told, held


def next_turn(made: Handover, first: Prompt, said: Prompt, num_answers: int) -> Prompt:
    """A first turn by prefill and decode; what is asked in the next one."""
    clients = made.clients
    answer = prefill_then_decode(clients["prefill"], clients["decode"], first, num_answers)
    return first + tuple(answer.tokens) + said


def right(made: Handover, prompt: Prompt, seen: Any) -> bool:
    """Whether an answer is that of one engine."""
    want = made.clients["alone"].complete(prompt, NUM_TOKENS)
    return compare(want, seen, COARSE) is None


@pytest.mark.parametrize("name", ["other", "wide", "prefill"])
def test_a_second_turn_goes_on_where_decode_ended(engines: Handover, name: str) -> None:
    if name not in engines.clients:
        pytest.skip("one rank only")
    decode, computing = engines.clients["decode"], engines.clients[name]
    block = engines.family.block_tokens
    for seed, num_answers in enumerate((40, 3 * block)):
        first, said = make_prompts([700, 30], seed=70 + seed + len(name))
        prompt = next_turn(engines, first, said, num_answers)
        source, held = lend_most(decode, prompt)
        assert held > 0
        pulls = engines.metric("pulls_total", name)
        ticket = prefill_only(computing, prompt, source)
        assert engines.metric("pulls_total", name) > pulls
        seen = decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert right(engines, prompt, seen)


def test_what_a_prefill_engine_knows_another_one_need_not_compute(engines: Handover) -> None:
    """First tokens of the same prompts, pulled and computed, in turns."""
    decode, other = engines.clients["decode"], engines.clients["other"]
    pulled, computed = 0.0, 0.0
    for seed in range(3):
        shared, tail, fresh = make_prompts([FIRST, 40, FIRST + 40], seed=80 + seed)
        prompt = shared + tail
        prefill_only(engines.clients["prefill"], shared)
        began = time.perf_counter()
        source, held = lend_most(engines.clients["prefill"], prompt)
        ticket = prefill_only(other, prompt, source)
        pulled += time.perf_counter() - began
        assert held > FIRST * 0.8
        assert right(
            engines, prompt, decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        )
        began = time.perf_counter()
        prefill_only(other, fresh)
        computed += time.perf_counter() - began
    assert pulled <= 0.4 * computed, (pulled, computed)


def test_a_ticket_for_another_history_is_not_used(engines: Handover) -> None:
    """A template that dropped some of it: everything is computed, and right."""
    decode, other = engines.clients["decode"], engines.clients["other"]
    first, said = make_prompts([700, 30], seed=90)
    prompt = next_turn(engines, first, said, 40)
    source, held = lend_most(decode, prompt)
    edited = prompt[: held // 2] + prompt[held // 2 + 5 :]
    pulls = engines.metric("pulls_total", "other")
    ticket = prefill_only(other, edited, source)
    assert engines.metric("pulls_total", "other") == pulls
    assert right(engines, edited, decode.complete(edited, NUM_TOKENS, kv_transfer_params=ticket))


def test_nothing_stays_lent(engines: Handover) -> None:
    for name, client in engines.clients.items():
        assert PdPair.used(client, 40.0) == 0.0, name
