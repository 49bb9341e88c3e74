"""Warnings say what is slow, why, and what would be faster."""

import re

import pytest

from pdconn.tools.plan.advice import advise, is_slow
from pdconn.tools.plan.engine_shape import EngineShape, parse_engine
from pdconn.tools.plan.forecast import Forecast, forecast
from pdconn.tools.plan.link import parse_link
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.shapes import SHAPES, built_in


def pull(name: str, their: dict, our: dict, *, prompt: int = 8192, **how) -> Forecast:
    model = built_in(name)
    link = parse_link(how.pop("link", "400Gb/s"))
    hit = how.pop("hit", 0)
    return forecast(EngineShape(model, **their), EngineShape(model, **our), prompt, hit, link)


def advice_of(made: Forecast) -> dict[str, str]:
    return {one.code: one.text for one in advise(made)}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_default_pairing_is_not_slow(shape):
    assert not is_slow(pull(shape.name, {}, {"tp": 4}))


def test_slow_layouts_are_named_and_the_remedy_is_forecast():
    slow = {"layout": "BLNHC"}
    made = pull("llama-3.1-8b", {**slow, "tp": 2}, {**slow, "tp": 4})
    text = advice_of(made)["slow-runs"]
    assert "runs of 1.0 KiB" in text  # 2 of 4 heads of a token: 2 x 512 bytes
    pieces = 8192 * 32  # a rank reads its heads of each token and layer in one run
    share = pieces * 0.2e-6 / (pieces * 0.2e-6 + pieces * 1024 / 50e9)
    assert f"{share:.0%} of the time goes to {pieces:,} descriptors" in text
    assert "prefill's layout BLNHC keeps a head of each token apart" in text
    assert "decode's layout BLNHC" in text
    assert "2 of the 4 on a rank of prefill" in text
    fast = {"layout": "BHLNC"}
    best = pull("llama-3.1-8b", {**fast, "tp": 2}, {**fast, "tp": 4})
    assert f"With BHLNC on both sides: {1e3 * best.seconds:,.2f} ms" in text
    assert f"instead of {1e3 * made.seconds:,.2f} ms" in text
    assert f"{made.seconds / best.seconds:.1f} times faster" in text


def test_only_the_side_at_fault_is_named():
    """Decode keeps one head per rank, so that its order of heads and tokens means nothing."""
    text = advice_of(pull("llama-3.1-8b", {"layout": "BLNHC"}, {"layout": "BHLNC", "tp": 8}))
    assert "prefill's layout BLNHC" in text["slow-runs"]
    assert "decode's layout" not in text["slow-runs"]


def test_unequal_blocks_are_named_and_equal_ones_forecast():
    """16 tokens of one head and layer: 8 KiB, 64 bytes of which cost a descriptor each."""
    best = {"layout": "BHLNC"}
    sides = {**best, "tp": 2}, {**best, "tp": 4, "block_tokens": 64}
    made = pull("llama-3.1-70b", *sides, link="shm", prompt=32768)
    text = advice_of(made)["slow-runs"]
    assert "theirs 16 and ours 64 tokens" in text
    assert "layout" not in text.partition("With ")[0]
    equal = pull(
        "llama-3.1-70b", {**sides[0], "block_tokens": 64}, sides[1], link="shm", prompt=32768
    )
    assert f"blocks of 64 tokens on both sides: {1e3 * equal.seconds:,.2f} ms" in text


def test_small_blocks_get_advice_on_their_size():
    """12 layers, 8 heads and 256 bytes: 24 KiB a token in whole blocks, 12 KiB in halves.

    Two tokens would be enough; 16 are the fewest that attention kernels read.
    """
    side = {"block_tokens": 1, "layout": "BHLNC"}
    text = advice_of(pull("gpt-oss-20b", side, {**side, "tp": 2}, link="tcp"))["slow-runs"]
    assert "With blocks of 16 tokens on both sides" in text


def test_a_fast_link_for_bytes_and_descriptors_is_not_slow():
    """The same runs, where descriptors are nearly free."""
    model = built_in("llama-3.1-8b")
    slow = EngineShape(model, "BLNHC", tp=2), EngineShape(model, "BLNHC", tp=4)
    costly, free = (forecast(*slow, 8192, 0, parse_link("10Gb/s", us)) for us in (2.2, 0.001))
    assert is_slow(costly)
    assert not is_slow(free)
    assert "slow-runs" not in advice_of(free)


