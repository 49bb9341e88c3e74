"""States in a forecast: their bytes move once, whatever the prompt, the hit and the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from pdconn.tools.plan.advice import advise
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.forecast import Forecast, forecast
from pdconn.tools.plan.forecast_report import ForecastReport
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.layer_states import ItemSizes, LayerState, Parts, mamba2
from pdconn.tools.plan.link import Link
from pdconn.tools.plan.model_shape import LayerSort, ModelShape, StateSort
from pdconn.tools.plan.plan_errors import ShapeError, UnreadableConfig
from registration.references import AttentionKind
from tests.tools.plan.published import GEMMA_4, PUBLISHED

LINK = Link("test", 1e9, 1e-6, "made up")
QWEN = "Qwen/Qwen3-Next-80B-A3B-Instruct"
GRANITE = "ibm-granite/granite-4.0-h-small"
NEMOTRON = "nvidia/Nemotron-H-8B-Base-8K"

QWEN_STATE = 36 * 2 * (3 * 8192 + 32 * 128 * 128)
"""36 layers: a window of 3 tokens of 8192 channels, 32 heads of 128 x 128, 16 bits each."""


def pull(
    name: str, their: dict[str, Any], our: dict[str, Any], prompt: int, hit: int = 0, **how: Any
) -> Forecast:
    model = model_shape(PUBLISHED[name])
    sides = EngineShape(model, **their), EngineShape(model, **our)
    return forecast(*sides, prompt, hit, LINK, **how)


@pytest.mark.parametrize("prompt", [2, 100, 545, 546, 8192, 100_000])
def test_the_bytes_of_states_do_not_depend_on_the_prompt(prompt: int) -> None:
    made = pull(QWEN, {}, {}, prompt)
    assert made.total.state == QWEN_STATE
    # 12 layers of attention, 2 KiB a token, in blocks of 544.
    blocks = -(-(prompt - 1) // 544)
    assert made.total.nbytes == QWEN_STATE + blocks * 544 * 12 * 2048


def test_a_hit_saves_no_state() -> None:
    cold, warm = pull(QWEN, {}, {}, 8192), pull(QWEN, {}, {}, 8192, 544 * 10)
    assert warm.total.state == cold.total.state == QWEN_STATE
    assert warm.total.saved_by_hits == 5440 * 12 * 2048
    assert warm.total.nbytes + warm.total.saved_by_hits == cold.total.nbytes


@pytest.mark.parametrize("name", [QWEN, GRANITE, NEMOTRON])
@pytest.mark.parametrize(
    ("their", "our"),
    [
        ({}, {}),
        ({"tp": 2}, {}),
        ({}, {"tp": 4}),
        ({"tp": 4, "layout": "LBNHC"}, {"tp": 2, "block_tokens": 64}),
        ({"pp": 2}, {"tp": 2, "pp": 4}),
        ({"tp": 8, "pp": 2, "layout": "BLNHC"}, {"tp": 8, "layout": "LBHNC"}),
    ],
)
def test_every_rank_of_decode_gets_its_part_of_every_state(
    name: str, their: dict[str, Any], our: dict[str, Any]
) -> None:
    made = pull(name, their, our, 3000)
    tp = our.get("tp", 1)
    (sort,) = made.decode.model.states
    assert made.total.state == len(sort.layers) * tp * sort.state.state_nbytes(tp)
    assert sum(group.cost.state for group in made.groups) == made.total.state
    assert sum(cost.state for cost in made.received) == made.total.state
    assert sum(made.sent) == made.total.nbytes
    divided = {cost.state for cost in made.received}
    assert len(divided) == 1 or our.get("pp")


def test_a_group_that_all_ranks_keep_moves_once_for_each() -> None:
    """Granite has one group of B and C: two of 128 channels, in 3 tokens of the window."""
    one, four = (pull(GRANITE, {}, {"tp": tp}, 100).total.state for tp in (1, 4))
    assert four - one == 3 * 36 * (3 * 2 * 128 * 2)


def test_a_state_is_one_run_between_equal_ranks_and_pieces_between_unequal() -> None:
    """Every token of the window has q, k and v, each divided by itself; the state is behind."""
    groups = pull(QWEN, {"layout": "LBHNC"}, {"layout": "LBHNC"}, 100).groups
    of_states = [group for group in groups if group.group.kind is AttentionKind.STATE]
    assert [group.cost.runs for group in of_states] == [12, 12, 12]
    unequal = pull(QWEN, {"layout": "LBHNC"}, {"tp": 2, "layout": "LBHNC"}, 100).groups
    runs = [group.cost.runs for group in unequal if group.group.kind is AttentionKind.STATE]
    assert runs == [2 * 12 * (3 * 3 + 1)] * 3


def test_many_runs_are_counted_alike() -> None:
    sides = {"tp": 2, "layout": "LBHNC"}, {"tp": 4, "layout": "BLHNC"}
    laid_out = pull(QWEN, *sides, 700)
    counted = pull(QWEN, *sides, 700, max_laid_out_runs=0)
    assert counted.total.nbytes == laid_out.total.nbytes
    assert counted.total.state == laid_out.total.state
    states = [n for n, group in enumerate(laid_out.groups) if group.group.window is None][1:]
    assert states
    for number in states:
        assert counted.groups[number].cost.runs == laid_out.groups[number].cost.runs


def test_blocks_of_unequal_ranks_differ_and_meet() -> None:
    """With one rank, a block of 544 tokens holds a state; with two, whose heads halve too, also.

    With four, KV heads are replicated and states are not: 272 tokens.
    """
    sizes = [
        EngineShape(model_shape(PUBLISHED[QWEN]), tp=tp).attention_block_tokens for tp in (1, 2, 4)
    ]
    assert sizes == [544, 544, 272]
    made = pull(QWEN, {}, {"tp": 4}, 5000)
    assert {(one.their_block_tokens, one.group.block_tokens) for one in made.groups} == {(544, 272)}


def test_advice_about_states() -> None:
    short = {one.code: one.text for one in advise(pull(QWEN, {}, {"tp": 4}, 64))}
    assert "prefix hits end at multiples of 272 tokens" in short["raised-blocks"]
    assert "states, which move whole" in short["mostly-states"]
    long = {one.code for one in advise(pull(QWEN, {}, {"block_tokens": 1024}, 60_000))}
    assert "mostly-states" not in long
    without = EngineShape(ModelShape("plain", (LayerSort((0,), AttentionKind.FULL, None, 1, 8),)))
    codes = {one.code for one in advise(forecast(without, without, 100, 0, LINK))}
    assert not codes & {"raised-blocks", "mostly-states"}


def test_an_engine_with_larger_blocks_keeps_them() -> None:
    model = model_shape(PUBLISHED[QWEN])
    raised = [EngineShape(model, block_tokens=n).attention_block_tokens for n in (16, 512, 1024)]
    assert raised == [544, 1024, 1024]
    codes = {one.code for one in advise(pull(QWEN, {"block_tokens": 1024},
                                             {"block_tokens": 1024}, 60_000))}  # fmt: skip
    assert "raised-blocks" not in codes


def test_a_document_has_the_bytes_of_states() -> None:
    made = pull(NEMOTRON, {}, {"tp": 2}, 3000)
    found = ForecastReport(made, ()).document()
    assert found["total"]["state_bytes"] == made.total.state > 0
    assert sum(group["state_bytes"] for group in found["groups"]) == made.total.state
    assert {group["kind"] for group in found["groups"]} == {"mamba", "full_attention"}


def test_a_state_is_divided_by_its_parts() -> None:
    state = mamba2((8, 4), 2, 16, 4, ItemSizes(2, 4))
    sort = StateSort((0,), state)
    attention = LayerSort((1,), AttentionKind.FULL, None, 8, 512)
    model = ModelShape("eight heads, two groups", (sort, attention))
    for tp in (1, 2):
        EngineShape(model, tp=tp)
    with pytest.raises(ShapeError, match="tp: expected a divisor of a state's 2 parts, got 4"):
        EngineShape(model, tp=4)
    # Three tokens of 32 channels and twice 2 x 16, in 2 bytes; 8 x 4 x 16 in 4.
    assert state.state_nbytes(1) == 3 * (32 + 64) * 2 + 8 * 4 * 16 * 4
    with pytest.raises(ShapeError, match="at least one"):
        StateSort((), state)
    shared = mamba2((8, 4), 1, 16, 4, ItemSizes(2, 4))
    assert shared.state_nbytes(4) == 3 * (8 + 32) * 2 + 2 * 4 * 16 * 4
    EngineShape(ModelShape("one group", (StateSort((0,), shared), attention)), tp=8)


def test_a_model_of_states_only_has_no_block_to_raise() -> None:
    model = ModelShape("states", (StateSort((0, 1), LayerState((Parts(4, 8),), 3)),))
    engine = EngineShape(model)
    assert engine.attention_block_tokens == 16
    assert forecast(engine, engine, 500, 0, LINK).total.nbytes == 2 * 3 * 32


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (NEMOTRON, "hybrid_override_pattern", "M-M*x"),
        (NEMOTRON, "hybrid_override_pattern", ""),
        (NEMOTRON, "hybrid_override_pattern", 7),
        (NEMOTRON, "layers_block_type", ["mamba", "attention", "sparse"]),
        (NEMOTRON, "mamba_ssm_cache_dtype", "int8"),
        (NEMOTRON, "n_groups", 0),
        (GRANITE, "layer_types", ["mamba"] * 3),
        (GRANITE, "layer_types", ["rwkv"] * 40),
        (GRANITE, "mamba_n_heads", 100),
        (GRANITE, "mamba_d_head", 32),
        (GRANITE, "mamba_d_conv", None),
        (QWEN, "linear_num_value_heads", "32"),
        ("LiquidAI/LFM2-1.2B", "full_attn_idxs", [2, 16]),
        ("LiquidAI/LFM2-1.2B", "full_attn_idxs", "2, 5"),
        ("ai21labs/Jamba-v0.1", "attn_layer_offset", 8),
        ("ibm-ai-platform/Bamba-9B-v2", "attn_layer_indices", [-1]),
        ("ibm-ai-platform/Bamba-9B-v2", "index_topk", 2048),
    ],
)
def test_what_cannot_be_read_is_named(name: str, key: str, value: object) -> None:
    model_shape(PUBLISHED[name])
    with pytest.raises(UnreadableConfig, match=r"expected .*, got .+") as refused:
        model_shape({**PUBLISHED[name], key: value})
    assert refused.value.field in (key, "mamba_d_head")
    assert len(str(refused.value)) < 300


def test_an_older_and_a_newer_list_of_layers_are_the_same() -> None:
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    listed = [names[letter] for letter in PUBLISHED[NEMOTRON]["hybrid_override_pattern"]]
    newer = {**PUBLISHED[NEMOTRON], "layers_block_type": listed}
    del newer["hybrid_override_pattern"]
    assert model_shape(newer) == model_shape(PUBLISHED[NEMOTRON])
    attention, states = model_shape(newer).sorts
    assert (len(attention.layers), len(states.layers)) == (4, 24)


def test_states_in_a_family_without_them_are_refused() -> None:
    with pytest.raises(UnreadableConfig, match="mamba_d_"):
        model_shape({**PUBLISHED[GRANITE], "model_type": "granite"})
    unnamed = {key: value for key, value in PUBLISHED[NEMOTRON].items() if key != "model_type"}
    with pytest.raises(UnreadableConfig, match="add the model's model_type"):
        model_shape(unnamed)


@pytest.mark.parametrize("name", GEMMA_4)
def test_gemma_4_attends_to_images_both_ways_and_to_text_not(name: str) -> None:
    text = {**GEMMA_4[name]["text_config"], "use_bidirectional_attention": "all"}
    with pytest.raises(UnreadableConfig, match="use_bidirectional_attention"):
        model_shape({**GEMMA_4[name], "text_config": text})
    uneven = {"5": {"head_dim": 512}, "11": {"head_dim": 128}}
    text = {**GEMMA_4[name]["text_config"], "per_layer_config": uneven}
    with pytest.raises(UnreadableConfig, match="per_layer_config"):
        model_shape({**GEMMA_4[name], "text_config": text})
