"""Transports that carried READs: read from what UCX printed, and from a probe of two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli.main import main
from pdconn.tools.doctor.local.used import used_transports
from tests.tools.doctor.healthy import ids

STAMP = "[1795547200.163707] [host:3027 :1]   "


HEAD = "| Count | Range | Description | Config |"


def table(operation: str, rows: list[str], head: str = HEAD) -> str:
    """As UCX 1.23 prints one; ``rows`` are its last lines."""
    rule = "+-------+--------+-------------+------------+"
    name = "| decode-0 intra-node cfg#1 |"
    lines = [rule, name, f"| {operation} |", rule, head, rule, *rows, rule]
    return "".join(f"{STAMP}{line}\n" for line in lines)


READ = "remote memory read by ucp_get*(multi) into host memory from host"
CMA = "|   546 | 0..inf | zero-copy   | cma/memory |"
TCP = "|     4 | 0..64  | software emulation | tcp/eth0 |"


def counts(text: str) -> tuple[tuple[str, int], ...]:
    return used_transports("log", text.splitlines()).counts


def test_reads_are_added_up_by_transport_over_all_connections() -> None:
    text = "a line of vLLM\n" + table(READ, [CMA, TCP]) + "another\n" + table(READ, [CMA])
    assert counts(text) == (("zero-copy cma/memory", 1092), ("software emulation tcp/eth0", 4))


@pytest.mark.parametrize(
    "text",
    [
        "",
        table("tagged message by ucp_tag_send*() from host memory", [CMA]),
        table(READ, ["| 0..inf | zero-copy | cma/memory |"], "| Range | Description | Config |"),
        table(READ, ["|     0 | 0..inf | zero-copy | cma/memory |"]),
        table(READ, []) + table("remote memory write by ucp_put*(multi)", [CMA]),
    ],
)
def test_what_is_no_count_of_reads_is_not_taken_for_one(text: str) -> None:
    assert counts(text) == ()


def ask(log: Path, capsys: Any) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--no-local", "--json", "--ucx-log", str(log)])
    return code, json.loads(capsys.readouterr().out)


def test_the_log_of_an_engine_tells_by_what_it_has_read(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "ucx.log"
    log.write_text(table(READ, [CMA]), encoding="utf-8")
    code, document = ask(log, capsys)
    assert (code, ids(document)) == (0, [])
    assert document["checks"][0]["seen"] == [f"{log}: UCX read by zero-copy cma/memory (546)"]


def test_a_log_without_counts_is_said_to_tell_nothing(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "ucx.log"
    log.write_text("nothing of UCX\n", encoding="utf-8")
    code, document = ask(log, capsys)
    assert (code, ids(document)) == (0, ["ucx-log.silent"])
    assert "export UCX_PROTO_INFO=used" in document["findings"][0]["remedy"]


def test_a_log_that_is_not_there_is_a_wrong_command_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["doctor", "--no-local", "--ucx-log", str(tmp_path / "gone")]) == 2
    assert "--ucx-log: expected a file to read" in capsys.readouterr().err
