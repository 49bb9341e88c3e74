"""Groups are those that vLLM's own code makes of the same layers."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.model_shape import LayerSort, ModelShape
from pdconn.tools.plan.shapes import SHAPES
from registration.references import AttentionKind
from tests.tools.plan.vllm import vllm_models

utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
if find_spec("vllm.v1.core.kv_cache_planning") is not None:  # from vLLM 0.33 on
    utils = pytest.importorskip("vllm.v1.core.kv_cache_planning")
specs = pytest.importorskip("vllm.v1.kv_cache_interface")
torch = pytest.importorskip("torch")

FULL, WINDOW = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW
HYBRIDS = (
    ModelShape("12 + 13", (LayerSort(tuple(range(12)), WINDOW, 128, 8, 512),
                           LayerSort(tuple(range(12, 25)), FULL, None, 8, 512))),
    ModelShape("20 + 30", (LayerSort(tuple(range(20)), WINDOW, 128, 8, 512),
                           LayerSort(tuple(range(20, 50)), FULL, None, 8, 512))),
    ModelShape("two pages", (LayerSort(tuple(range(52)), WINDOW, 128, 16, 512),
                             LayerSort(tuple(range(52, 62)), FULL, None, 4, 1024))),
    ModelShape("full of two pages", (LayerSort(tuple(range(5)), FULL, None, 16, 512),
                                     LayerSort(tuple(range(5, 9)), FULL, None, 4, 1024))),
    *(model_shape(vllm_models.CASES[name], name)
      for name in ("deepseek-v3.2", "mimo-v2-flash", "step-3.5, other heads", "afmoe")),
)  # fmt: skip


def spec(sort: LayerSort, block_tokens: int) -> Any:
    common = {
        "block_size": sort.block_tokens or block_tokens,
        "num_kv_heads": sort.heads,
        "head_size": 16,
        "dtype": torch.uint8,
        "state_content_bytes": sort.row_nbytes,
    }
    if sort.window is not None:
        kind = specs.SlidingWindowMLASpec if sort.heads == 1 else specs.SlidingWindowSpec
        return kind(**common, sliding_window=sort.window)
    if sort.heads == 1:
        return specs.MLAAttentionSpec(**common, tokens_per_state=sort.row_tokens)
    return specs.FullAttentionSpec(**common)


def vllm_groups(model: ModelShape, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What ``get_kv_cache_groups`` makes of the model under a block-outermost layout."""
    layers = {
        sort.layer_name(layer): spec(sort, 16)
        for layer in range(model.num_layers)
        for sort in model.sorts
        if layer in sort.layers
    }
    layout = SimpleNamespace(is_block_outermost=True)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="any")),
        speculative_config=None,
    )
    for name in ("get_hisparse_kv_cache_groups", "_annotate_eagle_groups",
                 "_warn_if_unannotated_eagle_mamba"):  # fmt: skip
        monkeypatch.setattr(utils, name, lambda *_, **__: None, raising=False)
    return [set(group.layer_names) for group in utils.get_kv_cache_groups(config, layers)]


@pytest.mark.parametrize("model", [*SHAPES, *HYBRIDS], ids=lambda model: model.name)
def test_groups_are_vllms(model, monkeypatch):
    ours = [
        {share.sort.layer_name(layer) for share in group.shares for layer in share.layers}
        for group in EngineShape(model).in_best_layout().groups
    ]
    theirs = vllm_groups(model, monkeypatch)
    assert sorted(map(sorted, ours)) == sorted(map(sorted, theirs))
