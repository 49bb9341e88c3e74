"""Gemma 4: full-attention layers with fewer and larger heads than the others.

A small one is made here.  Decode has two ranks, so each layer's heads must be known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.lab.client import Client, prefill_then_decode
from pdconn.lab.compare import compare, make_prompts
from pdconn.lab.engine import running
from pdconn.lab.model import ModelSpec, _write_tokenizer
from pdconn.lab.ports import free_ports
from pdconn.lab.spec import EngineSpec
from tests.vllm.engines.engines import (
    BLOCK,
    MAX_MODEL_LEN,
    WINDOW,
    Configuration,
    cache_beside,
    engine,
)

pytestmark = pytest.mark.matrix

CONFIGURATION = Configuration("LBHNC", False, one_process=True, policy="fail", verify="always")
NAMES = ("alone", "prefill", "decode", "corrupted")


def write_gemma_4(directory: Path) -> Path:
    """Random weights; attention is broad and answers vary, as in ``pdconn.lab.model``."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8, num_global_key_value_heads=2,
        head_dim=32, global_head_dim=64, attention_k_eq_v=True, sliding_window=WINDOW,
        max_position_embeddings=8192, vocab_size_per_layer_input=2048,
        hidden_size_per_layer_input=0, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(3)
    model = Gemma4ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 if "embed" in name else weight.shape[-1] ** -0.5)
            if "q_norm" in name:
                weight.fill_(1.5 * weight.shape[-1] ** -0.5)  # so that attention is broad
            if "lm_head" in name:
                weight.normal_(0, 4 * weight.shape[-1] ** -0.5)
                weight[:4] = 0  # special tokens are no answers
    model.save_pretrained(directory)
    _write_tokenizer(directory, ModelSpec("g4", hidden=128, intermediate=256, heads=8, kv_heads=8))
    generation = {"eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    """One alone, a pair of one and two ranks, and a decode engine whose pulls are corrupted."""
    work = tmp_path_factory.mktemp("gemma4")
    model = write_gemma_4(work / "model")
    alone = EngineSpec(
        name="alone",
        model=model,
        port=free_ports(1)[0],
        one_process=True,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
    )
    faults = {"reads": {"corrupt": 1.0}}
    specs = [
        alone,
        engine("prefill", model, CONFIGURATION, "kv_producer", 0),
        engine("decode", model, CONFIGURATION, "kv_consumer", 1, ranks=2),
        engine(
            "corrupted", model, CONFIGURATION, "kv_consumer", 1, verify="off", debug_faults=faults
        ),
    ]
    with running(specs, work, cache=cache_beside(model)) as started:
        yield dict(zip(NAMES, (Client(each.url) for each in started), strict=True))


def test_its_answers_are_those_of_one_engine(engines: dict[str, Client]) -> None:
    """It did not start: its configuration names no one number of heads."""
    answers = set()
    for prompt in make_prompts([1, 2, 33, 64, 65, 96, 130, 300, 700, 1500], seed=5):
        expected = engines["alone"].complete(prompt, 8)
        seen = prefill_then_decode(engines["prefill"], engines["decode"], prompt, 8)
        assert compare(expected, seen) is None, len(prompt)
        answers.add(expected.tokens)
    assert len(answers) == 10
    assert engines["decode"].metrics()["pdconn:pulls_verified_total"] == 2 * 9


def test_a_corrupted_pull_is_noticed(engines: dict[str, Client]) -> None:
    """Negative control; the tokens pulled fill their blocks, so that every byte matters."""
    for prompt in make_prompts([8 * BLOCK + 1] * 4, seed=9):
        expected = engines["alone"].complete(prompt, 8)
        seen = prefill_then_decode(engines["prefill"], engines["corrupted"], prompt, 8)
        assert compare(expected, seen) is not None, len(prompt)
