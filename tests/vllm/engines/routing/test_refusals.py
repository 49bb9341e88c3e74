"""Engines that go on answering when they can serve nothing, and that close idle connections.

Three real engines behind the router.  Their API servers stay when their cores die
(``VLLM_KEEP_ALIVE_ON_ENGINE_DEATH``), so that every request to them is answered 500, and close
connections that were idle for a second, as often as the router asks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    BLOCK,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    Expected,
    cache_beside,
    one_after_another,
    transfer_config,
)

pytestmark = pytest.mark.matrix

ENV = {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1"}
PROMPTS = [prompt for prompt in one_after_another() if 40 < len(prompt) < 400]


@dataclass(frozen=True)
class Routed:
    """The engines and the router before them."""

    prefill: Engine
    decode: tuple[Engine, Engine]
    url: str
    log: Path

    def count(self, name: str, **labels: str) -> float:
        """A counter of the router."""
        page = Client(admin_url(self.url)).get_text("/metrics")
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == f"pdconn_router_{name}" and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def routed(model: Path, work: Path) -> Iterator[Routed]:
    def spec(name: str, role: str) -> EngineSpec:
        port, side = free_ports(2)
        return EngineSpec(
            name=name,
            model=model,
            port=port,
            side_channel_port=side if role == "kv_producer" else None,
            kv_transfer_config=transfer_config(role, policy="recompute"),
            one_process=True,
            max_model_len=MAX_MODEL_LEN,
            block_tokens=BLOCK,
            env=ENV,
        )

    specs = [
        spec("refusing-prefill", "kv_producer"),
        spec("refusing-decode", "kv_consumer"),
        spec("steady-decode", "kv_consumer"),
    ]
    with running(specs, work, cache=cache_beside(model)) as (prefill, *decode):
        urls = [engine.url for engine in decode]
        with running_proxy([prefill.url], urls, work, args=["--policy", "round-robin"]) as url:
            yield Routed(prefill, (decode[0], decode[1]), url, work / "proxy.log")


def core_of(engine: Engine) -> int:
    """An engine's core: of the children of its API server the one with the most memory."""
    children: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == engine.pid:
            children[int(stat.parent.name)] = int(fields[21])  # pages in memory
    assert children, f"{engine.spec.name} has no core"
    return max(children, key=lambda pid: children[pid])


def test_connections_that_engines_close_cost_nothing(routed: Routed, expected: Expected) -> None:
    """Each request meets connections that have been idle for as long as engines keep them."""
    proxy = Client(routed.url)
    for number in range(20):
        prompt = PROMPTS[number]
        assert compare(expected[prompt], proxy.complete(prompt, MAX_TOKENS)) is None
        time.sleep(0.96 + 0.004 * number)
    assert "engine down" not in routed.log.read_text(encoding="utf-8")
    assert routed.count("handed_over_requests_total") == 20


def test_an_engine_whose_core_died_costs_no_request(routed: Routed, expected: Expected) -> None:
    """It kept its share of all requests, and each got its 500."""
    proxy = Client(routed.url)
    dead, steady = routed.decode
    os.kill(core_of(dead), signal.SIGKILL)
    for prompt in PROMPTS[20:32]:
        assert compare(expected[prompt], proxy.complete(prompt, MAX_TOKENS)) is None
    assert Client(steady.url).metrics()["vllm:request_success_total"] >= 12
    assert routed.count("engine_up", engine=dead.url, role="decode") == 0
    assert 1 <= routed.count("retries_total", engine=dead.url, role="decode") <= 3


def test_decode_computes_if_the_core_of_prefill_died(routed: Routed, expected: Expected) -> None:
    proxy = Client(routed.url)
    os.kill(core_of(routed.prefill), signal.SIGKILL)
    for prompt in PROMPTS[32:40]:
        assert compare(expected[prompt], proxy.complete(prompt, MAX_TOKENS)) is None
    assert routed.count("engine_up", engine=routed.prefill.url, role="prefill") == 0
    computed = sum(
        routed.count("direct_requests_total", reason=why) for why in ("prefill_error", "no_prefill")
    )
    assert computed == 8