@pytest.mark.parametrize(
    ("hit", "our_block", "again"), [(1000, 16, "last 8"), (1040, 64, "last 0"), (1024, 64, None)]
)
def test_a_hit_that_ends_inside_a_block_is_named(hit, our_block, again):
    made = pull("qwen3-8b", {}, {"block_tokens": our_block}, hit=hit)
    text = advice_of(made).get("partial-hit")
    assert (text is None) if again is None else (again in text and f"{our_block} tokens" in text)


def test_windows_that_save_nothing_are_named():
    assert "1024 tokens" in advice_of(pull("gemma-3-27b", {}, {}, prompt=1000))["idle-windows"]
    assert "idle-windows" not in advice_of(pull("gemma-3-27b", {}, {}, prompt=8192))
    assert "idle-windows" not in advice_of(pull("llama-3.1-8b", {}, {}, prompt=1000))


def test_copies_are_counted():
    assert (
        "8 copies of one head" in advice_of(pull("deepseek-v3", {}, {"tp": 8}))["replicated-heads"]
    )
    text = advice_of(pull("qwen3-30b-a3b", {}, {"tp": 8}))["replicated-heads"]
    assert "2 copies of 4 heads" in text
    assert "replicated-heads" not in advice_of(pull("qwen3-30b-a3b", {}, {"tp": 4}))


def test_a_source_that_feeds_many_is_named_and_sets_the_time():
    """One prefill rank sends what four decode ranks read.

    Without the fix the prediction is a decode rank's, a quarter of it, and the warning below
    it contradicts it.
    """
    made = pull("llama-3.1-8b", {}, {"tp": 4})
    text = advice_of(made)["busy-source"]
    nbytes = 8192 * (128 << 10)
    assert made.seconds == pytest.approx(nbytes / 50e9, rel=0.01)
    assert "prefill rank 0 sends 1,073.7 MB, 4.0 times what any decode rank reads" in text
    assert not re.search(r"\d ms", text), "one number, and it is the prediction"
    assert "busy-source" not in advice_of(pull("llama-3.1-8b", {"tp": 4}, {"tp": 4}))


def test_a_faster_link_of_the_source_ends_that():
    model = built_in("llama-3.1-8b")
    link, fast = parse_link("400Gb/s"), parse_link("1600Gb/s")
    sides = EngineShape(model), EngineShape(model, tp=4)
    made = forecast(*sides, 8192, 0, link, prefill_link=fast)
    assert made.slowest.side == "decode"
    assert made.seconds == made.busiest.pull_seconds(link)
    assert "busy-source" not in advice_of(made)
    slow = forecast(*sides, 8192, 0, link, prefill_link=parse_link("100Gb/s"))
    assert slow.seconds == pytest.approx(sum(slow.sent) / 12.5e9)
    assert slow.slowest.side == "prefill"


def test_descriptors_are_not_blamed_where_the_source_sets_the_time():
    """A remedy for decode's runs would promise what prefill's link cannot give."""
    model = built_in("llama-3.1-8b")
    slow = EngineShape(model, "BLNHC", tp=2), EngineShape(model, "BLNHC", tp=4)
    link = parse_link("400Gb/s")
    assert is_slow(forecast(*slow, 8192, 0, link))
    assert not is_slow(forecast(*slow, 8192, 0, link, prefill_link=parse_link("1Gb/s")))


def test_blocks_that_no_kernel_reads_are_not_recommended():
    """Before: "With blocks of 17 tokens on both sides"."""
    made = pull("llama-3.1-8b", {"block_tokens": 17}, {"block_tokens": 16, "tp": 2}, prompt=2000)
    text = advice_of(made)["slow-runs"]
    found = {int(size) for size in re.findall(r"blocks of (\d+) tokens on both sides", text)}
    assert found
    assert not {size for size in found if size % 16}
    with pytest.raises(ShapeError, match=r"block: expected a multiple of 16, .*, got 17"):
        parse_engine("block=17", built_in("llama-3.1-8b"))
    assert parse_engine("block=48", built_in("llama-3.1-8b")).block_tokens == 48
