"""``pdconn plan --store``: bytes are those of real rows, and times follow from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from pdconn.store.format.prompt_rows import pieces
from pdconn.store.format.row import RowLayout
from pdconn.store.store_errors import FormatError
from pdconn.tools.cli.main import main
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.model_shape import ModelShape
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.shapes import built_in
from pdconn.tools.plan.store import cost
from pdconn.tools.plan.store.cost import StoreForecast, forecast_store
from tests.tools.plan.published import PUBLISHED
from tests.tools.plan.test_states import QWEN, QWEN_STATE

MIB, GIB = 1 << 20, 1 << 30
PROMPT = 32_768
DEEPSEEK_TAIL = 43 * 128 * 584 + 21 * 4 * 8192 + 21 * 4 * 2048
"""128 tokens of 43 windows; of compressors 4 to 1 the four tokens that the next output shares with
the last one; of compressors 128 to 1 nothing, as 256 is a multiple: 3.89 MiB, as in the facts."""


def made(model: str, prompt: int = PROMPT, *, tp: int = 1, **options: Any) -> StoreForecast:
    rate = options.pop("rate", 3e9)
    return forecast_store(EngineShape(built_in(model), tp=tp), prompt, rate, **options)


def contents(layout: RowLayout | None) -> int:
    """Bytes of KV in a row, without what aligns slabs, and without the footer."""
    assert layout is not None
    return sum(slab.nbytes for slab in layout.slabs)


def tail(one: StoreForecast) -> int:
    """Bytes of KV that a boundary needs of windows, far from the beginning."""
    rows = len(pieces(one.layout.wa, 1 << 22))
    return rows * contents(one.layout.wa)


@pytest.mark.parametrize(
    ("model", "fa_row", "wa_tail", "fa_total", "every_boundary"),
    [
        ("gpt-oss-120b", 9.0 * MIB, 4.5 * MIB, 1.12 * GIB, 0.56 * GIB),
        ("gemma-3-27b", 20 * MIB, 416 * MIB, 2.5 * GIB, 13 * GIB),
        ("deepseek-v4", 0.94 * MIB, DEEPSEEK_TAIL, 0.12 * GIB, 0.49 * GIB),
    ],
)
def test_rows_have_the_sizes_computed_by_hand(
    model: str, fa_row: float, wa_tail: float, fa_total: float, every_boundary: float
) -> None:
    one = made(model, window_every="all")
    assert contents(one.layout.fa) == pytest.approx(fa_row, rel=0.005)
    assert one.fa_rows * contents(one.layout.fa) == pytest.approx(fa_total, rel=0.025)
    assert tail(one) == wa_tail
    assert one.wa_rows * contents(one.layout.wa) == pytest.approx(every_boundary, rel=0.01)


def test_windows_of_deepseek_v4_are_two_blocks_of_64_tokens_in_every_layer() -> None:
    layout = made("deepseek-v4").layout.wa
    assert layout is not None
    layers = [layer for s in layout.sections for layer in s.layers if ".swa" in layer.name]
    (tokens,) = {s.tokens for s in layout.sections if ".swa" in s.layers[0].name}
    assert sum(layer.unit_nbytes for layer in layers) * tokens == 43 * 128 * 584


def test_a_boundary_of_deepseek_v4_keeps_what_a_resumed_request_reads_and_no_more() -> None:
    one = made("deepseek-v4")
    kept = tail(one)
    assert kept == DEEPSEEK_TAIL
    assert kept / MIB == pytest.approx(3.89, abs=0.005)
    # 74,752 bytes of a window layer take 19 pages; those of compressors are whole pages.
    pages = 43 * 19 + 21 * 8 + 21 * 2
    assert one.wa_row_nbytes == (pages + 1) * 4096
    fa_pages = 21 * 10 + 20 * 1 + 21 * 3  # of 37,376, 1,168 and 8,448 bytes
    assert one.fa_row_nbytes == (fa_pages + 1) * 4096
    assert one.every == 4, "4.02 / 1.15 MiB; without what aligns slabs 3.89 / 0.94 were 5"


def test_compressors_taken_for_windows_are_noticed() -> None:
    """Negative control: 8 tokens of those 4 to 1 and 128 of those 128 to 1, 14.7 MiB."""
    shape = built_in("deepseek-v4")
    plain = ModelShape(
        "plain", tuple(structs.replace(sort, compress_ratio=1) for sort in shape.sorts)
    )
    one = forecast_store(EngineShape(plain), PROMPT, 3e9)
    whole = 43 * 128 * 584 + 21 * 8 * (8192 + 2048) + 20 * 128 * 4096
    assert tail(one) == whole > 3.7 * DEEPSEEK_TAIL


@pytest.mark.parametrize(
    ("model", "every", "wa_total"),
    [("gpt-oss-120b", 1, 0.56 * GIB), ("gemma-3-27b", 21, 2.4 * GIB)],
)
def test_spacing_keeps_windows_near_half_of_all(model: str, every: int, wa_total: float) -> None:
    one = made(model)
    assert one.every == every
    # The two last boundaries of a prompt of whole blocks may need a row or two more.
    few = 2 * contents(one.layout.wa)
    assert wa_total * 0.99 <= one.wa_rows * contents(one.layout.wa) <= wa_total * 1.02 + few
    assert one.wa_share <= 0.52


def test_the_table_is_wrong_where_windows_are_kept_at_every_boundary() -> None:
    """Negative control."""
    assert made("gemma-3-27b", window_every="all").wa_share > 0.8
    assert made("gemma-3-27b", window_every="last").wa_share < 0.2


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_rows_are_the_models_and_replicated_heads_are_read_once_for_each_rank(tp: int) -> None:
    one, alone = made("gpt-oss-120b", tp=tp), made("gpt-oss-120b")
    assert one.layout == alone.layout
    assert one.nbytes == alone.nbytes
    slabs = one.boundary // 256 * (contents(one.layout.fa)) + tail(one)
    assert one.load_nbytes >= slabs * max(1, tp // 8)
    assert one.load_nbytes <= slabs * max(1, tp // 8) * (1.0 + 0.002 * tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_with_states_keeps_one_state_in_rows_of_its_blocks(tp: int) -> None:
    engine = EngineShape(model_shape(PUBLISHED[QWEN]), tp=tp)
    one = forecast_store(engine, 10 * 544 + 1, 3e9)
    assert one.layout.block_tokens == 544
    assert (one.boundary, one.fa_rows, one.wa_rows) == (5440, 10, 1)
    assert contents(one.layout.fa) == 12 * 544 * 2048
    assert contents(one.layout.wa) == QWEN_STATE
    assert one.every is None
    with pytest.raises(FormatError, match="block_tokens: expected a multiple of the engine's 544"):
        forecast_store(engine, PROMPT, 3e9, block_tokens=256)


def test_a_hit_leaves_a_token_to_compute() -> None:
    assert made("llama-3.1-8b", 512).boundary == 256
    assert made("llama-3.1-8b", 513).boundary == 512
    short = made("llama-3.1-8b", 255, prefill_rate=1e4)
    assert (short.boundary, short.fa_rows, short.nbytes, short.load_s, short.wa_share) == (
        0, 0, 0, 0, 0,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v4"])
@pytest.mark.parametrize("prefill_rate", [2e3, 1.2e4, 4e4])
def test_from_the_break_even_on_loading_is_faster_and_not_before(
    model: str, prefill_rate: float
) -> None:
    one = made(model, prefill_rate=prefill_rate)

    def gains(boundary: int) -> bool:
        there = made(model, boundary + 1, prefill_rate=prefill_rate)
        assert there.boundary == boundary
        return there.load_s < (there.recompute_s or 0)

    if one.break_even is None:
        assert not gains(1 << 16)
        return
    boundary = one.break_even - 1
    assert all(gains(boundary + 256 * more) for more in (0, 1, 2, 5, 40))
    assert boundary == 256 or not gains(boundary - 256)


@pytest.mark.parametrize(
    ("model", "tp", "staging", "tokens"),
    [
        # Rows of 20 and 104 MiB in halves: 1024 MiB less four of windows hold 81 of FA, 20,736
        # tokens, and windows are kept at every 5,376.
        ("gemma-3-27b", 2, 1 << 30, 3 * 5376),
        # Whole rows: 1024 less 416 hold 30, 7,680 tokens.
        ("gemma-3-27b", 1, 1 << 30, 5376),
        # Less than the first boundary, 21 rows of FA and four of windows.
        ("gemma-3-27b", 1, (21 * 20 + 416) * MIB - 1, 0),
        ("gemma-3-27b", 1, (21 * 20 + 416) * MIB, 5376),
        # 127 rows and four, which is what the whole prompt needs.
        ("gemma-3-27b", 1, (127 * 20 + 416) * MIB, 32_512),
        ("gemma-3-27b", 1, (127 * 20 + 416) * MIB - 1, 6 * 5376),
        # Without windows, rows of 32 MiB: 32 of 127.
        ("llama-3.1-8b", 1, 1 << 30, 32 * 256),
        ("llama-3.1-8b", 4, 1 << 30, 32_512),
    ],
)
def test_staging_carries_a_prompt_as_far_as_its_rows_fit(
    model: str, tp: int, staging: int, tokens: int
) -> None:
    one = made(model, tp=tp, staging=staging)
    assert one.staging.tokens == tokens
    assert one.boundary == 32_512
    assert (one.staging.needed_nbytes <= staging) == (tokens == one.boundary)
    assert made(model, tp=tp, staging=one.staging.needed_nbytes).staging.tokens == one.boundary
    assert made(model, tp=tp, staging=one.staging.needed_nbytes - 1).staging.tokens < one.boundary


def test_a_store_that_is_slower_than_prefill_never_pays() -> None:
    one = made("llama-3.1-8b", rate=1e8, prefill_rate=1e5)
    assert one.break_even is None
    assert made("llama-3.1-8b", rate=1e8).break_even is None


def test_a_break_even_that_forgets_windows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with windows free of charge, Gemma seems to pay from one block on."""
    honest = made("gemma-3-27b", prefill_rate=1e4).break_even
    monkeypatch.setattr(cost, "pieces", lambda layout, boundary: range(0))
    assert made("gemma-3-27b", prefill_rate=1e4).break_even == 257
    assert honest is not None
    assert honest > 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.5}, "store-rate: expected at least 1 a second, got 0.5"),
        ({"prefill_rate": float("nan")}, "prefill-rate: expected"),
        ({"prompt": 1}, "prompt: expected 2 to"),
        ({"staging": 0}, "store-staging: expected at least 1 byte, got 0"),
    ],
)
def test_numbers_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        made("llama-3.1-8b", **options)


