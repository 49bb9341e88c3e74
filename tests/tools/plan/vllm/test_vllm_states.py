"""States, their blocks and groups, against vLLM's own code for models that are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.kv_cache_utils")

from pdconn.planning.layouts import LAYOUTS
from pdconn.tools.plan import engine_shape as engine_module
from pdconn.tools.plan import layer_states
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.model_shape import StateSort
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.vllm.blocks.recurrent_states import num_groups, state_chunks
from tests.tools.plan.published import GEMMA_4, PUBLISHED
from tests.tools.plan.vllm.vllm_hybrids import (
    Theirs,
    gemma_4_specs,
    groups_of,
    takes_layout,
)

Patch = pytest.MonkeyPatch
TPS = (1, 2, 4, 8)


def possible(name: str) -> list[int]:
    """The numbers of ranks that the model's heads and groups divide into."""
    return [tp for tp in TPS if _engine(name, tp) is not None]


def _engine(name: str, tp: int, block: int = 16, layout: str = "") -> EngineShape | None:
    try:
        return EngineShape(model_shape(PUBLISHED[name]), layout, tp=tp, block_tokens=block)
    except ShapeError:
        return None


def made(name: str, tp: int, block: int = 16, layout: str = "") -> EngineShape:
    return EngineShape(model_shape(PUBLISHED[name]), layout, tp=tp, block_tokens=block)


def state_problems(name: str) -> list[str]:
    """Where bytes or pieces of a state differ from vLLM's, or from those that are registered."""
    found = []
    (sort,) = model_shape(PUBLISHED[name]).states
    for tp in possible(name):
        theirs = Theirs(PUBLISHED[name], tp)
        spec = theirs.state(theirs.engine())
        if sort.state.state_nbytes(tp) != spec.page_size_bytes:
            found.append(
                f"tp {tp}: {sort.state.state_nbytes(tp)} bytes, vLLM {spec.page_size_bytes}"
            )
        groups = num_groups(theirs.text)
        for rank in range(tp):
            pieces = state_chunks(spec, num_groups=groups, tp_rank=rank, tp_size=tp)
            if sort.state.state_chunks(rank, tp) != pieces:
                found.append(
                    f"tp {tp}, rank {rank}: {sort.state.state_chunks(rank, tp)}, not {pieces}"
                )
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_state_has_the_bytes_and_the_pieces_that_it_has_in_vllm(name: str) -> None:
    assert state_problems(name) == []
    assert 1 in possible(name)
    assert 2 in possible(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_with_states_are_vllms(name: str) -> None:
    shape = model_shape(PUBLISHED[name])
    ours = {sort.layer_name(layer) for sort in shape.sorts for layer in sort.layers}
    theirs = Theirs(PUBLISHED[name], 1)
    assert ours == set(theirs.specs(theirs.engine()))


def block_problems(name: str, monkeypatch: Patch) -> list[str]:
    """Where blocks or pages differ from what vLLM makes of them."""
    found = []
    for tp in possible(name):
        for block in (16, 32, 48, 128, 256, 1024):
            ours = made(name, tp, block)
            theirs = Theirs(PUBLISHED[name], tp, block)
            engine = theirs.aligned(monkeypatch)
            pages = {share.page_nbytes for group in ours.groups for share in group.shares}
            right = {spec.page_size_bytes for spec in theirs.specs(engine).values()}
            size = engine.cache_config.block_size
            if (ours.attention_block_tokens, pages) != (size, right):
                found.append(f"{tp}, {block}: {ours.attention_block_tokens}, {pages}: {size}")
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_blocks_are_raised_as_vllm_raises_them(name: str, monkeypatch: Patch) -> None:
    assert block_problems(name, monkeypatch) == []


def group_problems(name: str, monkeypatch: Patch) -> list[str]:
    found = []
    for tp in possible(name):
        for layout in ("BLHNC", "LBNHC"):
            ours = _ours(made(name, tp, layout=layout))
            theirs = Theirs(PUBLISHED[name], tp)
            right = groups_of(theirs.specs(theirs.aligned(monkeypatch)), layout, monkeypatch)
            if ours != right:
                found.append(f"tp {tp}, {layout}: {ours}, vLLM {right}")
    return found


def _ours(engine: EngineShape) -> list[tuple[int, list[str]]]:
    return sorted(
        (
            group.block_tokens,
            sorted(
                share.sort.layer_name(layer) for share in group.shares for layer in share.layers
            ),
        )
        for group in engine.groups
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_groups_are_vllms(name: str, monkeypatch: Patch) -> None:
    assert group_problems(name, monkeypatch) == []


@pytest.mark.parametrize("name", GEMMA_4)
@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "LBHNC", "LBNHC"])
def test_gemma_4_has_vllms_groups(name: str, layout: str, monkeypatch: Patch) -> None:
    """Where layers are outermost, the smaller page gets twice the tokens, and only there."""
    for tp in TPS:
        for block in (16, 64):
            specs = gemma_4_specs(GEMMA_4[name], tp, block)
            shape = EngineShape(model_shape(GEMMA_4[name]), layout, tp=tp, block_tokens=block)
            assert _ours(shape) == groups_of(specs, layout, monkeypatch)


