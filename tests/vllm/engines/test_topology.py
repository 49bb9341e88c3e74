"""Any topology to any topology through real vLLM: tensor parallelism and layouts mixed.

In the matrix: four engines, each of which both lends and pulls, so that every ordered pair
of them is a prefill and a decode.  Layouts and ranks were chosen so that the ten pairings
with two ranks on a side mix seven of the nine pairs of layouts; equal layouts at one rank
each are in ``test_pair``, and so are one rank to two and two to one for ``make test``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import Answer, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    BLOCK,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    Expected,
    Prompt,
    cache_beside,
    pairing_prompts,
    transfer_config,
)

pytestmark = pytest.mark.matrix

ENGINES = {"A": ("LBHNC", 1), "B": ("BHLNC", 1), "C": ("BLHNC", 2), "D": ("BHLNC", 2)}
PATIENT = {"claim_timeout": 90.0, "kv_lease_duration": 120.0}
"""Sixteen processes on two cores: one was seen to stand still for half a minute."""
PAIRINGS = ("AC", "AD", "BC", "BD", "CA", "CB", "DA", "DB", "CD", "DC")


@dataclass(frozen=True)
class Fleet:
    """The four engines, what one engine alone answers, and whether theirs reuse prefixes."""

    engines: dict[str, Engine]
    expected: Expected
    prefix_caching: bool

    def client(self, name: str) -> Client:
        return Client(self.engines[name].url)


@contextmanager
def fleet_of(model: Path, directory: Path, prefix_caching: bool) -> Iterator[dict[str, Engine]]:
    specs = []
    for name, (layout, ranks) in ENGINES.items():
        port, side_channel = free_ports(2)
        specs.append(
            EngineSpec(
                name=name,
                model=model,
                port=port,
                side_channel_port=side_channel,
                kv_transfer_config=transfer_config("kv_both", **PATIENT),
                layout=layout,
                prefix_caching=prefix_caching,
                tensor_parallel=ranks,
                one_process=ranks == 1,
                max_model_len=MAX_MODEL_LEN,
                block_tokens=BLOCK,
                kv_cache_mib=128,
            )
        )
    with running(specs, directory, cache=cache_beside(model), timeout_s=600) as engines:
        yield dict(zip(ENGINES, engines, strict=True))


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "plain"])
def fleet(
    request: pytest.FixtureRequest, model: Path, work: Path, expected: Expected
) -> Iterator[Fleet]:
    directory = work / f"topology-{request.param}"
    with fleet_of(model, directory, request.param) as engines:
        yield Fleet(engines, expected, request.param)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_pairing_answers_what_one_engine_alone_answers(fleet: Fleet, pairing: str) -> None:
    prefill, decode = (fleet.client(name) for name in pairing)
    before = decode.metrics()
    single, together = pairing_prompts(PAIRINGS.index(pairing))

    def through(prompt: Prompt) -> Answer:
        return prefill_then_decode(prefill, decode, prompt, MAX_TOKENS)

    seen = {prompt: through(prompt) for prompt in single}
    with ThreadPoolExecutor(len(together)) as pool:
        seen |= dict(zip(together, pool.map(through, together), strict=True))
    assert fleet.expected.mismatches(seen) == []
    after = decode.metrics()
    ranks = ENGINES[pairing[1]][1]

    def change(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert change("pdconn:pulls_total") == ranks * len(seen)
    # The last prompt begins with all whole blocks of the one before.
    assert (change("pdconn:saved_by_hits_bytes_total") > 0) == fleet.prefix_caching


@pytest.mark.parametrize(("pairing", "sources"), [("BD", 1), ("DB", 2)])
def test_head_major_blocks_of_other_parallelism_are_one_descriptor_per_source(
    fleet: Fleet, pairing: str, sources: int
) -> None:
    """A head slice of all layers of a block is one run."""
    prefill, decode = (fleet.client(name) for name in pairing)
    [prompt] = make_prompts([1501], seed=900 + sources)
    before = decode.metrics()
    prefill_then_decode(prefill, decode, prompt, 1)
    after = decode.metrics()

    def change(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    blocks = -(-1500 // BLOCK) + 2 * 3  # two groups of 64-token windows
    ranks = ENGINES[pairing[1]][1]
    descriptors = change("vllm:nixl_num_descriptors_sum")
    assert descriptors == blocks * sources * ranks
    assert change("pdconn:pulls_total") == ranks