def test_blocks_that_rows_cannot_hold_are_named() -> None:
    engine = EngineShape(built_in("llama-3.1-8b"), block_tokens=96)
    with pytest.raises(FormatError, match="block_tokens: expected a multiple of the engine's 96"):
        forecast_store(engine, 4096, 3e9)


def test_the_command_prints_and_writes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "gemma-3-27b", "--prompt", "32k", "--store"]
    words += ["--prefill-rate", "12000", "--decode", "tp=2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "128 rows of 20.00 MiB" in text
    assert "every 5,376 tokens and at the last boundary" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["store"]
    one = made("gemma-3-27b", tp=2, prefill_rate=12000)
    assert found["bytes"] == one.nbytes == found["fa"]["bytes"] + found["wa"]["bytes"]
    assert found["break_even_tokens"] == one.break_even
    assert f"from {one.break_even:,} tokens on" in text
    assert found["load_s"] == one.load_s
    assert "1,024.00 MiB a rank carry 16,128 tokens; all take 1,478.00 MiB" in text
    assert (found["staging_tokens"], found["staging_given_bytes"]) == (16_128, 1 << 30)
    assert main([*words, "--store-staging", "1478MiB"]) == 0
    assert "1,478.00 MiB a rank; 1,478.00 MiB are enough" in capsys.readouterr().out


def test_without_the_option_nothing_is_said_of_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gemma-3-27b", "--json"]) == 0
    assert "store" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--store-rate", "fast"], "--store-rate: expected a speed like 3GB/s, got fast"),
        (
            ["--store-window-every", "al"],
            "--store-window-every: expected auto, all, last or a number of tokens, got al",
        ),
        (["--store-window-every", "0"], "--store-window-every: expected"),
        (["--store-staging", "much"], "--store-staging: expected a size of 1 byte to 8 EiB"),
        (["--prefill-rate", "0"], "prefill-rate: expected at least 1 a second, got 0"),
        (["--decode", "block=96"], "block_tokens: expected a multiple of the engine's 96"),
    ],
)
def test_bad_options_end_with_two_and_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "gemma-3-27b", "--store", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "layers", "slab_nbytes"),
    [("gpt-oss-120b", 18, 64 << 10), ("llama-3.1-8b", 32, 128 << 10)],
)
def test_compressed_rows_are_25_of_32_and_as_large_in_staging(
    model: str, layers: int, slab_nbytes: int
) -> None:
    plain, packed = made(model, tp=2), made(model, tp=2, is_packed=True)
    assert 1.25 < plain.fa_nbytes / packed.fa_nbytes < 32 / 25
    assert 1.25 < plain.load_nbytes / packed.load_nbytes < 32 / 25
    head_nbytes = layers * (slab_nbytes * 25 // 32 + 10)
    assert packed.fa_row_nbytes == 8 * -(-head_nbytes // 4096) * 4096 + 4096
    assert packed.staging == plain.staging


@pytest.mark.parametrize("extra", [[], ["--trace", "no-such-file", "--engine-cache", "0"]])
def test_other_dtypes_are_not_compressed(
    extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", "gpt-oss-120b", "--store", "--store-compression", "exponents"]
    assert main([*words, "--dtype", "fp8", *extra]) == 2
    assert "store-compression: expected none for KV of fp8" in capsys.readouterr().err
