"""Real vLLM over ``transport: ucx``: no NIXL in either engine, and every token right.

Beside the pair runs ``other``, a decode engine that was left at NIXL: it is refused by name, and
what it was asked for is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import Answer
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.process_keeper import descendants
from tests.vllm.engines.engines import (
    MAX_TOKENS,
    Configuration,
    Expected,
    PdPair,
    Prompt,
    engine,
    pair_of,
    pairing_prompts,
)

pytestmark = pytest.mark.matrix

CONFIGURATION = Configuration(
    "BHLNC", prefix_caching=True, one_process=True, policy="recompute", verify="always"
)


@pytest.fixture(scope="module")
def pair(model: Path, work: Path, expected: Expected) -> Iterator[PdPair]:
    del expected  # its engine starts first
    others = {"other": engine("other", model, CONFIGURATION, "kv_consumer", 1)}
    with pair_of(CONFIGURATION, model, work / "ucx", others, transport="ucx") as started:
        yield started


def loaded(started: Engine) -> set[str]:
    """Of NIXL and ucxx, what the engine's processes have in memory."""
    maps = "".join(
        Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        for pid in [started.pid, *descendants(started.pid)]
    )
    return {name for name in ("nixl", "ucxx") if f"/{name}" in maps}


def test_it_answers_what_one_engine_alone_answers(pair: PdPair, expected: Expected) -> None:
    before = pair.decode.metrics()
    single, together = pairing_prompts(0)

    def through(prompt: Prompt) -> Answer:
        return prefill_then_decode(pair.prefill, pair.decode, prompt, MAX_TOKENS)

    seen = {prompt: through(prompt) for prompt in single}
    with ThreadPoolExecutor(len(together)) as pool:
        seen |= dict(zip(together, pool.map(through, together), strict=True))
    assert expected.mismatches(seen) == []
    after = pair.decode.metrics()
    pulled, verified = (
        after[name] - before.get(name, 0.0)
        for name in ("pdconn:pulls_total", "pdconn:pulls_verified_total")
    )
    assert pulled == verified == len(seen)


def test_no_engine_of_it_has_loaded_nixl(pair: PdPair) -> None:
    assert loaded(pair.prefill_engine) == loaded(pair.decode_engine) == {"ucxx"}
    assert "nixl" in loaded(pair.others["other"])


def test_an_engine_that_was_left_at_nixl_is_told_so(pair: PdPair, expected: Expected) -> None:
    other, [prompt] = pair.others["other"], pairing_prompts(0)[0][:1]
    answer = prefill_then_decode(pair.prefill, Client(other.url), prompt, MAX_TOKENS)
    assert expected.mismatches({prompt: answer}) == []
    log = other.log.read_text(encoding="utf-8")
    assert "BadAddress" in log
    assert "'nixl'" in log
    assert "'ucx'" in log
