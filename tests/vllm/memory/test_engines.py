"""Engines of which nobody chose the layout, and one asked for another by the key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.model import write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import BLOCK, MAX_MODEL_LEN, Configuration, cache_beside, engine

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.timeout(900)]

CONFIGURATION = Configuration("LBHNC", True, one_process=True, policy="fail", verify="always")
UNREAD = {"layout": "LBNHC"}
READ = {"layout": "BHLNC"}


def of_its_own(spec: EngineSpec, **env: str) -> EngineSpec:
    """Without ``VLLM_KV_CACHE_LAYOUT``."""
    return replace(spec, layout=None, env={**spec.env, **env})


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    work = tmp_path_factory.mktemp("layouts")
    model = write_model(work)
    alone = EngineSpec(
        name="alone", model=model, port=free_ports(1)[0], one_process=True,
        max_model_len=MAX_MODEL_LEN, block_tokens=BLOCK, prefix_caching=True,
    )  # fmt: skip

    def made(name: str, cpu: int, **extra: Any) -> EngineSpec:
        role = "kv_producer" if name == "prefill" else "kv_consumer"
        return engine(name, model, CONFIGURATION, role, cpu, **extra)

    specs = [
        alone,
        of_its_own(made("prefill", 0)),
        of_its_own(made("unread", 1, **UNREAD)),
        of_its_own(made("read", 1, **READ), PDCONN_CPU_LAYOUTS="1"),
    ]
    with running(specs, work, cache=cache_beside(model)) as started:
        yield {spec.name: each for spec, each in zip(specs, started, strict=True)}


def log_of(engine: Engine) -> str:
    return Path(engine.log).read_text(encoding="utf-8")


def test_every_engine_starts_and_says_its_layout(engines: dict[str, Engine]) -> None:
    assert "pdconn: layout LBHNC: smallest run of a block" in log_of(engines["prefill"])
    assert "is configured" not in log_of(engines["prefill"])
    assert "pdconn: layout LBHNC: smallest run" in log_of(engines["unread"])
    assert "layout LBNHC is configured and LBHNC is in use" in log_of(engines["unread"])
    assert "pdconn: layout BHLNC: smallest run" in log_of(engines["read"])
    assert "is configured" not in log_of(engines["read"])


@pytest.mark.parametrize("decode", ["unread", "read"])
def test_they_hand_over(engines: dict[str, Engine], decode: str) -> None:
    clients = {name: Client(each.url) for name, each in engines.items()}
    prompts = make_prompts([2, BLOCK, BLOCK + 1, 300, 700], seed=len(decode))
    for prompt in prompts:
        seen = prefill_then_decode(clients["prefill"], clients[decode], prompt, 12)
        assert compare(clients["alone"].complete(prompt, 12), seen) is None, len(prompt)
    assert clients[decode].metrics()["pdconn:pulls_verified_total"] == len(prompts)
