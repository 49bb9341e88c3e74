"""Families through boundary prompts, aborts and a kill of prefill, without prefix caching.

With prefix caching they are in ``test_families``, ``test_hybrids`` and ``test_gemma4``;
Granite's faults are in ``test_hybrid_faults``.  Of families of attention and states one is here: a
state is a run of bytes, whatever layer has it, and ``test_hybrids`` has the answers of the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.lab_client import prefill_then_decode
from tests.vllm.engines.families.faults import Faulty, abort_pulls, faulty_engines, kill_prefill
from tests.vllm.engines.families.handover import COARSE, NUM_TOKENS
from tests.vllm.engines.families.models import (
    FALCON_H1,
    GEMMA_4,
    GPT_OSS,
    LLAMA_4,
    MLA,
    Family,
)

pytestmark = pytest.mark.matrix

FAMILIES = (GEMMA_4, GPT_OSS, FALCON_H1, LLAMA_4, MLA)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    family: Family = request.param
    work = tmp_path_factory.mktemp(family.name)
    with faulty_engines(family, work, prefix_caching=False) as faulty:
        yield faulty


def test_prompts_at_every_boundary(engines: Faulty) -> None:
    family = engines.made.family
    if family.coarse:
        pytest.skip("kernels round by batch: one after another in test_hybrids and test_families")
    prompts = make_prompts(family.lengths(), seed=5)
    pulled = engines.made.metric("pulls_total")
    assert engines.made.wrong(prompts, engines.answers(prompts)) == []
    assert engines.made.metric("pulls_total") - pulled == len(prompts)
    [single] = make_prompts([1], seed=6)  # decode computes it, and pulls nothing
    alone, prefill, decode = (engines.made.clients[n] for n in ("alone", "prefill", "decode"))
    seen = prefill_then_decode(prefill, decode, single, NUM_TOKENS)
    assert compare(alone.complete(single, NUM_TOKENS), seen, COARSE) is None
    assert engines.made.metric("pulls_verified_total") == engines.made.metric("pulls_total")


def test_aborted_pulls_leave_nothing_behind(engines: Faulty) -> None:
    abort_pulls(engines, seed=21, count=1)


def test_a_killed_prefill_engine_costs_no_right_answer(engines: Faulty) -> None:
    kill_prefill(engines, seed=22, count=2)
