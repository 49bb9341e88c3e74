"""``examples/own_engine.py``: two engines that are not vLLM hand over hybrid KV, or say why not."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from pdconn.protocol.ticket import BlockList, Ticket, prompt_digest
from tests.examples.forked import EXAMPLE, ROOT

TRANSPORTS = {"nixl": "nixl", "ucx": "ucxx"}
"""Those of the example, and the modules that they load."""

ROW = 4 * 64 * 2
"""Bytes of a token in a group: heads, content, layers."""

ANOTHER = Ticket(
    "prefill", "boot", "r-1", "127.0.0.1", 1, 1024, prompt_digest([*range(1, 1025)]),
    (BlockList(0, tuple(range(1, 65))), BlockList(56, tuple(range(65, 73)))),
)  # fmt: skip
"""As long as the example's, and of other tokens."""


@pytest.fixture(scope="module")
def ended() -> dict[str, dict[str, Any]]:
    """How each case ended, by name; one process imports torch for all of them."""
    cases: dict[str, dict[str, Any]] = {
        name: {"lend": ["--transport", name], "pull": ["--transport", name]}
        for name, module in TRANSPORTS.items()
        if importlib.util.find_spec(module) is not None
    }
    cases["corrupt"] = {"lend": ["--corrupt"], "pull": []}
    cases["another prompt"] = {"ticket": json.dumps(ANOTHER.to_params(1, 1)), "pull": []}
    command = [sys.executable, "-m", "tests.examples.forked", json.dumps(list(cases.values()))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_what_the_next_token_sees_is_pulled_and_every_byte_of_it_is_right(
    transport: str, ended: dict[str, dict[str, Any]]
) -> None:
    if transport not in ended:
        pytest.skip(f"{transport} is not installed")
    case = ended[transport]
    assert (case["pull"], case["lend"]) == (0, 0), case["stderr"]
    assert case["stderr"].count(f"transport {transport} (as configured)") == 2
    printed = (
        f"pulled {1024 * ROW} bytes of full attention, {128 * ROW} of the window\n"
        f"{(1024 - 128) * ROW} before it were not needed; wrong bytes: 0\n"
    )
    assert case["stdout"] == printed
    assert printed in (ROOT / "docs/api.md").read_text(encoding="utf-8")


def test_a_byte_that_changed_after_it_was_lent_is_refused(ended: dict[str, dict[str, Any]]) -> None:
    """Negative control."""
    case = ended["corrupt"]
    assert case["pull"] == 1
    assert "Corrupted: sum of what was read from rank 0" in case["stderr"]
    assert case["stdout"] == ""


def test_a_ticket_for_another_prompt_is_refused_before_anything_is_connected(
    ended: dict[str, dict[str, Any]],
) -> None:
    """Negative control.  The lender that it names does not exist."""
    case = ended["another prompt"]
    assert case["pull"] == 1
    expected = f"pdconn.prompt: expected {prompt_digest([*range(1024)])}, got '{ANOTHER.prompt}'"
    assert expected in case["stderr"].splitlines()[-1]
    assert "transport nixl" not in case["stderr"]
    assert "transport ucx" not in case["stderr"]


def test_a_newcomer_reads_it_at_once_and_needs_no_private_name() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imported = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert not [name for name in imported if any(p.startswith("_") for p in name.split("."))]
    assert not [name for name in imported if name.startswith(("pdconn.vllm", "vllm"))]
    names = [node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    assert not [name for name in names if name.startswith("_")]
    assert {name.partition(".")[0] for name in imported} >= {"pdconn", "registration", "transport"}
