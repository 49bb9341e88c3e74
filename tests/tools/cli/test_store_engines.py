"""``pdconn store`` beside an engine: what it saves is found sound, what is removed is a miss."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.settings import StoreSettings
from pdconn.tools.cli.main import main
from registration.references import AttentionKind
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready
from tests.store.joined.test_joined import prompt as tokens_of
from tests.tools.cli.stored_rows import full, prompt, save

BLOCK = 64
WINDOWS = Model(window=150)
MODELS = {
    "windows": WINDOWS,
    "chunks": Model(kind=AttentionKind.CHUNKED_LOCAL, window=128),
    "one kind": Model(windowed=()),
}


@contextmanager
def engine(root: Path, model: Model, shape: Shape) -> Iterator[FakeEngine]:
    settings = StoreSettings(
        root=str(root), capacity=1 << 30, staging=8 << 20, block_tokens=BLOCK, min_tokens=1
    )
    made = FakeEngine(settings, model, shape, budget=None)
    try:
        until_ready(made)
        yield made
    finally:
        made.close()


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["store", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_rows_of_engines_are_good_and_can_be_resumed(
    model: Model, tp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "root")
    with engine(tmp_path / "root", model, Shape(tp=tp)) as store:
        store.run(tokens_of(1, 400))
        store.settle()
        found = asked(capsys, "verify", root)
        assert found["warnings"] == found["bad"] == []
        assert {name for name, one in found["counts"].items() if one["rows"]} == {"good"}
        (one,) = asked(capsys, "ls", root)
        assert one["longest_prefix_tokens"] == one["longest_resumable_tokens"] == 384
        assert one["rows_not_reached"] == 0
        usage = asked(capsys, "stat", root)["budget"]
        assert usage["capacity_bytes"] == 1 << 30
        assert usage["committed_bytes"] == one["fa"]["bytes"] + one["wa"]["bytes"]


def test_what_is_dropped_or_damaged_is_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, tokens = str(tmp_path), tokens_of(2, 400)
    with engine(tmp_path, WINDOWS, Shape(tp=2)) as store:
        store.run(tokens)
        store.settle()
        third = sorted(tmp_path.glob("rows/*/fa/*/*.3"))
        (path,) = third
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
        assert asked(capsys, "verify", root, "--drop-bad", code=1)["dropped"]["rows"] == 1
        again = store.run(tokens)
        assert again.wrong == 0
        assert again.loaded <= 3 * BLOCK
        store.settle()
        assert asked(capsys, "drop", root, "--all", "--yes")["removed"]["rows"] > 6
        gone = store.run(tokens)
        assert (gone.loaded, gone.wrong) == (0, 0)


def test_long_work_shows_progress_on_a_terminal_and_the_result_alone_goes_to_the_output(
    tmp_path: Path,
) -> None:
    save(tmp_path, full(prompt(1, 40), range(40)))
    ours, theirs = pty.openpty()
    code = (
        "import sys, time; from pdconn.tools.cli.main import main\n"
        "from pdconn.tools.cli.store import store_command\n"
        "slow = lambda *a: (time.sleep(0.02) or one for one in real(*a))\n"
        "store_command.check_rows, real = slow,"
        " store_command.check_rows\n"
        f"sys.exit(main(['store', 'verify', {str(tmp_path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "of 40 rows" in shown
    assert shown.endswith("\r\x1b[K")
    assert "\x1b" not in done.stdout
    assert "40 good" in done.stdout
