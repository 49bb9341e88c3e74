"""Engines that do not exist describe their memory as real ones would."""

import numpy as np
import pytest

from pdconn.planning.layouts import LAYOUTS
from pdconn.tools.plan.engine_shape import EngineShape, parse_engine, pipeline_stages
from pdconn.tools.plan.grouping import Paged, group_layers
from pdconn.tools.plan.model_shape import LayerSort, ModelShape, sorts_of
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.shapes import SHAPES, built_in
from registration.references import AttentionKind, GroupMemory, build_kv_cache_references
from tests.fakes.layouts import LAYOUTS as SIX
from tests.fakes.layouts import described_bytes, layout_memory

FULL, WINDOW = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW


def uniform(layers: int = 3, heads: int = 4, row_nbytes: int = 8) -> ModelShape:
    return ModelShape("uniform", sorts_of([FULL] * layers, None, heads, row_nbytes))


def two_sorts(windows: int, full: int, heads: tuple[int, int] = (4, 4)) -> ModelShape:
    """Layers of two sorts that differ in pages where they differ in heads."""
    return ModelShape(
        "two",
        (
            LayerSort(tuple(range(windows)), WINDOW, 4, heads[0], 8),
            LayerSort(tuple(range(windows, windows + full)), FULL, None, heads[1], 8),
        ),
    )


@pytest.mark.parametrize("layout", SIX)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_uniform_model_lies_as_its_layout_says(layout, tp):
    made = EngineShape(uniform(), layout, tp=tp, block_tokens=2).references(5)
    assert len(made) == tp
    for rank, references in enumerate(made):
        expected = layout_memory(
            layout,
            base=references.tensors[0].base,
            num_blocks=5,
            layers=[f"layers.{number}.attn" for number in range(3)],
            num_heads=max(1, 4 // tp),
            block_tokens=2,
            token_nbytes=8,
            first_head=4 * rank // tp,
        )
        group = GroupMemory(FULL, None, 2, expected)
        assert references == build_kv_cache_references([group])
    assert set(SIX) == set(LAYOUTS)


def test_the_cross_check_notices_another_layout():
    """Negative control."""
    one, other = (EngineShape(uniform(), layout).references(5) for layout in ("BLHNC", "BHLNC"))
    assert one != other


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (2, 8)])
def test_no_two_heads_of_a_group_share_a_byte(layout, heads):
    """Also where pages differ in size, and lie side by side."""
    model = two_sorts(3, 2, heads)
    full = LayerSort((3, 4), FULL, None, 1, 6, row_tokens=2, part="other")
    model = ModelShape("three", (*model.sorts, full))
    for references in EngineShape(model, layout, tp=2, block_tokens=4).references(3):
        for number, group in enumerate(references.groups):
            assert len(described_bytes(references, number)) == 3 * group.block_nbytes


@pytest.mark.parametrize("layout", SIX)
def test_groups_overlay_each_other_in_one_allocation(layout):
    """As wide as the widest group, and no wider."""
    engine = EngineShape(two_sorts(5, 2), layout, block_tokens=2)
    (references,) = engine.references(7)
    assert [group.num_layers for group in engine.groups] == [2, 2, 1, 2]
    page = 4 * 2 * 8
    assert {tensor.nbytes for tensor in references.tensors} == {7 * 2 * page}
    assert all(group.data[0].offset == 0 for group in references.groups)


@pytest.mark.parametrize(
    ("windows", "full", "sizes"),
    [
        (52, 10, [9, 9, 9, 9, 8, 8, 10]),  # Gemma 3 27B
        (18, 18, [18, 18]),  # gpt-oss 120B
        (12, 13, [12, 13]),  # below one and a half times: padded, not split
        (20, 30, [20, 15, 15]),  # at one and a half times: split
        (1, 4, [1, 1, 1, 1, 1]),
    ],
)
def test_pages_of_one_size_are_dealt_as_vllm_deals_them(windows, full, sizes):
    groups = EngineShape(two_sorts(windows, full)).groups
    assert [group.num_layers for group in groups] == sizes
    dealt = [share.layers for group in groups for share in group.shares]
    assert sorted(layer for layers in dealt for layer in layers) == list(range(windows + full))
    for layers in dealt:
        assert len({int(step) for step in np.diff(layers)}) <= 1


def test_deepseek_v4_has_five_groups():
    groups = EngineShape(built_in("deepseek-v4")).groups
    assert [group.block_tokens for group in groups] == [256, 64, 64, 4, 8]
    assert [group.window for group in groups] == [None, 128, 128, 8, 128]
    assert {share.sort.part for share in groups[3].shares} == {"state", "indexer_state"}


