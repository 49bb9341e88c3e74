"""Every route that vLLM has is served, or kept from clients on purpose."""

from __future__ import annotations

import json
import os
import re
import select
import sys
from pathlib import Path

from pdconn.router.openai.passed import PASSED
from pdconn.router.openai.requests import Route
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import ForkedProcess
from tests.router.openai.test_passed import ADMIN

OWN = {"GET /v1/models", "GET /health"}
"""The router's own."""
WEBSOCKETS = {"WEBSOCKET /metrics", "WEBSOCKET /v1/realtime"}
"""The first is Prometheus' page, mounted for anything."""


def known(line: str) -> str:
    """A route of ours as vLLM writes it."""
    return re.sub(r"\{id:.*?\}", "{response_id}", line)


class RoutesProcess(ForkedProcess):
    """Prints the routes, forked from what engines are forked from: it has imported vLLM."""

    module = "tests.vllm.engines.routing.vllm_routes"


def test_every_route_of_vllm_is_in_one_list_and_no_other(tmp_path: Path) -> None:
    """A route that a new vLLM adds is in none: decide where it belongs."""
    log = tmp_path / "routes.log"
    command = [sys.executable, "-m", RoutesProcess.module]
    spec = EngineSpec("routes", tmp_path, 0, one_process=True)
    env = spec.environment(os.environ, tmp_path)  # what an engine has, or it could not be forked
    with RoutesProcess("routes", command, log, env=env) as printing:
        assert printing.forked
        end = os.pidfd_open(printing.pid)
        assert select.select([end], [], [], 120.0)[0], "it has not ended"
        os.close(end)
    printed = log.read_text(encoding="utf-8")
    found_lines = re.findall(r"^ROUTES (.*)$", printed, re.MULTILINE)
    assert found_lines, printed[-2000:]
    [line] = found_lines
    found = {re.sub(r"\{adapter_name\}", "a", route) for route in json.loads(line)}
    assert len(found) > 60
    served = {f"POST {route.path}" for route in Route}
    served |= {known(f"{route.method} {route.path}") for route in PASSED}
    lists = [served, OWN, WEBSOCKETS, set(ADMIN)]
    assert sum(map(len, lists)) == len(set.union(*lists)), "a route is in two lists"
    assert found - set.union(*lists) == set(), "routes that are in no list"
    assert served - found == set(), "routes that vLLM has not"
    assert set(ADMIN) - found == set()