def layout_problems(name: str, tp: int, monkeypatch: Patch) -> list[str]:
    """Layouts that only we take, or only vLLM."""
    if name in GEMMA_4:
        specs, shape = gemma_4_specs(GEMMA_4[name], tp), model_shape(GEMMA_4[name])
    else:
        theirs = Theirs(PUBLISHED[name], tp)
        specs, shape = theirs.specs(theirs.aligned(monkeypatch)), model_shape(PUBLISHED[name])
    found = []
    for layout in LAYOUTS:
        try:
            EngineShape(shape, layout, tp=tp)
            ours = True
        except ShapeError:
            ours = False
        if ours != takes_layout(specs, layout, monkeypatch):
            found.append(f"{layout}: {ours}")
    return found


@pytest.mark.parametrize("name", [*PUBLISHED, *GEMMA_4])
def test_layouts_are_those_that_vllm_takes(name: str, monkeypatch: Patch) -> None:
    for tp in (1, 2):
        assert layout_problems(name, tp, monkeypatch) == []
    monkeypatch.setattr(engine_module, "layouts_of", lambda paged, tp: LAYOUTS)
    assert layout_problems(name, 1, monkeypatch) != []


def test_heads_of_gemma_4_differ_by_kind() -> None:
    for name, config in GEMMA_4.items():
        ours = {
            sort.layer_name(layer): (sort.heads, sort.row_nbytes)
            for sort in model_shape(config).attention
            for layer in sort.layers
        }
        theirs = {
            layer: (spec.num_kv_heads, 4 * spec.head_size)
            for layer, spec in gemma_4_specs(config, 1).items()
        }
        assert ours == theirs, name
        assert len(set(ours.values())) == 2


def test_sizes_by_hand() -> None:
    """Qwen3-Next: 3 tokens of 2 x 16 x 128 + 32 x 128 channels, and 32 x 128 x 128, 16 bits."""
    (sort,) = model_shape(PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"]).states
    assert sort.state.state_nbytes(1) == 2 * (3 * 8192 + 32 * 128 * 128) == 1_097_728
    # 2 heads x 256 x (K and V) x 2 bytes: 2 KiB a token, so 536 tokens, and 544 in steps of 16.
    assert made("Qwen/Qwen3-Next-80B-A3B-Instruct", 1).attention_block_tokens == 544


# --- the tests notice what is wrong


def _kept_by_all(parts: layer_states.Parts, rank: int, tp: int) -> tuple[int, int]:
    return 0, parts.count


def _divided_groups(
    values: tuple[int, int], groups: int, state_dim: int, kernel: int, sizes: Any
) -> Any:
    made = MAMBA2(values, groups, state_dim, kernel, sizes)
    x, *groups_of_b_and_c = made.window
    shared = (replace(one, is_shared=not one.is_shared) for one in groups_of_b_and_c)
    return replace(made, window=(x, *shared))


MAMBA2 = layer_states.mamba2


def _without_window(state: layer_states.LayerState) -> Any:
    return iter(() if state.recurrent is None else (state.recurrent,))


@pytest.mark.parametrize(
    ("target", "wrong", "name"),
    [
        ("pdconn.tools.plan.layer_states.Parts.held", _kept_by_all, "Qwen/Qwen3.5-27B"),
        (
            "pdconn.tools.plan.hf.state_layers.mamba2",
            _divided_groups,
            "tiiuae/Falcon-H1-34B-Instruct",
        ),
        (
            "pdconn.tools.plan.layer_states.LayerState._pieces",
            _without_window,
            "LiquidAI/LFM2-1.2B",
        ),
        ("pdconn.tools.plan.layer_states._CHANNEL_PARTS", 48, "ai21labs/Jamba-v0.1"),
    ],
)
def test_another_state_is_noticed(
    monkeypatch: Patch, target: str, wrong: Callable[..., Any], name: str
) -> None:
    assert state_problems(name) == []
    monkeypatch.setattr(target, wrong)
    assert state_problems(name) != []


def test_blocks_of_other_steps_are_noticed(monkeypatch: Patch) -> None:
    """A latent's blocks beside states come in steps of 128 tokens, and others in steps of 16."""
    kimi, granite = "moonshotai/Kimi-Linear-48B-A3B-Instruct", "ibm-granite/granite-4.0-h-small"
    monkeypatch.setattr(engine_module, "_MLA_STEP_TOKENS", 0)
    assert block_problems(kimi, monkeypatch) != []
    assert block_problems(granite, monkeypatch) == []
    right = engine_module.raised_block_tokens
    monkeypatch.setattr(engine_module, "raised_block_tokens", lambda asked, *more: right(16, *more))
    assert block_problems(granite, monkeypatch) != []


def test_states_without_padding_are_noticed(monkeypatch: Patch) -> None:
    """A page of its own size for each state: groups of their own rows."""
    name = "nvidia/Nemotron-H-8B-Base-8K"
    paged = engine_module.EngineShape._paged.fget

    def unpadded(engine: EngineShape) -> list[Any]:
        return [
            replace(one, page_nbytes=engine.state_nbytes)
            if isinstance(one.sort, StateSort)
            else one
            for one in paged(engine)
        ]

    monkeypatch.setattr(engine_module.EngineShape, "_paged", property(unpadded))
    assert block_problems(name, monkeypatch) != []