def test_sorts_that_keep_equal_tokens_share_a_group():
    """Full attention of two page sizes: one block table."""
    sorts = (LayerSort((0, 1), FULL, None, 8, 64), LayerSort((2,), FULL, None, 1, 64))
    groups = group_layers([Paged(sorts[0], 16, 8192), Paged(sorts[1], 16, 1024)])
    assert [group.num_layers for group in groups] == [3]


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [(62, 4, [15, 16, 16, 15]), (61, 2, [31, 30]), (61, 3, [20, 21, 20]), (4, 4, [1, 1, 1, 1])],
)
def test_stages_are_cut_as_vllm_cuts_them(layers, pp, sizes):
    stages = pipeline_stages(layers, pp)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_rank_holds_its_stage_and_its_heads(shape):
    heads = max(sort.heads for sort in shape.sorts)
    made = EngineShape(shape, tp=2, pp=3).references(2)
    held = [
        {(ref.layer, ref.first_head + h) for group in rank.groups for ref in group.data
         for h in range(ref.num_heads)}
        for rank in made
    ]  # fmt: skip
    whole = {(sort.layer_name(n), h) for sort in shape.sorts for n in sort.layers
             for h in range(sort.heads)}  # fmt: skip
    assert set().union(*held) == whole
    copies = 2 if heads == 1 else 1
    assert sum(map(len, held)) == copies * len(whole)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("tp=3", "tp", "a divisor or multiple of 4"),
        ("tp=0", "tp", "from 1 to"),
        ("pp=4", "pp", "from 1 to 3"),
        ("block=0", "block", "from 1 to"),
        ("block=x", "block", "whole number"),
        ("tp=", "tp", "nothing"),
        ("layout=LBNCH", "layout", "BHLNC"),
        ("backend=FLEX", "backend", "one of FLASH_ATTN"),
        ("backend=flex_attention,layout=BHLNC", "layout", "LBNHC, for FLEX_ATTENTION"),
        ("layot=LBHNC", "key", "did you mean 'layout'?"),
        ("bloc=16", "key", "did you mean 'block'?"),
        ("tp", "key", "did you mean 'tp'?"),
        ("dtype=fp8", "key", "known keys: tp, pp, layout, block, backend"),
        ("tp=2,tp=4", "tp", "one value"),
    ],
)
def test_an_engine_without_sense_is_refused(text, field, message):
    with pytest.raises(ShapeError, match=r"expected .*, got") as refused:
        parse_engine(text, uniform())
    assert refused.value.field == field
    assert message in str(refused.value)


def test_an_engine_is_written_and_read_the_same():
    engine = EngineShape(uniform(), "LHBNC", tp=2, pp=3, block_tokens=32)
    assert parse_engine(str(engine), uniform()) == engine
    assert parse_engine(" block=32, layout=lhbnc ,pp=3,tp=2,", uniform()) == engine
    assert parse_engine("", uniform()) == EngineShape(uniform())
    engine = EngineShape(uniform(), backend="B12X")
    assert parse_engine(str(engine), uniform()) == engine


def test_rows_of_several_tokens_need_blocks_of_whole_rows():
    model = ModelShape("packed", (LayerSort((0,), FULL, None, 1, 8, row_tokens=4),))
    with pytest.raises(ShapeError, match="block: expected a multiple of 4, got 6"):
        EngineShape(model, block_tokens=6)


def test_layouts_that_cannot_hold_pages_of_two_sizes():
    """vLLM keeps unlike pages in one piece; with layers outermost the smaller get more tokens."""
    model = two_sorts(2, 2, (4, 2))
    with pytest.raises(ShapeError, match=r"LBHNC, LBNHC, BLHNC or BLNHC, .*got BHLNC"):
        EngineShape(model, "BHLNC")
    assert EngineShape(model).layout == "LBHNC"
    assert EngineShape(model).in_best_layout().layout == "BLHNC"
    raised = EngineShape(model, "LBNHC").groups
    assert [group.block_tokens for group in raised] == [16, 32]
    assert {share.page_nbytes for group in raised for share in group.shares} == {4 * 16 * 8}
    assert {group.block_tokens for group in EngineShape(model, "BLNHC").groups} == {16}
    assert EngineShape(model, tp=4).in_best_layout().layout == "BHLNC"
    assert EngineShape(two_sorts(2, 2, (3, 2))).layout == "BLHNC"
    with pytest.raises(ShapeError, match=r"layout: expected BLHNC or BLNHC, .*got LBHNC"):
        EngineShape(two_sorts(2, 2, (3, 2)), "LBHNC")


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": AttentionKind.STATE},
        {"window": 8},
        {"kind": WINDOW},
        {"kind": WINDOW, "window": 0},
        {"heads": 0},
        {"row_nbytes": -1},
        {"row_tokens": 0},
        {"block_tokens": 0},
        {"layers": ()},
        {"layers": (1, 0)},
        {"layers": (0, 0)},
        {"layers": (-1,)},
    ],
)
def test_a_sort_without_sense_is_refused(wrong):
    right = {"layers": (0, 1), "kind": FULL, "window": None, "heads": 2, "row_nbytes": 8}
    LayerSort(**right)
    with pytest.raises(ShapeError):
        LayerSort(**{**right, **wrong})


def test_a_model_keeps_each_part_of_a_layer_once():
    sort = LayerSort((0, 1), FULL, None, 2, 8)
    with pytest.raises(ShapeError, match=r"layers\.1\.attn twice"):
        ModelShape("twice", (sort, LayerSort((1,), WINDOW, 4, 2, 8)))
    with pytest.raises(ShapeError, match="at least one"):
        ModelShape("none", ())
