"""Every route that vLLM has is served, or kept from clients on purpose."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdconn.router.openai.passed import PASSED
from pdconn.router.openai.requests import Route
from tests.router.openai.test_passed import ADMIN

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

OWN = {"GET /v1/models", "GET /health"}
"""The router's own."""
WEBSOCKETS = {"WEBSOCKET /metrics", "WEBSOCKET /v1/realtime"}
"""The first is Prometheus' page, mounted for anything."""


def known(line: str) -> str:
    """A route of ours as vLLM writes it."""
    return re.sub(r"\{id:.*?\}", "{response_id}", line)


def test_every_route_of_vllm_is_in_one_list_and_no_other() -> None:
    """A route that a new vLLM adds is in none: decide where it belongs."""
    script = Path(__file__).with_name("vllm_routes.py")
    printed = subprocess.run([sys.executable, script], capture_output=True, check=True, text=True)
    [line] = re.findall(r"^ROUTES (.*)$", printed.stdout, re.MULTILINE)
    found = {re.sub(r"\{adapter_name\}", "a", route) for route in json.loads(line)}
    assert len(found) > 60
    served = {f"POST {route.path}" for route in Route}
    served |= {known(f"{route.method} {route.path}") for route in PASSED}
    lists = [served, OWN, WEBSOCKETS, set(ADMIN)]
    assert sum(map(len, lists)) == len(set.union(*lists)), "a route is in two lists"
    assert found - set.union(*lists) == set(), "routes that are in no list"
    assert served - found == set(), "routes that vLLM has not"
    assert set(ADMIN) - found == set()
