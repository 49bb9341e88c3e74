"""What is wrong is said in one line before anything is started, measured or written."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from pdconn.tools.cli import bench_serve, bench_transfer, demo_command
from pdconn.tools.cli.main import main

ENGINE_PACKAGES = ("vllm", "torch", "nixl", "transformers", "safetensors", "tokenizers")


class Started(AssertionError):
    """Something was started, though the command line is wrong."""


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> NoReturn:
        raise Started

    monkeypatch.setattr(demo_command, "run_demo", start)
    monkeypatch.setattr(bench_transfer, "LocalLender", start)
    monkeypatch.setattr(bench_serve, "measure", start)


def one_line(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(list(words)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# pdconn demo


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "XX"], "--layout: expected one of LBHNC, LBNHC, LHBNC"),
        (["--max-tokens", "0"], "--max-tokens: expected at least 1, got 0"),
        (["--max-model-len", "100"], "--max-model-len: expected 137 to 8192"),
        (["--max-model-len", "128k"], "--max-model-len: expected 137 to 8192"),
        (["--tolerance", "nan"], "--tolerance: expected nats"),
        (["--tolerance", "-1"], "--tolerance: expected nats"),
        (["--port", "99999"], "--port: expected 1 to 65535, got 99999"),
        (["--model", "/nope"], "--model: expected a folder that exists"),
        (["--model", "./nope"], "--model: expected a folder that exists"),
        (["--model", "models/gemma/1b"], "--model: expected a folder that exists"),
        (["--model", "{empty}"], "--model: expected a folder with a config.json"),
        (
            ["--json", "/nowhere/demo_command.json"],
            "--json: expected a file in a folder that exists",
        ),
        (["--json", "{empty}"], "--json: expected a file to write"),
        (
            ["--picture", "/nowhere/demo_command.png"],
            "--picture: expected a file in a folder that exists",
        ),
        (["--picture", "demo_command.xls"], "--picture: expected a suffix among"),
    ],
)
def test_the_demo_checks_all_options_before_engines_start(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    nothing_starts: None,
) -> None:
    """Without the fix three engines start, and one of them ends in a page of traceback."""
    empty = tmp_path / "empty"
    empty.mkdir()
    words = [word.format(empty=empty) for word in words]
    line = one_line(capsys, 2, "demo", "--directory", str(tmp_path / "demo"), *words)
    assert line.startswith("pdconn demo: ")
    assert message in line
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--layout", "blhnc"],
        ["--model", "google/gemma-3-1b-it", "--max-model-len", "32k"],
        ["--max-model-len", "137", "--max-tokens", "16"],
        ["--picture", "{tmp}/a.svg", "--json", "{tmp}/a.json"],
    ],
)
def test_the_demo_starts_with_options_that_make_sense(
    words: list[str], tmp_path: Path, nothing_starts: None
) -> None:
    """The control."""
    words = [word.format(tmp=tmp_path) for word in words]
    with pytest.raises(Started):
        main(["demo", "--directory", str(tmp_path / "demo"), *words])


def test_prompts_of_the_demo_fit_into_a_short_model(tmp_path: Path) -> None:
    """Without the fix the last prompt is longer than the model allows, and an engine refuses it."""
    for max_model_len in (137, 200, 1000, 1135, 1136, 4096):
        plan = demo_command.DemoPlan("m", tmp_path, 100, max_tokens=16, max_model_len=max_model_len)
        lengths = [len(prompt) for _, prompt in _prompts(plan)]
        assert max(lengths) + 16 <= max_model_len
        assert lengths[-1] == lengths[-2] + 120
    assert lengths[-2] == 1000  # with room for it


def _prompts(plan: demo_command.DemoPlan) -> Iterator[tuple[str, tuple[int, ...]]]:
    from pdconn.tools.lab.demo_run import _prompts

    return _prompts(plan)


# Without vLLM


@pytest.mark.parametrize("words", [["demo"], ["bench", "serve", "--contestants", "single"]])
def test_without_vllm_the_missing_package_is_named(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As from a wheel alone.  Without the fix: ``No module named 'safetensors'``, a traceback."""
    for package in ENGINE_PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert main([*words, "--directory", str(tmp_path / "new")]) == 1
    *progress, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pdconn {' '.join(words[:2])}: vllm is not installed")
    assert all(one.startswith("[") for one in progress)


