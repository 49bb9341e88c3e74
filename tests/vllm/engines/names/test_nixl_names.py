"""A pair whose engines were both configured for NixlConnector, by manifests of two kinds.

Prefill names our module path, as behind fronts that know connectors by name; decode names none, and
its environment says ``PDCONN_AS_NIXL=1``.  Prefill listens at every address and advertises a host
that does not exist, so nothing is pulled but through a host that a router wrote into the ticket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import Answer, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.lab_errors import RequestRefused
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    BLOCK,
    MAX_TOKENS,
    WINDOW,
    Configuration,
    Expected,
    Prompt,
    cache_beside,
    engine,
)

pytestmark = pytest.mark.matrix

ADVERTISED = "prefill-0.invalid"
MANIFEST = {"num_threads": 4, "engine_ttl": 3600, "kv_recompute_threshold": 64}
"""Keys of NixlConnector that change nothing."""

CONFIGURATION = Configuration("BHLNC", False, one_process=True, policy="fail", guarded=True)


@dataclass(frozen=True)
class Pair:
    prefill: Engine
    decode: Engine

    def lent(self, prompt: Prompt) -> dict[str, Any]:
        return dict(prefill_only(Client(self.prefill.url), prompt) or {})

    def decoded(self, prompt: Prompt, ticket: dict[str, Any]) -> Answer:
        return Client(self.decode.url).complete(prompt, MAX_TOKENS, kv_transfer_params=ticket)

    def pulls(self) -> float:
        return Client(self.decode.url).metrics().get("pdconn:pulls_total", 0.0)


def named(spec: EngineSpec, env: dict[str, str], **path: str) -> EngineSpec:
    """The engine with a configuration that names NixlConnector."""
    config = dict(spec.kv_transfer_config or {})
    del config["kv_connector_module_path"]
    config |= {"kv_connector": "NixlConnector", **path}
    return replace(spec, kv_transfer_config=config, env={**spec.env, **env})


@pytest.fixture(scope="module")
def pair(model: Path, work: Path, expected: Expected) -> Iterator[Pair]:
    del expected  # its engine starts first
    lends = engine(
        "by-path", model, CONFIGURATION, "kv_producer", 0, advertise_host=ADVERTISED, **MANIFEST
    )
    pulls = engine("by-registry", model, CONFIGURATION, "kv_consumer", 1, **MANIFEST)
    specs = [
        named(
            lends,
            {"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"},
            kv_connector_module_path="pdconn.vllm.nixl",
        ),
        named(pulls, {"PDCONN_AS_NIXL": "1"}),
    ]
    with running(specs, work, cache=cache_beside(model)) as engines:
        yield Pair(*engines)


def test_their_answers_are_those_of_one_engine_through_a_router_that_overwrites_the_host(
    pair: Pair, expected: Expected
) -> None:
    prompts = make_prompts([2, BLOCK, WINDOW + BLOCK, 127, 300, 1000], seed=51)
    before, answers = pair.pulls(), {}
    for prompt in prompts:
        ticket = pair.lent(prompt)
        assert ticket["remote_host"] == ADVERTISED
        answers[prompt] = pair.decoded(prompt, {**ticket, "remote_host": pair.prefill.spec.host})
    assert expected.mismatches(answers) == []
    assert pair.pulls() - before == len(prompts)


def test_the_class_is_ours_and_each_key_of_theirs_is_answered_once(pair: Pair) -> None:
    for each in (pair.prefill, pair.decode):
        log = each.log.read_text(encoding="utf-8")
        assert "with name: PdconnConnector" in log
        for key in MANIFEST:
            assert log.count(f"pdconn: {key} is not needed, because") == 1


def test_the_advertised_host_alone_leads_nowhere(pair: Pair) -> None:
    """Negative control: it is the router's host that was dialled above."""
    (prompt,) = make_prompts([200], seed=52)
    with pytest.raises(RequestRefused):
        pair.decoded(prompt, pair.lent(prompt))
