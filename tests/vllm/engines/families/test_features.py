"""Adapters and data parallelism: prefill to decode, with real vLLM and NIXL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.lab_client import Client, prefill_only, prefill_then_decode
from pdconn.tools.lab.model import TINY, write_model
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import cache_beside
from tests.vllm.engines.families.handover import NUM_TOKENS, engine, lend_most
from tests.vllm.engines.families.models import Family

pytestmark = pytest.mark.matrix

GEMMA_3 = Family("gemma3", make=lambda: None)  # type: ignore[arg-type,return-value]
RANK = 8


def write_adapter(directory: Path, seed: int) -> Path:
    """Low-rank changes of the queries and values of every layer of the lab's tiny model."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    directory.mkdir(parents=True)
    tensors = {}
    outputs = {"q_proj": TINY.heads * TINY.head_dim, "v_proj": TINY.kv_heads * TINY.head_dim}
    for layer in range(TINY.layers):
        for name, out in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, TINY.hidden) / TINY.hidden**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK) / RANK**0.5
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(outputs),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_an_adapter(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    adapters = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")}
    modules = [f"{name}={path}" for name, path in adapters.items()]
    args = ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", *modules)
    specs = [
        engine("alone", GEMMA_3, model, None),
        engine("prefill", GEMMA_3, model, "kv_both", prefix_caching=True),
        engine("decode", GEMMA_3, model, "kv_both", prefix_caching=True),
    ]
    anew = [f"c={adapters[name]}" for name in "bab"]  # prefill and decode have others of the name
    specs = [
        replace(spec, args=(*spec.args, *args, other))
        for spec, other in zip(specs, anew, strict=True)
    ]
    prompts = make_prompts([2, 33, 64, 130, 700], seed=41)
    with running(specs, tmp_path, cache=cache_beside(model)) as started:
        seen = set()
        for name in ("lab", "a", "b", "a"):
            alone, prefill, decode = (Client(each.url, model=name) for each in started)
            for prompt in prompts:
                want = alone.complete(prompt, NUM_TOKENS)
                answer = prefill_then_decode(prefill, decode, prompt, NUM_TOKENS)
                assert compare(want, answer) is None, (name, len(prompt))
                seen.add((len(prompt), answer.tokens))
        assert len(seen) == 3 * len(prompts), "adapters differ"
        prompt = make_prompts([90], seed=43)[0]
        alone, prefill, decode = (Client(each.url, model="c") for each in started)
        pulls = decode.metrics()["pdconn:pulls_total"]
        answer = prefill_then_decode(prefill, decode, prompt, NUM_TOKENS)
        assert compare(alone.complete(prompt, NUM_TOKENS), answer) is None, "decode's own"
        assert decode.metrics()["pdconn:pulls_total"] == pulls
        base, other = Client(started[1].url), Client(started[2].url, model="a")
        prompt = make_prompts([100], seed=42)[0]
        ticket = prefill_only(base, prompt)
        pulls = other.metrics()["pdconn:pulls_total"]
        answer = other.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        own = Client(started[0].url, model="a").complete(prompt, NUM_TOKENS)
        assert compare(own, answer) is None, "computed: the ticket is of another adapter"
        assert other.metrics()["pdconn:pulls_total"] == pulls
        prompt = make_prompts([1000], seed=44)[0]
        prefill_only(Client(started[1].url, model="a"), prompt)
        for name, is_pulled in (("b", False), ("lab", False), ("a", True)):
            source, _ = lend_most(Client(started[1].url, model="a"), prompt)
            alone, again, computing = (Client(each.url, model=name) for each in started)
            pulls = computing.metrics().get("pdconn:pulls_total", 0.0)
            ticket = prefill_only(computing, prompt, source)
            assert (computing.metrics().get("pdconn:pulls_total", 0.0) > pulls) == is_pulled, name
            answer = again.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
            assert compare(alone.complete(prompt, NUM_TOKENS), answer) is None, name


def two_ranks(spec: EngineSpec) -> EngineSpec:
    """The same engine, data-parallel."""
    return replace(spec, args=(*spec.args, "--data-parallel-size", "2"), one_process=False)


def test_data_parallel_ranks(tmp_path: Path) -> None:
    """Each rank lends by a side channel of its own, and each may pull."""
    model = write_model(tmp_path)
    specs = [
        engine("alone", GEMMA_3, model, None),
        two_ranks(engine("prefill", GEMMA_3, model, "kv_producer")),
        two_ranks(engine("decode", GEMMA_3, model, "kv_consumer")),
    ]
    prompts = make_prompts([2, 33, 64, 130, 700, 90, 1500, 40], seed=43)
    with running(specs, tmp_path, cache=cache_beside(model), timeout_s=400.0) as started:
        alone, prefill, decode = (Client(each.url) for each in started)
        ports = set()
        for prompt in prompts:
            want = alone.complete(prompt, NUM_TOKENS)
            ticket = prefill_only(prefill, prompt)
            assert ticket
            ports.add(ticket["remote_port"])
            answer = decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
            assert compare(want, answer) is None, len(prompt)
        assert len(ports) == 2
        assert decode.metrics()["pdconn:pulls_verified_total"] == len(prompts)
