"""Nothing that the lab starts outlives it, however either of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdconn.tools.lab.lab_errors import EngineDied
from pdconn.tools.lab.process import Process, cause, tail
from pdconn.tools.lab.process_keeper import descendants

_SAY_AND_SLEEP = "print('here', flush=True); import time; time.sleep(60)"
_STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_SAY_AND_SLEEP}"
#: Leaves a stubborn child in a session of its own, prints its pid, and goes on.
_WITH_GRANDCHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {_STUBBORN!r}], start_new_session=True,
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _is_alive(pid: int) -> bool:
    return _state(pid) not in "ZX"


def _wait_until(true: object, timeout_s: float = 30.0) -> None:
    assert callable(true)
    give_up = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.02)


def _logged(log: Path) -> str:
    _wait_until(lambda: log.exists() and log.read_text(encoding="utf-8").endswith("\n"))
    return log.read_text(encoding="utf-8")


def test_what_is_asked_to_end_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process("server", _python(_SAY_AND_SLEEP), log)
    assert _logged(log) == "here\n"
    assert process.ended() is None
    ended = process.end_all()
    assert ended.exit_code == -signal.SIGTERM
    assert ended.killed == ()
    assert not _is_alive(process.pid)
    assert process.end_all() is ended


def test_its_own_end_is_seen_with_status_and_last_words(tmp_path: Path) -> None:
    with Process("server", _python("print('no model'); raise SystemExit(3)"), tmp_path / "l") as it:
        _wait_until(it.ended)
        ended = it.ended()
        assert ended is not None
        assert ended.exit_code == 3
        assert it.tail() == "no model"


def test_a_command_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="No such file"):
        Process("server", ["/nowhere/at/all"], tmp_path / "log")


def test_what_ignores_the_request_is_killed_after_its_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Process("server", _python(_STUBBORN), log, grace_s=0.3) as process:
        _logged(log)
        ended = process.end_all()
    assert ended.exit_code == -signal.SIGKILL
    assert 0.3 <= ended.seconds < 10  # which it has by default
    assert not _is_alive(process.pid)


def test_a_frozen_process_ends_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Process("server", _python(_SAY_AND_SLEEP), log) as process:
        _logged(log)
        process.pause()
        assert process.end_all().exit_code == -signal.SIGTERM


def test_a_paused_process_stands_still_until_resumed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    count = "import time\nfor i in range(10**9): print(i, flush=True); time.sleep(0.001)"
    with Process("server", _python(count), log) as process:
        _logged(log)
        process.pause()
        _wait_until(lambda: _state(process.pid) == "T")  # a signal takes effect a little later
        still = log.stat().st_size
        time.sleep(0.2)
        assert log.stat().st_size == still
        process.resume()
        _wait_until(lambda: log.stat().st_size > still)


def test_grandchildren_outside_the_group_are_found_and_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Process("server", _python(_WITH_GRANDCHILD + "\ninput()"), log) as process:
        _wait_until(process.ended)  # it has no input, so it ends at once
        ended = process.ended()
    grandchild = int(log.read_text(encoding="utf-8").split()[0])
    assert ended is not None
    assert [name.partition("(")[2] for name in ended.killed] == [f"{grandchild})"]
    assert not _is_alive(grandchild)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_the_process_that_started_it(tmp_path: Path, how: signal.Signals) -> None:
    log = tmp_path / "log"
    starter = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it
from pdconn.tools.lab.process import Process
process = Process("server", [sys.executable, "-c", {_SAY_AND_SLEEP!r}], pathlib.Path({str(log)!r}))
print(process.pid, process._keeper.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        _logged(log)
        parent.send_signal(how)
    _wait_until(lambda: not any(map(_is_alive, pids)))


def test_a_killed_keeper_takes_its_command_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # nothing is left to tidy up
    with Process("server", _python(_SAY_AND_SLEEP), log, env=env) as process:
        _logged(log)
        process._keeper.kill()
        _wait_until(lambda: not _is_alive(process.pid))
        assert process.end_all().exit_code is None


def test_temporary_files_go_with_the_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import tempfile; print(tempfile.mkdtemp(), flush=True)"
    with Process("server", [sys.executable, "-c", code], log) as process:
        _wait_until(process.ended)
    assert not Path(log.read_text(encoding="utf-8").strip()).exists()


def test_descendants_are_all_generations_but_not_zombies() -> None:
    with subprocess.Popen(
        _python("import subprocess, sys\n" + _WITH_GRANDCHILD + "\nchild.wait()"),
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(descendants(os.getpid()))
        os.kill(grandchild, signal.SIGKILL)
        child.kill()
        _wait_until(lambda: child.pid not in descendants(os.getpid()))


def test_a_process_lives_while_any_of_its_threads_does() -> None:
    """The kernel shows one whose first thread has ended as a zombie; its sockets are open."""
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("here", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen(_python(code), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        _wait_until(lambda: _state(child.pid) == "Z")
        assert child.pid in descendants(os.getpid())
        child.kill()
        _wait_until(lambda: child.pid not in descendants(os.getpid()))


def test_the_tail_of_a_log_may_hold_anything(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"x" * 100_000 + b"\n\xff second\nthird")
    assert tail(log, 2).endswith("second\nthird")


_OF_WORKER = "(Worker pid=12) ERROR 11-27 01:04:31 [multiproc_executor.py:1063] "
_OF_CORE = "(EngineCore pid=11) ERROR 11-27 01:04:32 [core.py:1510] "


def _died(log: Path, *exceptions: tuple[str, list[str]]) -> None:
    """A log in which processes report tracebacks: prefix, and a chain of exceptions."""
    lines = ["(APIServer pid=10) INFO 11-27 01:04:20 [entry.py:9] Error: not a traceback"]
    for prefix, chain in exceptions:
        for number, raised in enumerate(chain):
            if number:
                lines += ["", prefix + "The above exception was the direct cause of the following "
                          "exception:", ""]  # fmt: skip
            lines += [f"{prefix}{text}" for text in (
                "Traceback (most recent call last):",
                '  File "x.py", line 1, in f',
                '    raise ValueError("Sorry: no")',
                raised,
            )]  # fmt: skip
    log.write_text("\n".join([*lines, "the end"]) + "\n", encoding="utf-8")


def test_the_cause_is_the_first_traceback_and_not_what_others_report_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _died(
        log,
        (_OF_WORKER, ["ImportError: no nixl", "transport.errors.TransportUnavailable: no nixl"]),
        (_OF_CORE, ["RuntimeError: Worker failed"]),
        ("", ["RuntimeError: Engine core initialization failed. See root cause above."]),
    )
    assert cause(log) == "transport.errors.TransportUnavailable: no nixl"


def test_a_log_without_a_traceback_has_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _died(log)
    assert cause(log) is None
    assert cause(tmp_path / "none") is None
