"""Prefill and decode on the next vLLM, compared with one engine of it alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.model import write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.project.next.compare import Outcome
from tests.project.next.tree import environment
from tests.vllm.engines.engines import (
    BLOCK,
    EDGES,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    Configuration,
    cache_beside,
    engine,
)

_LENGTHS = sorted({1, 2, 700, *(edge + step for edge in EDGES for step in (-1, 0, 1))})
_CONFIGURATION = Configuration(
    "BHLNC", prefix_caching=True, one_process=False, policy="fail", verify="always"
)


def run(version: str, tree: Path, root: Path, work: Path) -> Outcome:
    """Start three engines, ask them, stop them."""
    env = {"PYTHONPATH": environment(tree, root)["PYTHONPATH"]}
    work.mkdir(parents=True, exist_ok=True)
    model = write_model(work)
    alone = EngineSpec(
        name="alone",
        model=model,
        port=free_ports(1)[0],
        one_process=True,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
    )
    specs = [
        alone,
        engine("prefill", model, _CONFIGURATION, "kv_producer", 0),
        engine("decode", model, _CONFIGURATION, "kv_consumer", (os.cpu_count() or 1) - 1),
    ]
    specs = [replace(spec, env={**spec.env, **env}) for spec in specs]
    with running(specs, work / "logs", cache=cache_beside(model)) as engines:
        return _compared(version, *engines)


def _compared(version: str, alone: Engine, prefill: Engine, decode: Engine) -> Outcome:
    clients = [Client(each.url) for each in (alone, prefill, decode)]
    reference, lending, pulling = clients
    problems = []
    for client in clients:
        said = json.loads(client.get_text("/version"))["version"]
        if said != version:
            problems.append(f"{client.url}: it is vLLM {said}")
    prompts = make_prompts(_LENGTHS, seed=33)
    for prompt in prompts:
        seen = prefill_then_decode(lending, pulling, prompt, MAX_TOKENS)
        found = compare(reference.complete(prompt, MAX_TOKENS), seen)
        if found:
            problems.append(f"{len(prompt)} tokens: {found}")
    metrics = pulling.metrics()
    pulled = int(metrics.get("pdconn:pulls_total", 0))
    verified = int(metrics.get("pdconn:pulls_verified_total", 0))
    if not pulled == verified == len(prompts) - 1:  # of one token nothing is pulled
        expected = len(prompts) - 1
        problems.append(f"expected {expected} pulls, got {pulled}, {verified} of them verified")
    other = (*prompts[-1][:-1], prompts[-2][0])
    if not compare(*(reference.complete(each, MAX_TOKENS) for each in (prompts[-1], other))):
        problems.append("control: a prompt with another last token has the same answer")
    line = f"{len(prompts)} prompts of 1 to {max(_LENGTHS)} tokens as one engine, {pulled} pulls"
    return Outcome("pair", line, tuple(problems))
