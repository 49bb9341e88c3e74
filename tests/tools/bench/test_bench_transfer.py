"""``pdconn bench transfer``: real processes, real NIXL, small cases."""

from __future__ import annotations

import ctypes
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

from pdconn.protocol.messages import frame
from pdconn.tools.bench.bench_errors import LenderFailed, WrongBytes
from pdconn.tools.bench.percentile import percentile
from pdconn.tools.bench.transfer.arena import BenchMemory, copy
from pdconn.tools.bench.transfer.bench_case import OpenCase
from pdconn.tools.bench.transfer.bench_lender import LocalLender, lend
from pdconn.tools.bench.transfer.control import (
    AT_LENDER,
    AT_READER,
    AskCpu,
    CanLend,
    CannotLend,
    ControlConnection,
    Open,
    Shut,
    Used,
)
from pdconn.tools.bench.transfer.methods import Method
from pdconn.tools.bench.transfer.moves import Sample
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.rounds import take_rounds
from pdconn.tools.bench.transfer.workload import Workload
from pdconn.tools.cli.main import main
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.plan.engine_shape import parse_engine
from pdconn.tools.plan.shapes import built_in
from transport import HOST, Memory, Spans

MODEL = built_in("gpt-oss-20b")
SMALL = ["--model", "gpt-oss-20b", "--prompt", "300", "--rounds", "2"]


# The two sides


