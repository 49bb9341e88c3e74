"""A forecast is the planner's own arithmetic, and agrees with what can be worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.planning.layouts import LAYOUTS
from pdconn.planning.planning_errors import Incompatible
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.forecast import Forecast, forecast
from pdconn.tools.plan.link import PRESETS, Link, parse_link
from pdconn.tools.plan.model_shape import LayerSort, ModelShape, sorts_of
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.shapes import SHAPES, built_in
from registration.references import AttentionKind

FULL, WINDOW = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW
LINK = Link("test", 1e9, 1e-6, "made up")


def uniform(layers: int = 3, heads: int = 4, row_nbytes: int = 8) -> ModelShape:
    return ModelShape("uniform", sorts_of([FULL] * layers, None, heads, row_nbytes))


def pull(model: ModelShape, their: dict, our: dict, prompt: int, hit: int = 0, **how) -> Forecast:
    return forecast(
        EngineShape(model, **their), EngineShape(model, **our), prompt, hit, LINK, **how
    )


@pytest.mark.parametrize(
    ("name", "prompt", "factor"),
    [
        ("gemma-3-27b", 8 << 10, 3.8),
        ("gemma-3-27b", 32 << 10, 5.3),
        ("gemma-3-27b", 128 << 10, 6.0),
        ("gpt-oss-120b", 128 << 10, 2.0),
        ("gpt-oss-20b", 128 << 10, 2.0),
    ],
)
def test_what_clipping_saves(name, prompt, factor):
    """Against a pull of a model that has the same layers, all of full attention."""
    clipped = pull(built_in(name), {}, {}, prompt).total
    sort = built_in(name).sorts[0]
    layers = built_in(name).num_layers
    whole = ModelShape("whole", sorts_of([FULL] * layers, None, sort.heads, sort.row_nbytes))
    all_of_it = pull(whole, {}, {}, prompt).total
    assert all_of_it.saved_by_window == 0
    assert round(all_of_it.nbytes / clipped.nbytes, 1) == factor
    assert clipped.nbytes + clipped.saved_by_window == all_of_it.nbytes
    assert round(clipped.clipping, 1) == factor


@pytest.mark.parametrize(
    ("layout", "whole", "head_slice"),
    [
        # Runs per block and source: 3 layers, 4 heads of which 2 are taken, 4 tokens.
        ("LBHNC", 3, 3),
        ("BLHNC", 1, 3),
        ("BHLNC", 1, 1),
        ("LBNHC", 3, 3 * 4),
        ("BLNHC", 1, 3 * 4),
        ("LHBNC", 3 * 4, 3 * 2),
    ],
)
def test_runs_per_block(layout, whole, head_slice):
    side = {"layout": layout, "block_tokens": 4}

    def runs(their: dict, our: dict) -> int:
        """Of ten blocks, where no two that are neighbours in memory happen to join."""
        return max(pull(uniform(), their, our, 41, seed=seed).total.runs for seed in range(5))

    assert runs(side, side) == 10 * whole
    assert runs(side, {**side, "tp": 2}) == 2 * 10 * head_slice
    assert runs({**side, "tp": 2}, side) == 2 * 10 * head_slice


def test_blocks_in_a_row_are_one_run():
    side = {"layout": "BHLNC", "block_tokens": 4}
    assert pull(uniform(), side, side, 41, ids="contiguous").total.runs == 1
    layers_outside = {"layout": "LBHNC", "block_tokens": 4}
    assert pull(uniform(), layers_outside, side, 41, ids="contiguous").total.runs == 10 * 3 * 4
    assert pull(uniform(), layers_outside, layers_outside, 41, ids="contiguous").total.runs == 3


def test_unequal_blocks_meet_in_sub_blocks():
    """Head-major rows: pieces of 4 tokens of each head of each layer."""
    made = pull(uniform(), {"block_tokens": 8}, {"block_tokens": 4}, 41)
    assert made.total.runs == 10 * 3 * 4
    assert made.groups[0].their_block_tokens == 8
    assert made.groups[0].group.block_tokens == 4


TOPOLOGIES = [
    ({}, {}),
    ({"tp": 4}, {"tp": 2, "layout": "BLHNC"}),
    ({"tp": 2, "pp": 2, "block_tokens": 32}, {"tp": 8, "layout": "BLNHC"}),
    ({"tp": 16, "pp": 3}, {"pp": 2, "block_tokens": 64}),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("their", "our"), TOPOLOGIES)
def test_every_byte_is_pulled_or_saved(shape, their, our):
    """Pulled, clipped and held bytes are those of every block of every layer."""
    made = pull(shape, their, our, 2048, 512)
    blocks = 16 if (their.get("block_tokens", 16), our.get("block_tokens", 16)) == (16, 16) else 64
    total = 0
    for sort in shape.sorts:
        step = sort.block_tokens or blocks
        rows = -(-2047 // step) * step // sort.row_tokens
        total += len(sort.layers) * max(sort.heads, our.get("tp", 1)) * rows * sort.row_nbytes
    whole = made.total
    assert whole.nbytes + whole.saved_by_window + whole.saved_by_hits == total
    assert sum(made.sent) == whole.nbytes
    assert len(made.received) == our.get("tp", 1) * our.get("pp", 1)
    assert len(made.sent) == their.get("tp", 1) * their.get("pp", 1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_totals_are_sums(shape):
    made = pull(shape, {"tp": 4}, {"tp": 2, "pp": 2}, 3000)
    for name in ("nbytes", "runs", "saved_by_window", "saved_by_hits"):
        total = getattr(made.total, name)
        assert sum(getattr(group.cost, name) for group in made.groups) == total
        assert sum(getattr(cost, name) for cost in made.received) == total
        busiest = sum(getattr(group.busiest, name) for group in made.groups)
        assert busiest == getattr(made.busiest, name)
    slowest = max(cost.pull_seconds(LINK) for cost in made.received)
    assert made.busiest.pull_seconds(LINK) == slowest
    assert made.seconds == max(slowest, max(made.sent) / 1e9)


def test_time_is_bytes_and_descriptors():
    """One block of 16 rows of 1 KiB, in one run."""
    made = pull(uniform(1, 1, 1024), {}, {}, 17)
    assert made.total.runs == 1
    assert made.seconds == pytest.approx(16384 / 1e9 + 1e-6)


def test_a_rank_that_is_read_sets_the_time_where_it_sends_more_than_any_rank_reads():
    """One block of 16 rows of 1 KiB in 4 heads: one rank sends all, four read a quarter each."""
    made = pull(uniform(1, 4, 1024), {}, {"tp": 4}, 17)
    assert made.sent == (65536,)
    assert {cost.nbytes for cost in made.received} == {16384}
    assert made.seconds == pytest.approx(65536 / 1e9)
    assert (made.slowest.side, made.slowest.rank) == ("prefill", 0)
    assert made.busiest.pull_seconds(LINK) == pytest.approx(16384 / 1e9 + 1e-6)


def test_a_rank_that_is_read_sets_no_limit_where_readers_copy():
    """Shared memory: the core of the reader does all of the work."""
    copied = replace(LINK, reader_copies=True)
    sides = EngineShape(uniform(1, 4, 1024)), EngineShape(uniform(1, 4, 1024), tp=4)
    made = forecast(*sides, 17, 0, copied)
    assert made.slowest.side == "decode"
    assert {one.name for one in PRESETS if one.reader_copies} == {"shm", "shm-huge"}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("our", [{"tp": 4}, {}])
def test_the_times_of_groups_add_up_to_the_prediction(shape, our):
    """Whichever side sets it."""
    made = pull(shape, {}, our, 3000)
    assert made.slowest.side == ("prefill" if our else "decode")
    assert sum(map(made.seconds_of, made.groups)) == pytest.approx(made.seconds)


def test_hits_are_not_pulled():
    cold, warm = (pull(uniform(), {}, {}, 1000, hit).total for hit in (0, 512))
    assert warm.saved_by_hits == 512 * 3 * 4 * 8
    assert warm.nbytes + warm.saved_by_hits == cold.nbytes
    last_block = pull(uniform(), {}, {}, 1009, 992).total
    assert last_block.nbytes == 16 * 3 * 4 * 8


def test_hits_before_a_window_save_nothing_more():
    """Windows of 128 on a prompt of 1000: tokens before 872 are never read."""
    model = ModelShape("windows", sorts_of([WINDOW] * 2, 128, 2, 8))
    cold, hit_500, hit_928 = (pull(model, {}, {}, 1000, hit).total for hit in (0, 496, 928))
    assert cold.saved_by_window == 864 * 2 * 2 * 8
    assert hit_500 == cold
    assert hit_928.saved_by_hits == (928 - 864) * 2 * 2 * 8
    assert hit_928.nbytes == cold.nbytes - hit_928.saved_by_hits


def test_chunks_begin_at_multiples_of_their_size():
    model = ModelShape("chunks", sorts_of([AttentionKind.CHUNKED_LOCAL], 512, 1, 8))
    assert pull(model, {}, {}, 1 + 1024 + 48).total.nbytes == 48 * 8


def test_replicated_heads_move_once_for_each_copy():
    eight, sixteen = (pull(uniform(heads=8), {}, {"tp": tp}, 999).total for tp in (8, 16))
    assert sixteen.nbytes == 2 * eight.nbytes


def test_replicas_on_prefill_share_the_reads():
    made = pull(uniform(heads=2), {"tp": 8}, {"tp": 8}, 999)
    assert len(set(made.sent)) == 1


def test_pipeline_stages_share_the_bytes():
    whole = pull(uniform(layers=4), {}, {}, 999)
    for their, our in (({"pp": 2}, {}), ({}, {"pp": 2}), ({"pp": 4}, {"pp": 2})):
        made = pull(uniform(layers=4), their, our, 999)
        assert made.total.nbytes == whole.total.nbytes
        assert set(made.sent) == {whole.total.nbytes // their.get("pp", 1)}
        assert {c.nbytes for c in made.received} == {whole.total.nbytes // our.get("pp", 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-30b-a3b"])
def test_counting_runs_is_laying_them_out(layout, name):
    """Except for neighbours that happen to join, and never in bytes."""
    sides = {"tp": 2, "layout": layout}, {"tp": 4, "layout": "BLHNC"}
    laid_out = pull(built_in(name), *sides, 700, 96)
    counted = pull(built_in(name), *sides, 700, 96, max_laid_out_runs=0)
    assert counted.sent == laid_out.sent
    assert replace(counted.total, runs=0) == replace(laid_out.total, runs=0)
    assert laid_out.total.runs <= counted.total.runs <= 1.02 * laid_out.total.runs


def test_a_long_prompt_in_small_pieces_is_counted():
    """33 million runs of 256 bytes, which would not fit in memory."""
    llama = built_in("llama-3.1-8b")
    made = pull(llama, {"layout": "BLNHC"}, {"layout": "LBNHC", "tp": 8}, 1 << 17)
    assert made.total.runs == 8 * 32 * (1 << 17)


def test_the_same_seed_gives_the_same_forecast():
    sides = {"layout": "LBHNC"}, {"layout": "LBHNC"}
    assert pull(uniform(), *sides, 999) == pull(uniform(), *sides, 999)


@pytest.mark.parametrize(
    ("prompt", "hit", "field"),
    [(1, 0, "prompt"), (0, 0, "prompt"), (1 << 40, 0, "prompt"), (10, -1, "hit"), (10, 9, "hit")],
)
def test_a_prompt_or_hit_without_sense_is_refused(prompt, hit, field):
    with pytest.raises(ShapeError, match=r"expected .*, got") as refused:
        pull(uniform(), {}, {}, prompt, hit)
    assert refused.value.field == field


def test_what_the_planner_refuses_is_refused():
    one = EngineShape(ModelShape("a", (LayerSort((0,), WINDOW, 4, 1, 8),)))
    other = EngineShape(ModelShape("b", (LayerSort((0,), WINDOW, 8, 1, 8),)))
    with pytest.raises(Incompatible, match="window"):
        forecast(one, other, 100, 0, LINK)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("400Gb/s", 50e9), ("50GB/s", 50e9), ("1.6 Tb/s", 200e9), ("800Mb/s", 1e8), ("9kB/s", 9e3)],
)
def test_speeds_are_bits_or_bytes(text, bytes_per_s):
    link = parse_link(text)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert link.descriptor_s == pytest.approx(0.2e-6)
    assert "assumption" in link.source


@pytest.mark.parametrize(
    ("name", "gb_per_s", "us"), [("shm", 7.5, 2.2), ("shm-huge", 18, 2.2), ("tcp", 6.5, 7)]
)
def test_presets_are_what_was_measured(name, gb_per_s, us):
    link = parse_link(name)
    assert link in PRESETS
    assert (link.bytes_per_s, link.descriptor_s) == (gb_per_s * 1e9, us * 1e-6)
    assert "measured" in link.source


@pytest.mark.parametrize("link", PRESETS, ids=lambda link: link.name)
def test_a_preset_says_whether_it_was_measured_and_is_no_faster_than_its_name(link):
    assert link.source.startswith(("measured: ", "assumed: "))
    assert link.source.startswith("assumed") == bool(link.round_trip_s)
    gbit = link.name.partition("-")[2]
    if gbit.isdigit():
        assert link.bytes_per_s <= 0.95 * int(gbit) * 1e9 / 8


@pytest.mark.parametrize("seconds", [-1e-6, float("nan"), float("inf"), 1.0])
def test_a_round_trip_takes_something_finite(seconds):
    with pytest.raises(ShapeError, match="round trip"):
        Link("x", 1e9, 0.0, "given", round_trip_s=seconds)


def test_a_given_cost_of_descriptors_replaces_the_links():
    for name in ("tcp", "400Gb/s"):
        link = parse_link(name, 3.5)
        assert link.descriptor_s == pytest.approx(3.5e-6)
        assert "3.5 us a descriptor as given" in link.source
        assert "assumption" not in link.source


@pytest.mark.parametrize("text", ["", "fast", "0Gb/s", "-1Gb/s", "400", "400gb/s", "4e2Gb/s"])
def test_a_link_without_sense_is_refused(text):
    with pytest.raises(ShapeError, match=r"link: expected .*, got"):
        parse_link(text)


@pytest.mark.parametrize("descriptor_us", [-1.0, float("nan"), float("inf"), 1e7])
def test_a_descriptor_costs_something_finite(descriptor_us):
    with pytest.raises(ShapeError, match="descriptor-us"):
        parse_link("shm", descriptor_us)


def test_a_run_over_nvlink_costs_what_was_measured_on_a_card():
    """It was an assumed 2 us; on an H100 small reads by cuda_ipc took five times as long."""
    results = Path(__file__).parents[2] / "gpu/results/h100.json"
    found = json.loads(results.read_text(encoding="utf-8"))["steps"]["nixl"]["found"]
    whole = found["read in one piece, GB/s"] * 1e9
    nvlink = parse_link("nvlink")
    for kib in (64, 256):
        nbytes = kib << 10
        seconds = nbytes / (found[f"read in blocks of {kib} KiB, GB/s"] * 1e9)
        assert nvlink.descriptor_s == pytest.approx(seconds - nbytes / whole, rel=0.05)
    assert nvlink.assumed == {"bytes_per_s", "round_trip_s"}
    assert "a run as measured within one H100" in nvlink.source


def test_each_number_of_a_link_is_measured_or_marked():
    for link in PRESETS:
        if link.source.startswith("measured: "):
            assert link.assumed == frozenset()
        else:
            assert {"bytes_per_s", "round_trip_s"} <= link.assumed
    assert parse_link("50GB/s").assumed == {"descriptor_s"}
    assert parse_link("50GB/s", 3.5).assumed == frozenset()
    assert parse_link("rdma-400", 3.5).assumed == {"bytes_per_s", "round_trip_s"}
