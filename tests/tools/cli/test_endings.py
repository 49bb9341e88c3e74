"""How a command ends when its reader leaves, and on Ctrl-C: the exit code is right."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from pdconn.tools.cli import plan_command
from pdconn.tools.cli.main import COMMANDS, main
from tests.protocol.test_compat import engine

PDCONN = [sys.executable, "-m", "pdconn.tools.cli.main"]
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "snapshot.json")


def without_reader(
    *words: str, stderr_too: bool = False, command: list[str] = PDCONN
) -> tuple[int, str]:
    """Exit code and standard error of a command whose output is read by no process."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*command, *words],
            stdout=writer,
            stderr=writer if stderr_too else subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


def test_a_bench_whose_result_is_not_read_fails_in_one_line():
    """Without the fix it ends with 0, and reports success with its result lost."""
    small = ["--model", "gpt-oss-20b", "--prompt", "300", "--rounds", "1", "--path", "shm"]
    code, err = without_reader("bench", "transfer", *small)
    assert code == 1
    assert err.splitlines() == [
        "pdconn bench transfer: standard output was closed before the result was written"
    ]


_DEMO = """
import sys
from pdconn.tools.cli import demo_command
from pdconn.tools.cli.main import main
from pdconn.tools.lab.demo_report import DemoRow
from pdconn.tools.lab.demo_run import DemoAddresses

row = DemoRow("p", 9, 1, 1, 1, 1, 1, 0.1, 0.1, 0.1, None)
served = DemoAddresses("http://h:1", "http://h:2")
demo_command.run_demo = lambda plan, log_step, ended: ended([row], served)
demo_command._draw = lambda rows, path: None
sys.exit(main(["demo", "--model", "m", "--directory", sys.argv[1]]))
"""


def test_a_demo_whose_verdict_is_not_read_fails_in_one_line(tmp_path):
    """``pdconn demo | head -1`` ended with 0, whatever the engines had answered."""
    command = [sys.executable, "-c", _DEMO, str(tmp_path)]
    code, err = without_reader(command=command)
    assert code == 1
    assert err == "pdconn demo: standard output was closed before the result was written\n"
    control = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    verdict, page = control.stdout.splitlines()[-2:]
    assert verdict == "1 answers: all agree with one engine alone"
    assert page == "live page: was http://h:2/ (--keep leaves it running)"


def test_only_demo_and_bench_need_a_reader():
    assert [one.name for one in COMMANDS if one.needs_reader] == ["demo", "bench"]


@pytest.mark.parametrize(
    "words", [["score", EXAMPLE], ["plan", "--list"], ["proxy", "--help"], ["demo", "--help"]]
)
def test_other_commands_end_as_if_their_output_was_read(words):
    """The control: closing the output early is no failure of ``score`` or ``plan``."""
    assert without_reader(*words) == (0, "")


def test_a_verdict_stays_what_it_was_when_nothing_is_read(tmp_path):
    """Engines that cannot exchange KV: without the fix ``diff | head`` called them compatible."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_bytes(msgspec.json.encode(engine(traits={"model": "x"})))
    files[1].write_bytes(msgspec.json.encode(engine()))
    assert without_reader("diff", *map(str, files)) == (1, "")
    assert without_reader("diff", str(files[1]), str(files[1])) == (0, "")


def test_a_broken_standard_error_is_a_failure(tmp_path):
    """``pdconn demo 2>&1 | head``: progress goes to standard error, whose pipe breaks first.

    Without the fix this ended with 0, with no answer compared.
    """
    code, _ = without_reader("demo", "--model", str(tmp_path / "none"), stderr_too=True)
    assert code not in (0, 120)  # 120: Python could not flush at exit


def test_another_pipe_that_breaks_is_no_success(monkeypatch, capsys):
    """Without the fix a broken connection to an engine counted as closed output: exit 0."""

    def lost(_: object) -> int:
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours:
            ours.sendall(b"a")
        return 0

    monkeypatch.setattr(plan_command, "run_command", lost)
    assert main(["plan", "--model", "qwen3-8b"]) == 1
    assert capsys.readouterr().err == "pdconn plan: [Errno 32] Broken pipe\n"


def interrupted(command: list[str], ready: bytes) -> tuple[int, bytes]:
    """Exit code, and what came after ``ready`` on standard error, of a command under Ctrl-C.

    As a terminal does it: the whole process group gets SIGINT.  ``env`` makes that count, since
    children of a shell's background job ignore it.
    """
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        seen = b""
        while ready not in seen:
            more = os.read(process.stderr.fileno(), 4096)
            assert more, seen.decode()
            seen += more
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        return process.wait(timeout=60), rest


_MEASURES_FOR_EVER = """
import sys
from pdconn.tools.bench.transfer.bench_case import OpenCase
from pdconn.tools.cli.main import main

