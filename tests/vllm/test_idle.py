"""An idle connector costs next to nothing, and a stopped engine leaves nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pdconn.lab.client import prefill_only, prefill_then_decode
from pdconn.lab.keeper import descendants
from tests.vllm.engines import PdPair

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SECONDS = 8.0


def used_s(pid: int) -> float:
    """Processor time of a process and all below it, in seconds."""
    total = 0.0
    for each in {pid, *descendants(pid)}:
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return total


def share_of_a_core(pids: list[int], seconds: float = _SECONDS) -> float:
    """What processes use while nothing is asked of them."""
    before = sum(map(used_s, pids))
    time.sleep(seconds)
    return (sum(map(used_s, pids)) - before) / seconds


@pytest.mark.only(layout="BHLNC")
def test_idle_engines_take_under_a_twentieth_of_a_core(pair: PdPair) -> None:
    """Connected engines, all of their processes: an upper bound for the connector's share."""
    prefill_then_decode(pair.prefill, pair.decode, tuple(range(300, 500)), 1)
    time.sleep(1.0)
    for engine in (pair.prefill_engine, pair.decode_engine):
        assert share_of_a_core([engine.pid]) < 0.05, engine.spec.name


@pytest.mark.only(layout="BHLNC", prefix_caching=True)
def test_an_engine_that_lends_idles_too(pair: PdPair) -> None:
    """While blocks are lent nobody steps; the control is the work of one prompt."""
    prefill_only(pair.prefill, tuple(range(300, 900)))
    time.sleep(1.0)
    assert share_of_a_core([pair.prefill_engine.pid]) < 0.05
    before = used_s(pair.prefill_engine.pid)
    for number in range(10):
        prefill_only(pair.prefill, tuple(range(300 + number, 1500)))
    assert used_s(pair.prefill_engine.pid) - before > 0.05 * _SECONDS
