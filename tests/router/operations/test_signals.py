"""What signals do to ``pdconn proxy``, a process of its own."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdconn.router.access.api_keys import EngineKey
from pdconn.router.fleet.sources import FleetWatch, WatchedFile
from pdconn.router.reload import Reloader
from tests.fakes.event_loop import in_loop

PDCONN = [sys.executable, "-m", "pdconn.tools.cli.main"]
WORDS = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")


class Proxy:
    """The process; its events come one by one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def proxy(*words: str) -> Iterator[Proxy]:
    command = [*PDCONN, "proxy", *words, "--port", "0", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Proxy(process)
        finally:
            process.kill()


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def engine(number: int) -> str:
    return f'[[engine]]\nurl = "http://127.0.0.1:{number}"\nroles = ["prefill", "decode"]\n'


def engines(listening: dict[str, Any]) -> list[str]:
    _, page = get(listening["admin_url"] + "/debug/state")
    return [one["engine"] for one in page["engines"]]


def test_sighup_reads_the_fleet_again_and_a_mistake_changes_nothing(tmp_path: Path) -> None:
    """It killed the router, with all streams and without draining."""
    path = tmp_path / "fleet.toml"
    path.write_text(engine(1), encoding="utf-8")
    with proxy("--fleet", str(path)) as one:
        listening = one.event()
        path.write_text(engine(1) + engine(2), encoding="utf-8")
        one.process.send_signal(signal.SIGHUP)
        assert one.event() == {"event": "reloaded", "mistakes": []}
        assert engines(listening) == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        path.write_text("[[engine]", encoding="utf-8")
        for _ in range(2):  # the second time too, though the watch has said it once
            one.process.send_signal(signal.SIGHUP)
            event = one.event()
            assert event["event"] == "reload_failed"
            [mistake] = event["mistakes"]
            assert mistake.startswith(f"{path}: expected TOML")
        assert engines(listening) == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        one.process.send_signal(signal.SIGTERM)
        assert one.event()["event"] == "draining"
        assert one.process.wait(timeout=60) == 0


@in_loop
async def test_what_was_not_reloaded_is_not_called_reloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(engine(1), encoding="utf-8")
    caplog.set_level(logging.INFO, "pdconn.router.reload")
    async with FleetWatch([WatchedFile(path)], lambda members: None) as watch:
        reloader = Reloader(str(path), watch, None, EngineKey(None), None)
        assert await reloader.reload_all() == ()
        assert [record.getMessage()[:16] for record in caplog.records] == ["pdconn: reloaded"]
        caplog.clear()
        path.write_text("[[engine]", encoding="utf-8")
        assert len(await reloader.reload_all()) == 1
    mine = [one for one in caplog.records if one.name == "pdconn.router.reload"]
    assert [one.levelname for one in mine] == ["ERROR", "WARNING"]
    assert "reloaded in part engines=1" in mine[1].getMessage()


def test_sighup_during_the_wait_does_not_end_it() -> None:
    with proxy(*WORDS, "--wait", "60") as one:
        assert one.event()["event"] == "waiting"
        one.process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            one.process.wait(timeout=0.5)
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(timeout=60) == 0


@pytest.mark.parametrize(("command", "code"), [("proxy", 0), ("plan", -signal.SIGHUP)])
def test_sighup_is_harmless_before_the_proxy_runs_and_ends_other_commands(
    command: str, code: int
) -> None:
    """The proxy's modules take some tenths of a second to load."""
    text = f"""
import os, signal
from pdconn.tools.cli.main import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)
try:
    main([{command!r}, "--help"])
finally:
    os.kill(os.getpid(), signal.SIGHUP)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], check=False, stdout=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode == code


def test_sigterm_first_ends_readiness_and_then_the_listener() -> None:
    with proxy(*WORDS, "--drain-delay", "2") as one:
        listening = one.event()
        url = listening["url"]
        assert get(url + "/livez") == (200, {"status": "ok"})
        one.process.send_signal(signal.SIGTERM)
        assert one.event()["drain_delay_s"] == 2
        began_s = time.monotonic()
        for _ in range(100):
            if (found := get(url + "/readyz"))[1]["status"] == "draining":
                break
        assert found == (503, {"status": "draining"})
        assert get(url + "/livez") == (200, {"status": "ok"})
        assert one.process.wait(timeout=60) == 0
        assert time.monotonic() - began_s > 1.5


def test_a_second_sigterm_ends_it_at_once() -> None:
    with proxy(*WORDS, "--drain-delay", "60") as one:
        one.event()
        one.process.send_signal(signal.SIGTERM)
        assert one.event()["event"] == "draining"
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(timeout=30) == -signal.SIGTERM