measure = OpenCase.measure
def noted(self, method):
    sys.stderr.write("measuring\\n")
    return measure(self, method)
OpenCase.measure = noted
sys.exit(main(["bench", "transfer", "--model", "gpt-oss-20b", "--prompt", "300",
               "--rounds", "100000", "--path", "shm"]))
"""


def test_ctrl_c_ends_a_benchmark_with_130_and_one_line():
    """Without the fix both processes of the benchmark end in a traceback."""
    code, err = interrupted([sys.executable, "-c", _MEASURES_FOR_EVER], b"measuring")
    lines = [line for line in err.decode().splitlines() if line != "measuring"]
    assert lines == ["pdconn bench transfer: interrupted"]
    assert code == 130


_INTERRUPTED_IN_NIXL = """
import signal, sys
import nixl._api as nixl
from pdconn.tools.cli.main import main

release = nixl.nixl_xfer_handle.release
def interrupted(self):
    release(self)
    nixl.nixl_xfer_handle.__del__ = finalized
    nixl.nixl_xfer_handle.release = release
def finalized(self):
    nixl.nixl_xfer_handle.__del__ = lambda self: None
    signal.raise_signal(signal.SIGINT)
nixl.nixl_xfer_handle.release = interrupted
sys.exit(main(["bench", "transfer", "--model", "gpt-oss-20b", "--prompt", "300", "--rounds", "2",
               "--path", "shm"]))
"""


def test_ctrl_c_within_nixl_is_not_lost():
    """Without the fix the exception of a finalizer was printed, and the benchmark went on."""
    command = ["env", "--default-signal=INT", sys.executable, "-c", _INTERRUPTED_IN_NIXL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (130, "pdconn bench transfer: interrupted\n")


_INTERRUPTED_WHILE_CLOSING = """
import signal, sys
from pdconn.tools.bench.transfer.bench_case import OpenCase
from pdconn.tools.cli.main import main

close = OpenCase.close
def interrupted(self):
    signal.raise_signal(signal.SIGINT)
    close(self)
OpenCase.close = interrupted
measure = OpenCase.measure
def once(self, method):
    OpenCase.measure = measure
    signal.raise_signal(signal.SIGINT)
    return measure(self, method)
OpenCase.measure = once
sys.exit(main(["bench", "transfer", "--model", "gpt-oss-20b", "--prompt", "300", "--rounds", "2",
               "--path", "tcp"]))
"""


def test_a_second_ctrl_c_ends_a_benchmark_that_closes():
    """Without the fix it broke the wait for the reader's thread, whose memory was freed then."""
    command = ["env", "--default-signal=INT", sys.executable, "-c", _INTERRUPTED_WHILE_CLOSING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    said = "pdconn bench transfer: interrupted twice, nothing is closed\n"
    assert (done.returncode, done.stderr) == (130, said)


def test_ctrl_c_before_a_command_runs_ends_with_130(monkeypatch, capsys):
    """Imports take seconds, so this is where an impatient user interrupts."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "configure", interrupt)
    assert main(["plan", "--list"]) == 130
    assert capsys.readouterr().err == "pdconn: interrupted\n"


def test_a_second_ctrl_c_ends_the_proxy_without_draining():
    """The first one waits for the request that is under way; the control is its message.

    Without the fix it waited half a minute more.  Ended by SIGINT: a shell calls that 130.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = ["proxy", "--prefill", engine, "--decode", engine, "--port", "0", "--json"]
        words += ["--drain-timeout", "600"]
        process = subprocess.Popen([*PDCONN, *words], stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            url = urlsplit(json.loads(process.stdout.readline())["url"])
            client = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
            body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 1})
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            accepted = [silent.accept()[0] for _ in range(2)]  # a probe, and the request
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert json.loads(process.stdout.readline())["event"] == "draining"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == -signal.SIGINT
        client.close()
        for sock in accepted:
            sock.close()
