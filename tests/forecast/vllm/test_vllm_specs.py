"""Each built-in shape and family beside the specs of vLLM's own class, built without weights.

A process of its own takes vLLM's platform for that of an H100 (``meta_specs``).  Not built, and
why: families that keep states (Triton is needed as their modules are imported; their states and
pages are compared with vLLM's ``MambaSpec`` in ``test_vllm_states``), Kimi K3 (``cutlass``),
Apertus (reads a weight as it is built), and families that vLLM runs by transformers' classes, which
make tensors on a card (Arcee, GLM, OLMo 2 and 3, Seed-OSS, SmolLM 3, Starcoder 2).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdconn.forecast.hf.config import model_shape
from pdconn.forecast.model import ModelShape
from pdconn.forecast.shapes import SHAPES, built_in
from tests.forecast.vllm import vllm_models

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[3]
KINDS = {
    "FullAttentionSpec": "full", "MLAAttentionSpec": "full", "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window", "ChunkedLocalAttentionSpec": "chunk",
}  # fmt: skip
OURS = {"full_attention": "full", "sliding_window": "window", "chunked_local_attention": "chunk"}
Rows = dict[int, list[tuple[str, int | None, int, int, int]]]


@pytest.fixture(scope="module")
def specs() -> dict[str, Any]:
    """What vLLM caches, of every case at once: its import is what takes long."""
    cases = {**vllm_models.SHAPES, **vllm_models.CASES, "minimax-m3": vllm_models.MINIMAX_M3}
    # The first one that is built makes the process groups, also those of experts.
    first = "qwen3-30b-a3b"
    ordered = {first: cases[first], **cases}
    done = subprocess.run(
        [sys.executable, "-m", "tests.forecast.vllm.meta_specs"],
        input=json.dumps({name: {"config": config} for name, config in ordered.items()}),
        cwd=ROOT, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def theirs(found: dict[str, Any]) -> Rows:
    """By layer, what each of its parts keeps of a token."""
    assert "error" not in found, found["error"]
    rows: Rows = {}
    for group in found["groups"]:
        row = (KINDS[group["spec"]], group["window"], group["heads"], group["row_nbytes"],
               group["row_tokens"])  # fmt: skip
        for name in group["layers"]:
            layer = re.search(r"layers\.(\d+)\.", name)
            assert layer is not None, name
            rows.setdefault(int(layer[1]), []).append(row)
    return {layer: sorted(parts, key=str) for layer, parts in sorted(rows.items())}


def ours(shape: ModelShape) -> Rows:
    rows: Rows = {}
    for sort in shape.attention:
        row = (OURS[str(sort.kind)], sort.window, sort.heads, sort.row_nbytes, sort.row_tokens)
        for layer in sort.layers:
            rows.setdefault(layer, []).append(row)
    return {layer: sorted(parts, key=str) for layer, parts in sorted(rows.items())}


@pytest.mark.parametrize("name", [shape.name for shape in SHAPES])
def test_a_built_in_shape_is_what_vllms_class_caches(name: str, specs: dict[str, Any]) -> None:
    assert ours(built_in(name)) == theirs(specs[name])


@pytest.mark.parametrize("name", [*vllm_models.SHAPES, *vllm_models.CASES])
def test_a_configuration_is_read_as_vllms_class_reads_it(name: str, specs: dict[str, Any]) -> None:
    if name == "deepseek-v4":
        pytest.skip("read from its built-in shape")
    config = {**vllm_models.SHAPES, **vllm_models.CASES}[name]
    shape = model_shape(config, name)
    assert ours(shape) == theirs(specs[name])
    said = specs[name]["dtype"]
    assert shape.stored_as == ("bfloat16" if said == "auto" else said)


def test_minimax_m3_keeps_what_its_family_s_name_does_not_tell(specs: dict[str, Any]) -> None:
    """Negative control, and why it is refused: as MiniMax M2 it lacks 57 rows of an indexer."""
    right = theirs(specs["minimax-m3"])
    as_m2 = {key: value for key, value in vllm_models.MINIMAX_M3.items()
             if key not in ("sparse_attention_config", "model_type")}  # fmt: skip
    wrong = ours(model_shape({**as_m2, "model_type": "minimax_m2"}))
    assert sum(wrong[layer] != right[layer] for layer in right) == 57


def test_a_shape_that_differs_is_noticed(specs: dict[str, Any]) -> None:
    assert ours(built_in("qwen3-8b")) != theirs(specs["qwen3-32b"])
    assert ours(built_in("gpt-oss-20b")) != theirs(specs["gpt-oss-120b"])
