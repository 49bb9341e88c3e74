"""The holder of a prefix dies while a decode engine with a store loads rows beside its pull.

What the store has is loaded again, by itself, and the rest is computed, though vLLM's policy is its
default, ``fail``.  ``hasty`` takes every pull for received, and shows what the comparisons notice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdconn.tools.lab.engine import Engine, wait_ready
from pdconn.tools.lab.lab_client import Client, lend_prefix, prefill_only
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    Configuration,
    Expected,
    PdPair,
    Prompt,
    cache_beside,
    engine,
)
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    asked,
    hangs,
    num_rows,
    prompts,
    rows,
    store_engine,
    wait_for_rows,
)

pytestmark = pytest.mark.matrix

STORED, LENT = 6 * TOKENS, 10 * TOKENS
LENGTH = LENT + 60
DELAY_S = 1.0
COUNTED = {
    "beside": "pdconn:store_beside_tokens_total",
    "missed": "pdconn:store_beside_missed_tokens_total",
    "hit": "pdconn:store_hit_tokens_total",
    "failed": "vllm:nixl_num_failed_transfers_total",
}


@dataclass
class Scene:
    """An engine that holds prompts, and decode engines that load a part of them from a store."""

    holder: Engine
    clients: dict[str, Client]
    root: Path

    def stored_and_lent(self, seed: int) -> tuple[Prompt, dict[str, object]]:
        """A prompt of which the store has the first rows, and a ticket for more of it."""
        [prompt] = prompts(seed, (LENGTH,))
        before = len(rows(self.root, "fa"))
        asked(self.clients["saves"], [prompt[:STORED]])
        wait_for_rows(self.root, before + num_rows([prompt[:STORED]]))
        prefill_only(self.clients["holder"], prompt[: LENT + 1])
        told = lend_prefix(self.clients["holder"], prompt, LENT)
        assert told is not None
        assert told["remote_num_tokens"] == LENT
        return prompt, {"pdconn": {"from": told}}

    def lost(
        self, seed: int, expected: Expected, name: str = "loads"
    ) -> tuple[list[str], dict[str, float]]:
        """The holder is killed amid the reads: wrong answers, and what ``name`` has counted."""
        prompt, params = self.stored_and_lent(seed)
        client = self.clients[name]
        before = client.metrics()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.complete, prompt, NUM_TOKENS, kv_transfer_params=params)
            time.sleep(DELAY_S / 2)
            self.holder.kill_command()
            wrong = expected.mismatches({prompt: answer.result(90.0)})
        after = client.metrics()
        self.holder.launch()
        wait_ready([self.holder])
        return wrong, {each: after[key] - before[key] for each, key in COUNTED.items()}


@pytest.fixture(scope="module")
def scene(model: Path, work: Path, expected: Expected) -> Iterator[Scene]:
    del expected  # its engine starts first
    root = work / "beside-faults"
    caching = Configuration("LBHNC", True, one_process=True, policy="fail")
    faulty = {
        "debug_faults": {"reads": {"delay": 1.0, "delay_s": DELAY_S}},
        "claim_timeout": 2.0, "read_timeout": 4.0,
    }  # fmt: skip

    def loading(name: str, connector: str) -> EngineSpec:
        spec = store_engine(name, model, root, connector=connector, beside="always")
        transfer = dict(spec.kv_transfer_config or {})
        keys = {**transfer["kv_connector_extra_config"], **faulty}
        transfer["kv_connector_extra_config"] = keys
        return replace(spec, kv_transfer_config=transfer, env={**spec.env, "UCX_TLS": "tcp"})

    specs = [
        engine("holder", model, caching, "kv_both", 0),
        store_engine("saves", model, root),
        loading("loads", "HangingReads"),
        loading("hasty", "Hasty"),
    ]
    with running(specs, work / "beside-faulty", cache=cache_beside(model)) as started:
        yield Scene(started[0], {each.spec.name: Client(each.url) for each in started}, root)


def test_without_a_fault_both_parts_come(scene: Scene, expected: Expected) -> None:
    prompt, params = scene.stored_and_lent(61)
    client = scene.clients["loads"]
    before = client.metrics()
    answer = client.complete(prompt, NUM_TOKENS, kv_transfer_params=params)
    assert expected.mismatches({prompt: answer}) == []
    after = client.metrics()
    seen = {each: after[key] - before[key] for each, key in COUNTED.items()}
    assert seen == {"beside": STORED, "missed": 0, "hit": 0, "failed": 0}


def test_what_is_stored_is_loaded_though_the_holder_dies(scene: Scene, expected: Expected) -> None:
    wrong, seen = scene.lost(62, expected)
    assert wrong == []
    assert seen == {"beside": STORED, "missed": 0, "hit": STORED, "failed": 1}


def test_the_holder_dies_while_a_row_hangs(scene: Scene, expected: Expected) -> None:
    hangs(scene.root).write_text("3")
    try:
        wrong, seen = scene.lost(63, expected)
    finally:
        hangs(scene.root).unlink()
    assert wrong == []
    assert (seen["beside"], seen["failed"]) == (STORED, 1)


def test_one_that_takes_failed_pulls_for_received_is_wrong(
    scene: Scene, expected: Expected
) -> None:
    """Negative control."""
    wrong, _ = scene.lost(64, expected, "hasty")
    assert wrong


def test_nothing_stays_lent_or_lost(scene: Scene) -> None:
    for name in ("holder", "loads"):
        assert PdPair.used(scene.clients[name], 40.0) == 0.0, name
