"""``pdconn bench transfer``: real processes, real NIXL, small cases."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.bench.errors import LenderFailed, WrongBytes
from pdconn.bench.percentile import percentile
from pdconn.bench.transfer import rig as rig_module
from pdconn.bench.transfer.control import (
    AT_LENDER,
    AT_READER,
    AskCpu,
    CannotLend,
    Open,
    Opened,
    Shut,
    Talk,
    Used,
)
from pdconn.bench.transfer.lender import Beside, lend
from pdconn.bench.transfer.lines import Line
from pdconn.bench.transfer.moves import Sample
from pdconn.bench.transfer.paths import PATHS
from pdconn.bench.transfer.rig import OpenCase
from pdconn.bench.transfer.rounds import take_rounds
from pdconn.bench.transfer.workload import Workload
from pdconn.cli.main import main
from pdconn.forecast.engine import parse_engine
from pdconn.forecast.shapes import built_in
from pdconn.lab.ports import free_ports
from pdconn.protocol.framing import frame

MODEL = built_in("gpt-oss-20b")
SMALL = ["--model", "gpt-oss-20b", "--prompt", "300", "--rounds", "2"]


# The two sides


@pytest.fixture
def talk() -> Iterator[Talk]:
    """With a lender on a thread of this process."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lend, args=(Talk(theirs, AT_LENDER), 1 << 28))
    thread.start()
    talk = Talk(ours, AT_READER)
    yield talk
    talk.close()
    thread.join()


def opened(talk: Talk, **settings: object) -> object:
    asked = {"engine": parse_engine("tp=2", MODEL), "num_blocks": 9, "ranks": (0, 1), "path": "shm"}
    talk.send(Open(**{**asked, **settings}))
    return talk.receive()


def test_a_lender_lends_gives_back_and_counts_its_cpu(talk: Talk) -> None:
    answer = opened(talk)
    assert isinstance(answer, Opened)
    assert [one.rank for one in answer.lent] == [0, 1]
    assert answer.facts["nixl"]
    for message in (AskCpu(), Shut(), Shut()):
        talk.send(message)
        used = talk.receive()
        assert isinstance(used, Used)
        assert used.cpu_s > 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"path": "wire"}, "BadCase: path: expected auto, shm, shm-huge, tcp, got wire"),
        ({"ranks": (2,)}, r"BadCase: ranks: expected below 2, got \(2,\)"),
        ({"num_blocks": 0}, "BadCase: blocks: expected 1 to"),
        ({"num_blocks": 100_000}, "BadCase: bytes to lend: expected at most 268,435,456"),
    ],
)
def test_what_cannot_be_lent_is_refused_and_the_lender_goes_on(
    talk: Talk, settings: dict[str, object], why: str
) -> None:
    answer = opened(talk, **settings)
    assert isinstance(answer, CannotLend)
    assert re.search(why, answer.why), answer.why
    assert isinstance(opened(talk), Opened)


def test_nonsense_ends_the_talk_with_a_reason() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(frame(b"\x93nonsense"))
        with pytest.raises(LenderFailed, match="makes no sense"):
            Talk(theirs, AT_LENDER).receive()
    theirs.close()


# A rig over real NIXL


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    lender = Beside()
    yield lender
    lender.close()


def workload(prefill: str = "", decode: str = "", **settings: object) -> Workload:
    return Workload(parse_engine(prefill, MODEL), parse_engine(decode, MODEL), 300, **settings)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_every_line_moves_the_bytes_that_it_says(beside: Beside, path: str) -> None:
    case = workload("tp=4", "tp=2", rank=1, requests=3)
    with OpenCase(case, PATHS[path], beside.talk) as rig:
        results = {one.line: one for one in take_rounds(rig, 2, random.Random(1), lambda _: None)}
    ours = results[Line.PDCONN]
    assert ours.nbytes == results[Line.RAW].nbytes == results[Line.LAYERED].nbytes
    assert ours.nbytes == 3 * results[Line.ALONE].nbytes
    assert results[Line.RAW].runs == 3 * 2, "one piece per request and rank"
    assert results[Line.LAYERED].runs > ours.runs
    assert results[Line.RAW].of_raw == 1.0
    assert ours.slowest_pull is not None
    assert all(one.bytes_per_s > 0 for one in results.values())


def test_wrong_bytes_are_noticed(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenCase(workload(), PATHS["shm"], beside.talk) as rig:
        rig.check()
        measure = OpenCase.measure

        def spoiling(self: OpenCase, line: Line) -> Sample:
            sample = measure(self, line)
            spans = self._planned[0][0][1]
            rig_module.copy(
                rig_module.Memory(int(spans.local[-1]), 1),
                rig_module.Memory(int(spans.local[0]), 1),
                1,
            )
            return sample

        monkeypatch.setattr(OpenCase, "measure", spoiling)
        with pytest.raises(WrongBytes, match="request 0, rank 0: 1 bytes are wrong"):
            rig.check()


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0


# The command


def test_the_command_measures_and_writes_what_it_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = [*SMALL, "--path", "shm", "--block", "16,32", "--ids", "random,runs"]
    assert main(["bench", "transfer", *words, "--json", str(out), "--plot", str(picture)]) == 0
    said = capfd.readouterr().out
    assert said.count("of raw") == 4
    document = json.loads(out.read_text())
    assert [(case["block_tokens"], case["ids"]) for case in document["cases"]] == [
        (16, "random"),
        (16, "runs"),
        (32, "random"),
        (32, "runs"),
    ]
    lines = {line["line"] for line in document["cases"][0]["lines"]}
    assert lines == {"pdconn", "layered", "raw", "memcpy"}
    assert document["manifest"]["versions"]["nixl"]
    assert document["cases"][0]["transports"]["lender"]["nixl"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt-5"], "model: expected"),
        (["--path", "wire"], "path: expected auto, shm"),
        (["--ids", "sorted"], "ids: expected random"),
        (["--prompt", "many"], "prompt: expected whole numbers"),
        (["--prefill", "tp=3"], "--prefill"),
        (["--block", "16", "--decode", "block=32"], "block: expected one value"),
        (["--rank", "1"], "rank: expected 0 to 0"),
        (["--rounds", "0"], "rounds: expected at least 1"),
        (["--serve", "nowhere"], "address: expected HOST:PORT"),
    ],
)
def test_options_that_make_no_case_end_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["bench", "transfer", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_nobody_at_the_other_end_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    assert main(["bench", "transfer", *SMALL, "--remote", f"127.0.0.1:{port}"]) == 1
    assert "refused" in capsys.readouterr().err


def test_a_lender_that_listens_serves_one_reader_after_the_other(tmp_path: Path) -> None:
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "pdconn.cli.main", "bench", "transfer"]
    with subprocess.Popen(
        [*command, "--serve", address], stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            assert served.stdout is not None
            assert f"listening on {address}" in served.stdout.readline()
            for _ in range(2):
                words = [*SMALL, "--path", "auto", "--json", "-", "--remote", address]
                done = subprocess.run(
                    [*command, *words], capture_output=True, text=True, timeout=120, check=True
                )
                assert json.loads(done.stdout)["cases"][0]["path"] == "auto"
        finally:
            served.terminate()
