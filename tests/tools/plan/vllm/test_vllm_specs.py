"""Each built-in shape and family beside the specs of vLLM's own class, built without weights.

A process of its own takes vLLM's platform for that of an H100 (``meta_specs``).  Every family that
``pdconn plan --list`` names is compared, or stands in ``vllm_families.NOT_BUILT`` with the error of
vLLM (``test_every_family`` holds that law without vLLM).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.model_shape import ModelShape, StateSort
from pdconn.tools.plan.shapes import SHAPES, built_in
from tests.tools.plan.vllm import vllm_models
from tests.tools.plan.vllm.vllm_families import COMPARED, NOT_BUILT

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[4]
KINDS = {
    "FullAttentionSpec": "full", "MLAAttentionSpec": "full", "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window", "ChunkedLocalAttentionSpec": "chunk",
}  # fmt: skip
OURS = {"full_attention": "full", "sliding_window": "window", "chunked_local_attention": "chunk"}
Row = tuple[str, int | None, int, int, int]
Rows = dict[int, list[Row]]


def specs_of(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What vLLM caches, of every case at once: its import is what takes long."""
    # The first one that is built makes the process groups, also those of experts.
    ordered = {"first": vllm_models.SHAPES["qwen3-30b-a3b"], **cases}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.plan.vllm.meta_specs"],
        input=json.dumps({name: {"config": config} for name, config in ordered.items()}),
        cwd=ROOT, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def specs() -> dict[str, Any]:
    not_built = {name: one.config for name, one in NOT_BUILT.items()}
    return specs_of({**COMPARED, **not_built, "minimax-m3": vllm_models.MINIMAX_M3})


def theirs(found: dict[str, Any]) -> Rows:
    """By layer, what each of its parts keeps of a token, or of a request."""
    assert "error" not in found, found["error"]
    rows: Rows = {}
    for group in found["groups"]:
        if group["spec"] == "MambaSpec":
            row: Row = ("state", None, 0, group["nbytes"], 0)
        else:
            row = (KINDS[group["spec"]], group["window"], group["heads"], group["row_nbytes"],
                   group["row_tokens"])  # fmt: skip
        for layer in group["layers"]:
            rows.setdefault(layer, []).append(row)
    return {layer: sorted(parts, key=str) for layer, parts in sorted(rows.items())}


def ours(shape: ModelShape) -> Rows:
    rows: Rows = {}
    for sort in shape.sorts:
        if isinstance(sort, StateSort):
            row: Row = ("state", None, 0, sort.state.state_nbytes(1), 0)
        else:
            row = (OURS[str(sort.kind)], sort.window, sort.heads, sort.row_nbytes, sort.row_tokens)
        for layer in sort.layers:
            rows.setdefault(layer, []).append(row)
    return {layer: sorted(parts, key=str) for layer, parts in sorted(rows.items())}


@pytest.mark.parametrize("name", [shape.name for shape in SHAPES])
def test_a_built_in_shape_is_what_vllms_class_caches(name: str, specs: dict[str, Any]) -> None:
    assert ours(built_in(name)) == theirs(specs[name])


@pytest.mark.parametrize("name", COMPARED)
def test_a_configuration_is_read_as_vllms_class_reads_it(name: str, specs: dict[str, Any]) -> None:
    if name == "deepseek-v4":
        pytest.skip("read from its built-in shape")
    shape = model_shape(COMPARED[name], name)
    assert ours(shape) == theirs(specs[name])
    said = specs[name]["dtype"]
    assert shape.stored_as == ("bfloat16" if said == "auto" else said)


@pytest.mark.parametrize("family", NOT_BUILT)
def test_a_family_that_is_not_compared_is_one_that_vllm_cannot_build(
    family: str, specs: dict[str, Any]
) -> None:
    assert "error" in specs[family], "vLLM builds it: compare it"
    kind, words = NOT_BUILT[family].error
    assert specs[family]["error"].startswith(f"{kind}: ")
    assert words in specs[family]["error"]


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
    hybrid = theirs(specs["ibm-granite/granite-4.0-h-small"])
    assert ours(model_shape(COMPARED["ibm-granite/granite-4.0-h-tiny"])) != hybrid
