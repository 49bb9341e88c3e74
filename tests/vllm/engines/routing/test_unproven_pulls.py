"""A decode engine that alone has ``verify: always``: its pulls fail, and its answers are good.

Prefill makes no checksums, so nothing proves what was read, and decode computes the prompt.
Beside it runs a decode engine that pulls.  The router and doctor name the one that does not, and
why.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.proxy import admin_url, running_proxy
from tests.forked.engines import running
from tests.vllm.engines.engines import Configuration, cache_beside, engine

pytestmark = pytest.mark.matrix
CONFIGURATION = Configuration("LBHNC", False, one_process=True, policy="recompute")


@dataclass(frozen=True)
class Fleet:
    """The engines, and a warmed-up proxy over them."""

    prefill: Engine
    proven: Engine
    unproven: Engine
    url: str
    log: Path

    def logged(self, text: str, seconds: float = 30.0) -> str:
        """The first line of the proxy's log with ``text``."""
        give_up_s = time.monotonic() + seconds
        while True:
            lines = self.log.read_text(encoding="utf-8").splitlines()
            found = [line for line in lines if text in line]
            if found or time.monotonic() > give_up_s:
                assert found, "\n".join(lines)
                return found[0]
            time.sleep(0.1)

    def page(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{admin_url(self.url)}/debug/state", timeout=10) as reply:
            return dict(json.load(reply))


@pytest.fixture(scope="module")
def fleet(model: Path, work: Path) -> Iterator[Fleet]:
    directory = work / "unproven"
    specs = [
        engine("prefill", model, CONFIGURATION, "kv_producer", 0),
        engine("proven", model, CONFIGURATION, "kv_consumer", 1),
        engine("unproven", model, CONFIGURATION, "kv_consumer", 1, verify="always"),
    ]
    with running(specs, directory, cache=cache_beside(model)) as (prefill, proven, unproven):
        decode = [proven.url, unproven.url]
        args = ["--warm-up", "20", "--policy", "round-robin"]
        with running_proxy([prefill.url], decode, directory, args=args) as url:
            yield Fleet(prefill, proven, unproven, url, directory / "proxy.log")


def test_only_the_pair_that_pulls_is_warm(fleet: Fleet) -> None:
    assert "pairs=1 of=2" in fleet.logged("warmed up")
    line = fleet.logged("not warm")
    assert fleet.unproven.url in line
    assert "without checksums to compare" in line


def test_the_log_and_the_page_name_the_engine_whose_pulls_fail(fleet: Fleet) -> None:
    client = Client(fleet.url)
    for number in range(8):
        client.complete([7 + number, *range(10, 200)], 4)
    line = fleet.logged("pulls fail engine=")
    assert fleet.unproven.url in line
    assert "without checksums to compare" in line
    shown = {one["engine"]: one["pulls"] for one in fleet.page()["engines"]}
    failing = shown[fleet.unproven.url]
    assert failing["failed"] == failing["tried"] > 0
    assert shown[fleet.proven.url]["failed"] == 0
    assert shown[fleet.proven.url]["tried"] > 0, "control"


def test_doctor_names_the_cause_that_the_metric_names(fleet: Fleet) -> None:
    words = [sys.executable, "-m", "pdconn.tools.cli.main", "doctor", "--json"]
    words += ["--prefill", fleet.prefill.url]
    words += ["--decode", fleet.proven.url, fleet.unproven.url]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    findings = json.loads(done.stdout)["findings"]
    (found,) = [one for one in findings if one["id"] == "traffic.failed"]
    assert found["subject"] == fleet.unproven.url
    assert "without checksums to compare" in found["message"]
    assert '"verify" on prefill' in found["remedy"]