@pytest.fixture
def control() -> Iterator[ControlConnection]:
    """With a lender on a thread of this process."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lend, args=(ControlConnection(theirs, AT_LENDER), 1 << 28))
    thread.start()
    control = ControlConnection(ours, AT_READER)
    yield control
    control.close()
    thread.join()


def opened(control: ControlConnection, **settings: object) -> object:
    asked = {"engine": parse_engine("tp=2", MODEL), "num_blocks": 9, "ranks": (0, 1), "path": "shm"}
    control.send_message(Open(**{**asked, **settings}))
    return control.receive_message()


def test_a_lender_lends_gives_back_and_counts_its_cpu(control: ControlConnection) -> None:
    answer = opened(control)
    assert isinstance(answer, CanLend)
    assert [one.rank for one in answer.lent] == [0, 1]
    assert answer.facts["nixl"]
    for message in (AskCpu(), Shut(), Shut()):
        control.send_message(message)
        used = control.receive_message()
        assert isinstance(used, Used)
        assert used.cpu_s > 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"path": "wire"}, "BadOption: path: expected auto, shm, .*, tcp-ucx, got wire"),
        ({"ranks": (2,)}, r"BadOption: ranks: expected below 2, got \(2,\)"),
        ({"num_blocks": 0}, "BadOption: blocks: expected 1 to"),
        ({"num_blocks": 100_000}, "BadOption: bytes to lend: expected at most 268,435,456"),
    ],
)
def test_what_cannot_be_lent_is_refused_and_the_lender_goes_on(
    control: ControlConnection, settings: dict[str, object], why: str
) -> None:
    answer = opened(control, **settings)
    assert isinstance(answer, CannotLend)
    assert re.search(why, answer.why), answer.why
    assert isinstance(opened(control), CanLend)


def test_an_invalid_message_ends_the_connection_with_a_reason() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(frame(b"\x93nonsense"))
        with pytest.raises(LenderFailed, match="sent an invalid message"):
            ControlConnection(theirs, AT_LENDER).receive_message()
    theirs.close()


def test_an_answer_is_waited_for_no_longer_than_asked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiting = ControlConnection(ours, AT_READER)
        with pytest.raises(LenderFailed, match=r"did not answer within 0\.05 s"):
            waiting.receive_message(timeout_s=0.05)
        ControlConnection(theirs, AT_LENDER).send_message(Used(1.0))
        assert waiting.receive_message(timeout_s=60) == Used(1.0)


def test_every_byte_of_a_run_of_several_chunks_is_compared() -> None:
    with BenchMemory(20 << 20, huge_pages=False) as arena:
        arena.fill(seed=3)
        base, shift = arena.memory.base, 5
        run = Spans.merged_few([base + shift], [base + shift], [(20 << 20) - shift], HOST, HOST)
        assert arena.wrong_bytes(run, arena.memory, seed=3) == 0
        for at in (shift, 8 << 20, (20 << 20) - 1):
            byte = ctypes.c_ubyte.from_address(base + at)
            byte.value ^= 1
        assert arena.wrong_bytes(run, arena.memory, seed=3) == 3


# A rig over real NIXL


@pytest.fixture(scope="module")
def lender() -> Iterator[LocalLender]:
    lender = LocalLender()
    yield lender
    lender.close()


def workload(prefill: str = "", decode: str = "", **settings: object) -> Workload:
    engines = (parse_engine(text, MODEL).in_best_layout() for text in (prefill, decode))
    return Workload(*engines, 300, **settings)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_every_method_moves_the_bytes_that_it_reports(lender: LocalLender, path: str) -> None:
    check_every_method(lender, path, "nixl")


@pytest.mark.ucx
@pytest.mark.usefixtures("only_one_ucx")
def test_every_method_does_so_with_the_ucx_backend(lender: LocalLender) -> None:
    check_every_method(lender, "tcp-ucx", "ucx")


def check_every_method(lender: LocalLender, path: str, backend: str) -> None:
    case = workload("tp=4", "tp=2", rank=1, requests=3)
    with OpenCase(case, PATHS[path], lender.control) as rig:
        results = {one.method: one for one in take_rounds(rig, 2, random.Random(1), lambda _: None)}
        facts = rig.facts()
    assert {facts[side]["backend"] for side in ("reader", "lender")} == {backend}
    ours = results[Method.PDCONN]
    assert ours.nbytes == results[Method.RAW].nbytes == results[Method.LAYERED].nbytes
    assert ours.nbytes == 3 * results[Method.ALONE].nbytes
    assert results[Method.RAW].runs == 3 * 2, "one piece per request and rank"
    assert results[Method.LAYERED].runs > ours.runs
    assert results[Method.RAW].of_raw == 1.0
    assert ours.slowest_pull is not None
    assert all(one.bytes_per_s > 0 for one in results.values())


class CorruptingCase(OpenCase):
    """After every measurement it overwrites one byte, once ``corrupts`` is set."""

    corrupts = False

    def measure(self, method: Method) -> Sample:
        sample = super().measure(method)
        if self.corrupts:
            spans = self._planned[0][0][1]
            copy(Memory(int(spans.local[-1]), 1), Memory(int(spans.local[0]), 1), 1)
        return sample


def test_a_reader_that_leaves_before_its_answer_leaves_no_traceback() -> None:
    """As Ctrl-C does; without the fix the lender's traceback came after "interrupted"."""
    ours, theirs = socket.socketpair()
    with ours:
        ControlConnection(ours, AT_READER).send_message(AskCpu())
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "pdconn.tools.bench.transfer.bench_lender", str(fd)]
        ended = subprocess.run(command, pass_fds=[fd], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_wrong_bytes_are_noticed(lender: LocalLender) -> None:
    with CorruptingCase(workload(), PATHS["shm"], lender.control) as rig:
        rig.check_bytes()
        rig.corrupts = True
        with pytest.raises(WrongBytes, match="request 0, rank 0: 1 bytes are wrong"):
            rig.check_bytes()


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
    options = [*SMALL, "--path", "shm", "--block", "16,32", "--ids", "random,runs"]
    assert main(["bench", "transfer", *options, "--json", str(out), "--plot", str(picture)]) == 0
    output = capfd.readouterr().out
    assert output.count("of raw") == 4
    document = json.loads(out.read_text(encoding="utf-8"))
    assert [(case["block_tokens"], case["ids"]) for case in document["cases"]] == [
        (16, "random"),
        (16, "runs"),
        (32, "random"),
        (32, "runs"),
    ]
    methods = {method["line"] for method in document["cases"][0]["lines"]}
    assert methods == {"pdconn", "layered", "raw", "memcpy"}
    assert document["manifest"]["versions"]["nixl"]
    assert document["cases"][0]["transports"]["lender"]["nixl"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
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
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "transfer", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_without_a_lender_the_command_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    assert main(["bench", "transfer", *SMALL, "--remote", f"127.0.0.1:{port}"]) == 1
    assert "refused" in capsys.readouterr().err


def test_a_lender_that_listens_serves_one_reader_after_the_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "pdconn.tools.cli.main", "bench", "transfer"]
    with subprocess.Popen(
        [*command, "--serve", address], stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            assert served.stdout is not None
            assert f"listening on {address}" in served.stdout.readline()
            for _ in range(2):
                options = [*SMALL, "--path", "auto", "--json", "-", "--remote", address]
                assert main(["bench", "transfer", *options]) == 0
                assert json.loads(capfd.readouterr().out)["cases"][0]["path"] == "auto"
        finally:
            served.terminate()
