"""The layout that a plan assumes is the one that vLLM resolves with pdconn's preference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.planning.layouts import LAYOUTS, PREFERRED
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.layer_memory import OFFERED, chosen_layout
from pdconn.tools.plan.shapes import SHAPES, built_in

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

CAPABILITY = {"FLASHINFER": (9, 0), "FLASHINFER_SM100": (10, 0)}


def backend_class(name: str) -> Any:
    """vLLM's class; skips what needs libraries that are not here."""
    try:
        return AttentionBackendEnum[name.removesuffix("_SM100")].get_class()
    except (ImportError, RuntimeError, ValueError, AttributeError) as error:
        pytest.skip(f"{name} cannot be imported here: {error}")


@pytest.mark.parametrize("name", OFFERED)
def test_backends_offer_what_vllm_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = CAPABILITY.get(name, (9, 0))
    monkeypatch.setattr(
        type(current_platform), "get_device_capability",
        classmethod(lambda cls, device_id=0: DeviceCapability(major, minor)), raising=False,
    )  # fmt: skip
    if name == "ROCM_AITER_UNIFIED_ATTN":
        pytest.skip("it asks the current configuration whether there is a connector")
    theirs = backend_class(name).supported_kv_cache_layouts()
    assert (None if theirs is None else tuple(one.name for one in theirs)) == OFFERED[name]


class Backend:
    """One that declares what a real one does."""

    def __init__(self, offered: tuple[str, ...] | None) -> None:
        self._offered = offered

    def supported_kv_cache_layouts(self) -> tuple[KVCacheLayout, ...] | None:
        return None if self._offered is None else tuple(KVCacheLayout[n] for n in self._offered)


@pytest.mark.parametrize("prefers", [True, False])
@pytest.mark.parametrize("name", ["", *OFFERED])
def test_what_is_chosen_is_what_vllm_resolves(
    name: str, prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    rocm = name.startswith("ROCM")
    asked = PREFERRED if prefers and not rocm else None
    monkeypatch.setattr(utils, "get_kv_connector_cache_layout", lambda config: asked)
    backend = Backend(OFFERED[name] if name else None)
    names = [one.name for one in utils.get_supported_kv_cache_layouts([backend])]  # type: ignore[list-item]
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None))
    resolved = utils.resolve_kv_cache_layout(config, [names])  # type: ignore[arg-type]
    assert chosen_layout(LAYOUTS, name, is_latent=not prefers) == resolved.name


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_plan_assumes_pdconns_preference(shape: Any, tp: int) -> None:
    engine = EngineShape(shape, tp=tp)
    is_latent = all(sort.is_latent for sort in shape.attention)
    if shape.name == "deepseek-v4":  # pages of its sorts lie beside each other in a block
        assert engine.layout == "BLHNC"
    else:
        assert engine.layout == ("LBNHC" if is_latent else "LBHNC")
    explicit = EngineShape(shape, engine.layout, tp=tp)
    assert explicit == engine
    assert engine.in_best_layout().layout in ("BHLNC", "BLHNC")


def test_backends_that_read_few_layouts_are_planned_with_theirs() -> None:
    model = built_in("llama-3.1-8b")
    found = {name: EngineShape(model, backend=name).layout for name in OFFERED}
    assert {name for name, layout in found.items() if layout != PREFERRED} == {
        "FLEX_ATTENTION", "HPC_ATTN", "TURBOQUANT", "ROCM_ATTN",
    }  # fmt: skip
    assert found["FLEX_ATTENTION"] == "LBNHC", "negative control: not the preference"
    assert found["ROCM_ATTN"] == "LHBNC"
