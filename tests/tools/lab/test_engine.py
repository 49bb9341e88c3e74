"""Engines start together, fail with a reason, and stop together.  The servers are fakes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.engine import CPU_LIBRARIES, Engine, missing_libraries, running
from pdconn.tools.lab.lab_errors import EngineDied, EngineStartTimeout, PortInUse
from pdconn.tools.lab.ports import LOCALHOST, free_ports, is_free
from pdconn.tools.lab.spec import EngineSpec

_HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
print("loading", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_DYING = "print('out of blocks'); raise SystemExit(7)"
_HANGING = "import time; print('thinking', flush=True); time.sleep(60)"


class Enough(Exception):
    """What a test waited for was seen."""


class LeapingClock:
    """A clock: an hour passes once the log has a line, or 30 s are over."""

    def __init__(self, log: Path) -> None:
        self._log, self._began = log, time.monotonic()

    def __call__(self) -> float:
        complete = self._log.exists() and self._log.read_text(encoding="utf-8").endswith("\n")
        return 3600.0 if complete or time.monotonic() - self._began > 30.0 else 0.0


class FakeSpec(EngineSpec):
    """Runs the code in ``args`` in place of vLLM."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", *self.args, str(self.port)]


def _spec(code: str, name: str = "fake") -> FakeSpec:
    return FakeSpec(name=name, model=Path("none"), port=free_ports(1)[0], args=(code,))


def test_an_engine_serves_inside_the_block_and_only_there(tmp_path: Path) -> None:
    with Engine(_spec(_HEALTHY), tmp_path) as engine:
        assert engine.boot_s is not None
        assert not is_free(engine.spec.port)
        assert engine.last_line() == "loading"
    assert is_free(engine.spec.port)


def test_engines_are_handed_over_when_all_serve(tmp_path: Path) -> None:
    specs = [_spec(_HEALTHY, "a"), _spec(_HEALTHY, "b")]
    with running(specs, tmp_path) as engines:
        assert [engine.spec.name for engine in engines] == ["a", "b"]
        assert all(engine.boot_s is not None for engine in engines)
    assert all(is_free(spec.port) for spec in specs)


def test_one_that_dies_at_start_ends_all_and_shows_its_log(tmp_path: Path) -> None:
    specs = [_spec(_HEALTHY, "good"), _spec(_DYING, "bad")]
    with (
        pytest.raises(EngineDied, match=r"(?s)bad died with exit status 7.*out of blocks") as died,
        running(specs, tmp_path),
    ):
        pytest.fail("it must not be handed over")
    assert died.value.exit_code == 7
    assert is_free(specs[0].port)


def test_one_that_never_serves_is_given_up_on(tmp_path: Path) -> None:
    clock = LeapingClock(tmp_path / "fake.log")
    with (
        pytest.raises(EngineStartTimeout, match=r"not healthy within 7 s.*\n.*thinking"),
        running([_spec(_HANGING)], tmp_path, timeout_s=7.0, clock=clock),
    ):
        pytest.fail("it must not be handed over")


def test_progress_is_reported_while_waiting(tmp_path: Path) -> None:
    reports: list[tuple[str, float, str]] = []

    def progress(*what: Any) -> None:
        reports.append(what)
        if what[-1] == "thinking":
            raise Enough

    began = time.monotonic()
    with (
        pytest.raises(Enough),
        running([_spec(_HANGING)], tmp_path, timeout_s=60.0, progress=progress, progress_s=0.1),
    ):
        pytest.fail("it must not be handed over")
    name, seconds, line = reports[-1]
    assert (name, line) == ("fake", "thinking")
    assert 0 < seconds < time.monotonic() - began


@pytest.mark.parametrize("which", ["port", "side_channel_port"])
def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind((LOCALHOST, 0))
        taken.listen()
        number = taken.getsockname()[1]
        ports = {"port": free_ports(1)[0], which: number}
        engine = Engine(FakeSpec(name="late", model="none", args=(_HEALTHY,), **ports), tmp_path)
        with pytest.raises(PortInUse, match=f"late: port {number}"):
            engine.launch()
    assert engine.stop() is None
    assert not engine.log.exists()


def test_whether_a_port_is_free_elsewhere_is_not_looked_at(tmp_path: Path) -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        port = taken.getsockname()[1]
        elsewhere = ("ip", "netns", "exec", "p1")
        spec = FakeSpec(name="far", model="none", port=port, args=(_HANGING,), within=elsewhere)
        engine = Engine(spec, tmp_path)
        engine.launch()
        assert engine.stop() is not None


def test_an_engine_that_dies_later_is_noticed(tmp_path: Path) -> None:
    with Engine(_spec(_HEALTHY), tmp_path) as engine:
        engine.check_alive()
        assert engine._process is not None
        os.kill(engine.pid, signal.SIGKILL)
        give_up = time.monotonic() + 30
        while engine._process.ended() is None and time.monotonic() < give_up:
            time.sleep(0.02)
        with pytest.raises(EngineDied, match="exit status -9"):
            engine.check_alive()


def test_what_was_never_launched_is_no_running_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="never launched"):
        Engine(_spec(_HEALTHY), tmp_path).check_alive()


def test_a_library_that_does_not_load_is_missing() -> None:
    def load(_name: str) -> None:
        raise OSError("cannot open shared object file")

    assert missing_libraries(load) == CPU_LIBRARIES
    assert missing_libraries() == {}  # this machine runs engines
