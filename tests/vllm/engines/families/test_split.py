"""Blocks of the engine that its attention kernels split: real engines, and every token right.

The CPU's kernels pack a head's block for themselves, so a kernel block is found by its id alone:
whatever of ids were not translated, or translated twice, would show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.lab_errors import RequestRefused
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import BLOCK, Configuration, Expected, cache_beside, engine

pytestmark = pytest.mark.matrix

LARGE = 4 * BLOCK
LENGTHS = [1, 2, BLOCK, BLOCK + 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 40, 700, 1500]
CONFIGURATION = Configuration("LBHNC", True, one_process=True, policy="fail", verify="always")


def splitting(spec: EngineSpec) -> EngineSpec:
    """With blocks of four kernel blocks."""
    transfer = dict(spec.kv_transfer_config or {})
    transfer["kv_connector_module_path"] = "tests.vllm.engines.families.splitting"
    return replace(spec, block_tokens=LARGE, kv_transfer_config=transfer, num_blocks=None)


@pytest.fixture(scope="module")
def engines(model: Path, work: Path, expected: Expected) -> Iterator[dict[str, Engine]]:
    """A pair that splits, one of small blocks, and one of large blocks that does not split."""
    del expected  # its engine starts first
    specs = {
        "prefill": splitting(engine("split-prefill", model, CONFIGURATION, "kv_both", 0)),
        "decode": splitting(engine("split-decode", model, CONFIGURATION, "kv_consumer", 1)),
        "small": engine("split-small", model, CONFIGURATION, "kv_both", 1),
        "large": replace(
            engine("split-large", model, CONFIGURATION, "kv_consumer", 1), block_tokens=LARGE
        ),
    }
    with running(list(specs.values()), work, cache=cache_beside(model)) as started:
        yield dict(zip(specs, started, strict=True))


@pytest.mark.parametrize(
    ("prefill", "decode"), [("prefill", "decode"), ("prefill", "small"), ("small", "decode")]
)
def test_answers_are_those_of_one_engine(
    engines: dict[str, Engine], expected: Expected, prefill: str, decode: str
) -> None:
    there, here = Client(engines[prefill].url), Client(engines[decode].url)
    before = here.metrics().get("pdconn:pulls_verified_total", 0)
    seed = 30 + len(prefill) * 10 + len(decode)
    prompts = make_prompts(LENGTHS, seed=seed)
    grown = [*prompts, prompts[-1] + prompts[3]]  # the second begins with what is held
    for prompt in grown:
        seen = prefill_then_decode(there, here, prompt, 6)
        assert compare(expected.answer(prompt), seen) is None, len(prompt)
    assert here.metrics()["pdconn:pulls_verified_total"] - before == len(grown) - 1


def test_larger_blocks_that_are_not_split_are_packed_otherwise(engines: dict[str, Engine]) -> None:
    """Negative control: prefill's blocks are as large, and are split indeed."""
    there, here = Client(engines["prefill"].url), Client(engines["large"].url)
    [prompt] = make_prompts([LARGE + 1], seed=77)
    with pytest.raises(RequestRefused):
        prefill_then_decode(there, here, prompt, 6)
    refused = f"blocks that only move whole: theirs {BLOCK}, ours {LARGE}"
    assert refused in engines["large"].log.read_text(encoding="utf-8")


@pytest.mark.parametrize("prefill", ["prefill", "small"])
def test_no_prompt_finds_a_block_that_was_written_in_part(
    engines: dict[str, Engine], expected: Expected, prefill: str
) -> None:
    """A pull begins where the last token's window does, within a block of decode's.

    A prompt that shares all whole blocks with one that was pulled attends to tokens before.
    """
    there, here = Client(engines[prefill].url), Client(engines["decode"].url)
    stems = make_prompts([LARGE * n + 45 for n in (1, 3, 5)], seed=50 + len(prefill))
    for number, stem in enumerate(stems):
        shared = stem[: len(stem) // LARGE * LARGE]
        [other] = make_prompts([5 + number], seed=60 + number)
        for prompt in (stem, shared + other):
            seen = prefill_then_decode(there, here, prompt, 6)
            assert compare(expected.answer(prompt), seen) is None, len(prompt)
