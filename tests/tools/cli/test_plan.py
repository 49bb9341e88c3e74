"""``pdconn plan``, as a user runs it."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from pdconn.planning.planning_errors import Incompatible
from pdconn.protocol.compat import Difference
from pdconn.tools.cli import plan_command
from pdconn.tools.cli.main import main
from pdconn.tools.plan.advice import advise
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.forecast import forecast
from pdconn.tools.plan.forecast_report import ForecastReport
from pdconn.tools.plan.hf.model_families import FAMILIES
from pdconn.tools.plan.link import PRESETS, parse_link
from pdconn.tools.plan.shapes import SHAPES, built_in
from pdconn.tools.plan.shapes_report import ShapesReport
from tests.tools.plan.published import PUBLISHED

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def printed(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_a_model_is_enough(capsys):
    out = printed(capsys, "--model", "gemma-3-27b")
    rows = [line.split() for line in out.splitlines() if line[:6].strip().isdigit()]
    assert [row[1] for row in rows] == ["sliding_window"] * 6 + ["full"]
    assert "predicted: " in out
    assert "factor of 3.8" in out
    assert "assumption" in out


def test_every_built_in_shape_is_listed_and_planned(capsys):
    listing = printed(capsys, "--list")
    for shape in SHAPES:
        assert shape.name in listing
        assert "predicted" in printed(capsys, "--model", shape.name.upper(), "--decode", "tp=2")


def test_json_is_the_forecast_and_its_totals_are_sums(capsys):
    words = ["--prefill", "tp=4,layout=BLHNC", "--decode", "tp=2,pp=2", "--prompt", "9000"]
    more = ["--hit", "1024", "--link", "shm", "--json"]
    found = json.loads(printed(capsys, "--model", "gpt-oss-20b", *words, *more))
    model = built_in("gpt-oss-20b")
    made = forecast(
        EngineShape(model, "BLHNC", tp=4), EngineShape(model, tp=2, pp=2), 9000, 1024,
        parse_link("shm"),
    )  # fmt: skip
    assert found["seconds"] == made.seconds
    for name in ("bytes", "runs", "saved_by_window_bytes", "saved_by_hits_bytes"):
        assert sum(group[name] for group in found["groups"]) == found["total"][name]
        assert sum(rank[name] for rank in found["ranks"]) == found["total"][name]
        assert sum(group["busiest"][name] for group in found["groups"]) == found["busiest"][name]
    assert sum(found["sent_bytes"]) == found["total"]["bytes"] == made.total.nbytes
    assert found["ranks"][found["busiest"]["rank"]]["bytes"] == found["busiest"]["bytes"]
    by_hand = found["busiest"]["bytes"] / 7.5e9 + found["busiest"]["runs"] * 2.2e-6
    assert found["seconds"] == pytest.approx(by_hand)
    assert found["prefill"] == {"tp": 4, "pp": 1, "layout": "BLHNC", "block_tokens": 16}


def test_a_followed_pull_is_planned_with_the_rate_of_prefill(capsys):
    words = ("--model", "gpt-oss-20b", "--prompt", "32k", "--link", "10Gb/s", "--stream")
    rate = ("--prefill-rate", "20000", "--chunk", "2k")
    found = json.loads(printed(capsys, *words, *rate, "--json"))["streamed"]
    assert found["prefill_seconds"] == 32768 / 20000
    assert 0 < found["visible_seconds"] < 0.2
    assert f"followed: {1e3 * found['visible_seconds']:,.2f} ms" in printed(capsys, *words, *rate)
    assert main(["plan", *words]) == 2
    said = "--prefill-rate: expected tokens per second, for --stream, got nothing"
    assert said in capsys.readouterr().err


def test_files_are_written_beside_the_table(capsys, tmp_path):
    json_file, svg_file = tmp_path / "plan.json", tmp_path / "plan.svg"
    out = printed(
        capsys, "--model", "gemma-3-27b", "--json", str(json_file), "--svg", str(svg_file),
        "--group", "6",
    )  # fmt: skip
    assert "predicted" in out
    assert json.loads(json_file.read_text(encoding="utf-8"))["model"] == "gemma-3-27b"
    root = ET.parse(svg_file).getroot()
    assert any("group 6" in (text.text or "") for text in root.iter())


def test_a_config_is_read_from_a_file_or_its_directory(capsys, tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    by_folder = printed(capsys, "--model", str(folder))
    assert by_folder == printed(capsys, "--model", str(folder / "config.json"))
    built_in_one = printed(capsys, "--model", "llama-3.1-8b")
    assert by_folder == built_in_one.replace("llama-3.1-8b", "my-llama")


def test_states_have_rows_of_their_own_and_a_sum(capsys, tmp_path):
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    words = ["--model", str(config), "--prompt", "8192", "--decode", "tp=2"]
    out = printed(capsys, *words)
    rows = [line.split() for line in out.splitlines() if line[:11].strip().isdigit()]
    assert [row[1] for row in rows] == ["full", "state", "state", "state"]
    assert {(row[4], row[5]) for row in rows} == {("544", "544")}
    # 36 layers, both halves together: 3 tokens of 8192 channels, 32 x 128 x 128, 16 bits.
    assert "39.518 MB are states, for a prompt of any length" in out
    assert "warning (raised-blocks): prefill's blocks are of 544 tokens, not 16" in out
    found = json.loads(printed(capsys, *words, "--json"))
    assert found["total"]["state_bytes"] == 36 * 2 * (3 * 8192 + 32 * 128 * 128)
    assert found["prefill"]["layout"] == "LBHNC"
    assert "mamba" not in printed(capsys, "--model", "gpt-oss-20b")
    wrong = [*words, "--prefill", "layout=BHLNC"]
    assert main(["plan", *wrong]) == 2
    assert "LBHNC, LBNHC, BLHNC or BLNHC" in capsys.readouterr().err


def test_the_time_has_one_number_and_names_the_side_that_sets_it(capsys):
    """One prefill rank feeds eight decode ranks.

    Without the fix: "predicted: 2.95 ms", then "takes at least 5.54 ms".
    """
    words = ["--model", "gpt-oss-20b", "--decode", "tp=8", "--link", "400Gb/s"]
    out = printed(capsys, *words)
    predicted = re.search(r"predicted: ([\d.]+) ms, set by prefill rank 0", out)
    assert predicted is not None
    total = next(line for line in out.splitlines() if line.strip().startswith("all 8 ranks"))
    assert float(total.split()[-1]) == pytest.approx(float(predicted[1]), abs=0.006)
    assert set(re.findall(r"([\d.]+) ms", out)) == {predicted[1]}
    found = json.loads(printed(capsys, *words, "--json"))
    assert found["slowest"] == {"side": "prefill", "rank": 0}
    assert found["seconds"] == found["sent_bytes"][0] / 50e9
    assert sum(group["seconds"] for group in found["groups"]) == pytest.approx(found["seconds"])


def test_each_side_has_a_link_of_its_own(capsys):
    words = ["--model", "gpt-oss-20b", "--decode", "tp=8", "--link", "400Gb/s"]
    out = printed(capsys, *words, "--prefill-link", "3200Gb/s")
    assert "links    prefill 3200Gb/s: 400 GB/s a rank; decode 400Gb/s: 50 GB/s a rank" in out
    assert "set by decode rank 0" in out
    assert "busy-source" not in out


@pytest.mark.parametrize(
    ("dtype", "item"), [("auto", 2), ("bfloat16", 2), ("fp8", 1), ("fp8_e5m2", 1)]
)
def test_the_header_says_what_a_token_takes_in_each_type(capsys, dtype, item):
    """gpt-oss-20b: 24 layers, every other one a window, of 8 heads of 64, keys and values."""
    words = ["--model", "gpt-oss-20b", "--dtype", dtype]
    each = 12 * 8 * 2 * 64 * item
    out = printed(capsys, *words)
    said = f"{2 * each:,} bytes a token ({each:,} in full attention, {each:,} in windows)"
    assert f"KV       {said}; {dtype}: {8 * item} bits a number" in out
    found = json.loads(printed(capsys, *words, "--json"))
    assert found["kv"] == {
        "dtype": dtype, "resolved_dtype": "bfloat16" if dtype == "auto" else dtype,
        "bytes_per_token": 2 * each, "full_attention_bytes_per_token": each,
        "window_bytes_per_token": each, "state_bytes": 0,
    }  # fmt: skip


def test_a_narrower_type_moves_fewer_bytes_but_states_keep_theirs(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"]), encoding="utf-8")
    totals = {}
    for dtype in ("auto", "fp8"):
        words = ["--model", str(config), "--dtype", dtype, "--prompt", "8704", "--json"]
        totals[dtype] = json.loads(printed(capsys, *words))
    before, after = (totals[dtype]["total"] for dtype in ("auto", "fp8"))
    assert after["state_bytes"] == before["state_bytes"] == totals["fp8"]["kv"]["state_bytes"]
    ratio = (before["bytes"] - before["state_bytes"]) / (after["bytes"] - after["state_bytes"])
    assert 1.8 < ratio < 2.2, "blocks differ, as a page has to hold a state"
    assert totals["auto"]["kv"]["bytes_per_token"] == 2 * totals["fp8"]["kv"]["bytes_per_token"]


def test_the_menu_has_a_row_for_every_link_and_each_is_a_plan_of_its_own(capsys):
    words = ["--model", "gpt-oss-20b", "--decode", "tp=4"]
    out = printed(capsys, *words)
    menu = json.loads(printed(capsys, *words, "--json"))["links"]
    assert [one["name"] for one in menu] == [link.name for link in PRESETS]
    for one in menu:
        alone = json.loads(printed(capsys, *words, "--link", one["name"], "--json"))
        same = ("seconds", "requests_per_s", "slowest")
        assert [one[field] for field in same] == [alone[field] for field in same]
        (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == [one["name"]]]
        assert row[4:6] == [f"{1e3 * one['seconds']:,.2f}", f"{one['requests_per_s']:,.1f}"]


def test_round_trips_make_a_pull_longer_and_do_not_make_it_rarer(capsys):
    found = {
        name: json.loads(printed(capsys, "--model", "qwen3-8b", "--link", name, "--json"))
        for name in ("tcp-10", "1.15GB/s")
    }
    named, speed = found["tcp-10"], found["1.15GB/s"]
    assert named["latency_s"] == pytest.approx(3 * 50e-6)
    assert speed["latency_s"] == 0
    assert named["seconds"] == pytest.approx(named["latency_s"] + 1 / named["requests_per_s"])
    words = ["--model", "qwen3-8b", "--link", "tcp-10"]
    assert "150 us for 3 round trips (assumed: 92% of 10 Gbit/s" in printed(capsys, *words)


def test_warnings_are_no_failure(capsys):
    out = printed(
        capsys, "--model", "llama-3.1-8b", "--prefill", "tp=2,layout=BLNHC", "--decode", "tp=4",
        "--hit", "100",
    )  # fmt: skip
    assert "warning (slow-runs): " in out
    assert "warning (partial-hit): " in out


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--model", "gema-3-27b"], "; did you mean 'gemma-3-27b'?"),
        (["--model", "qwen3-8b", "--prefill", "tp=3"], "--prefill tp: expected a divisor"),
        (["--model", "qwen3-8b", "--decode", "lay=BHLNC"], "--decode key: expected"),
        (["--model", "qwen3-8b", "--decode", "layout=X"], "--decode layout: expected"),
        (["--model", "qwen3-8b", "--prompt", "1"], "prompt: expected 2 to"),
        (["--model", "qwen3-8b", "--hit", "8192"], "hit: expected 0 to 8190"),
        (["--model", "qwen3-8b", "--link", "fast"], "link: expected shm"),
        (["--model", "qwen3-8b", "--dtype", "fp9"], "dtype: expected auto, bfloat16"),
        (["--model", "deepseek-v4", "--dtype", "fp8"], "dtype: expected auto for deepseek-v4"),
        (["--model", "qwen3-8b", "--prefill-link", "fast"], "prefill-link: expected shm"),
        (["--model", "qwen3-8b", "--descriptor-us", "nan"], "descriptor-us: expected"),
        (["--model", "qwen3-8b", "--svg", "/nowhere/plan.svg"], "/nowhere/plan.svg"),
        (["--model", "qwen3-8b", "--json", "/nowhere/plan.json"], "/nowhere/plan.json"),
        (["--model", "qwen3-8b", "--svg", "x.svg", "--group", "7"], "group: expected 0 to 0"),
        (["--model", "deepseek-v4", "--decode", "layout=LBHNC"], "--decode layout: expected"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_ends_with_2_and_one_line(words, wrong, capsys):
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("pdconn plan: ")
    assert wrong in line
    assert captured.out == ""


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b"[]", "config: expected a JSON object"),
        (json.dumps({**LLAMA, "mamba_d_state": 16}).encode(), "mamba_d_state: expected nothing"),
        (
            json.dumps({"model_type": "llama", "num_hidden_layers": 0}).encode(),
            "num_hidden_layers: expected",
        ),
        (json.dumps({**LLAMA, "model_type": "bert"}).encode(), "model_type: expected a family"),
        (None, "config.json"),
    ],
)
def test_a_config_that_cannot_be_read_ends_with_2_and_one_line(content, wrong, capsys, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert main(["plan", "--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert wrong in line
    assert "config.json" in line


def test_engines_that_cannot_exchange_end_with_2(monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise Incompatible(Difference("layer 0: window", "128", "256"))

    monkeypatch.setattr(plan_command, "forecast", refuse)
    assert main(["plan", "--model", "qwen3-8b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "window: theirs 128, ours 256" in line


@pytest.mark.parametrize("words", [[], ["--model", "a", "--list"], ["--list", "--ids", "sorted"]])
def test_wrong_options_end_with_2(words):
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 2


def test_planning_needs_no_engine():
    code = (
        "import sys; from pdconn.tools.cli.main import main\n"
        "main(['plan', '--model', 'gpt-oss-20b'])\n"
        "heavy = {'torch', 'vllm', 'nixl', 'zmq', 'aiohttp', 'matplotlib'}\n"
        "print('heavy', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert "heavy []" in done.stdout


def test_the_list_is_printed_or_written_as_json(capsys, tmp_path):
    found = json.loads(printed(capsys, "--list", "--json"))
    assert [one["name"] for one in found["shapes"]] == [shape.name for shape in SHAPES]
    assert found["model_types"] == list(FAMILIES)
    v4 = found["shapes"][-1]
    assert v4["kv"]["resolved_dtype"] == "fp8_ds_mla"
    assert {sort["part"] for sort in v4["sorts"]} == {"attn", "indexer", "swa", "state",
                                                      "indexer_state"}  # fmt: skip
    path = tmp_path / "list.json"
    assert "gpt-oss-20b" in printed(capsys, "--list", "--json", str(path))
    assert json.loads(path.read_text(encoding="utf-8")) == found
    assert main(["plan", "--list", "--json", "/nowhere/list.json"]) == 2
    assert "/nowhere/list.json" in capsys.readouterr().err


def test_what_is_assumed_is_marked_in_the_menu(capsys):
    words = ["--model", "gpt-oss-20b"]
    out = printed(capsys, *words)
    assert "\n~ assumed, not measured" in out
    menu = json.loads(printed(capsys, *words, "--json"))["links"]
    for one in menu:
        (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == [one["name"]]]
        fields = ("bytes_per_s", "descriptor_s", "round_trip_s")
        marked = [field for field, cell in zip(fields, row[1:4], strict=True) if cell[0] == "~"]
        assert marked == sorted(one["assumed"]), one["name"]
    assert sum(bool(one["assumed"]) for one in menu) == 7
    assert [one["assumed"] for one in menu if one["name"] == "shm"] == [[]]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    model = built_in("gpt-oss-20b")
    made = forecast(
        EngineShape(model, "LBNHC", tp=4), EngineShape(model, tp=8), 32768, 0, parse_link("tcp-10")
    )  # fmt: skip
    advice = advise(made)
    assert advice
    lines = ForecastReport(made, advice).text(width).splitlines()
    assert max(map(len, lines)) <= width
    whole = ForecastReport(made, advice).text().splitlines()
    assert max(map(len, whole)) > 130, "negative control: a pipe gets whole lines"
    cells = {cell for line in whole for cell in line.split()}
    assert cells <= {cell for line in lines for cell in line.split()}
    assert max(map(len, ShapesReport().text(width).splitlines())) <= width
