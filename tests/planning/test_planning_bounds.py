"""The bounds of ``tests.throughput.planning``: what is judged there can fail.

How long a plan takes depends on the machine and is judged by ``--check`` only; how much memory
it takes does not, and is judged here, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pdconn.planning import plan_runs as runs
from pdconn.planning.plan import Need, Pairing, Plan
from pdconn.protocol.ticket import BlockList
from tests.throughput import planning as bench
from tests.throughput.planning import PlanMemory, Row, main, memory_row

GOOD = Row("plan", 10, 1.0, 1.0, 2.0)
SMALL = PlanMemory("plan", 10, 700, 700)


@pytest.mark.parametrize("layout", ["LBHNC", "BHLNC"])
@pytest.mark.parametrize("tokens", [8192, 32_768])
def test_a_plan_takes_memory_for_its_runs_and_not_for_the_cache(layout: str, tokens: int) -> None:
    row = memory_row(layout, tokens)
    assert row.holds, row


def test_a_plan_that_looks_at_the_whole_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a byte for each block of the cache, as a lookup table would take."""
    real = Pairing.plan

    def tabulating(self: Pairing, need: Need, lent: Sequence[BlockList]) -> Plan:
        seen = np.ones(max(self.lent_num_blocks), dtype=np.uint8)
        plan = real(self, need, lent)
        assert seen.all()
        return plan

    monkeypatch.setattr(Pairing, "plan", tabulating)
    row = memory_row("LBHNC", 32_768)
    assert row.growth > row.bound_growth
    assert not row.holds


def test_a_plan_that_takes_more_for_a_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every address kept a second time."""
    real, kept = runs._addresses, []

    def hoarding(*names: object) -> object:
        made = real(*names)  # type: ignore[arg-type]
        kept.append(made.astype(np.float64))
        kept.append(made.astype(np.complex128))
        return made

    monkeypatch.setattr(runs, "_addresses", hoarding)
    row = memory_row("LBHNC", 32_768)
    assert row.nbytes_per_run > row.bound_nbytes
    assert not row.holds


@pytest.mark.parametrize(
    ("row", "memory", "code"),
    [
        (GOOD, SMALL, 0),
        (Row("plan", 10, 2.1, 2.1, 2.0), SMALL, 1),
        (GOOD, PlanMemory("plan", 10, 700, 740), 1),
        (GOOD, PlanMemory("plan", 10, 740, 700), 1),
        (GOOD, PlanMemory("plan", 10, 810, 810), 1),
    ],
    ids=["all hold", "slow", "grows with the cache", "shrinks with it", "much for a run"],
)
def test_check_fails_if_a_bound_does_not_hold(
    row: Row,
    memory: PlanMemory,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "plan_row", lambda *_: row)
    monkeypatch.setattr(bench, "template_row", lambda *_: GOOD)
    monkeypatch.setattr(bench, "memory_row", lambda *_: memory)
    assert main(["--check"]) == code
    assert ("FAILS" in capsys.readouterr().out) == bool(code)
    assert main([]) == 0