# pdconn bench


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "/nowhere/out.png"], "plot: expected a file in a folder that exists"),
        (["--plot", "out.xls"], "plot: expected a suffix among"),
        (["--json", "/nowhere/out.json"], "json: expected a file in a folder that exists"),
        (["--remote", "10.0.0.1"], "address: expected HOST:PORT"),
        (["--prompt", "128kb"], "prompt: expected whole numbers such as 2048 or 128k"),
    ],
)
def test_the_transfer_benchmark_checks_all_options_before_it_measures(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], nothing_starts: None
) -> None:
    """Without the fix a missing folder is noticed after minutes of measuring, and all is lost."""
    line = one_line(capsys, 2, "bench", "transfer", *words)
    assert line.startswith("pdconn bench transfer: ")
    assert message in line


def test_the_transfer_benchmark_without_matplotlib_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nothing_starts: None
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = one_line(capsys, 2, "bench", "transfer", "--plot", "out.png")
    assert "plot: expected matplotlib" in line


def test_the_serving_benchmark_checks_its_file_before_it_measures(
    capsys: pytest.CaptureFixture[str], nothing_starts: None
) -> None:
    words = ["--target", "a=http://127.0.0.1:1", "--json", "/nowhere/out.json"]
    line = one_line(capsys, 2, "bench", "serve", *words)
    assert "json: expected a file in a folder that exists, got /nowhere/out.json" in line


# pdconn diff


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that gives one connection this answer; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(1 << 16)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_diff_at_an_http_port_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the fix: ``frame length: … got 1213486160``, which are the letters HTTP."""
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        line = one_line(capsys, 2, "diff", f"127.0.0.1:{port}", "--save", "x")
    assert "got b'HTTP'; an HTTP server answers here, not a side channel" in line
    assert "1213486160" not in line


def test_diff_at_another_text_protocol_shows_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"SSH-2.0-OpenSSH\r\n") as port:
        line = one_line(capsys, 2, "diff", f"127.0.0.1:{port}", "--save", "x")
    assert "got b'SSH-'; this is text, not a side channel" in line


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_diff_of_a_url_says_what_it_wants(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the fix the URL is looked up as a host: ``Name or service not known``."""
    line = one_line(capsys, 2, "diff", f"{scheme}://127.0.0.1:8100", "b.json")
    assert "expected HOST:PORT" in line
    assert "no URL: the side channel is not the HTTP port" in line


def test_diff_checks_the_file_before_it_asks(capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(capsys, 2, "diff", "127.0.0.1:1", "--save", "/nowhere/a.json")
    assert "--save: expected a file in a folder that exists" in line


# Numbers of tokens, and unknown words


def test_tokens_are_numbers_or_multiples_of_1024(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without the fix ``--prompt 32k`` is an error."""

    def planned(prompt: str) -> str:
        assert main(["plan", "--model", "qwen3-8b", "--prompt", prompt, "--hit", "1K"]) == 0
        return capsys.readouterr().out

    assert planned("32k") == planned("32768")
    assert "a prompt of 32,768 tokens, 1,024 of them cached" in planned("32K")


@pytest.mark.parametrize("prompt", ["32kb", "k", "1.5k", "-1", "١٢", "9" * 5000, ""])
def test_a_prompt_that_is_no_number_is_one_line(
    prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--model", "qwen3-8b", f"--prompt={prompt}"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--prompt: expected a number of tokens such as 8192 or 128k (131072), got" in line


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["proxy", "--polcy", "prefix"], "--polcy; did you mean '--policy'?"),
        (["proxy", "--polcy=prefix"], "did you mean '--policy'?"),
        (["proxy", "--policy", "prefx"], "did you mean 'prefix'?"),
        (["bench", "transfer", "--layuot", "BHLNC"], "did you mean '--layout'?"),
        (["bench", "transfr"], "did you mean 'transfer'?"),
        (["porxy"], "did you mean 'proxy'?"),
        (["score", "a.json", "b.json"], "unknown argument b.json"),
        (["plan", "--model", "m", "--zzzzzz"], "unknown argument --zzzzzz (see"),
        (["plan", "--model", "m", "--picture"], "unknown argument --picture (see"),
    ],
)
def test_an_unknown_word_is_one_line_with_the_nearest_known_one(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the fix: fifteen lines of usage of another command, and no hint."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
    assert line.startswith("pdconn")
    assert line.endswith("--help)")


def test_an_engine_without_a_scheme_is_told_what_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = one_line(capsys, 2, "proxy", "--prefill", "localhost:8100", "--decode", "http://b:1")
    assert "--prefill: expected http://HOST:PORT" in line
    assert line.endswith("got 'localhost:8100'; did you mean 'http://localhost:8100'?")
