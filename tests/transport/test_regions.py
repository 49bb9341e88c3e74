from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import BadSpans
from transport.regions import Regions
from transport.types import HOST, Device, Memory

GPU = Device("cuda", 1)


def _outside(regions: Regions, address: int, nbytes: int, device: Device = HOST) -> bool:
    one, length = np.array([address], np.uint64), np.array([nbytes], np.uint64)
    return regions.outside("local", one, length, device) is not None


@given(
    bases=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    runs=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 30)), min_size=1, max_size=20),
)
def test_a_run_is_inside_when_one_memory_holds_all_its_bytes(
    bases: list[int], runs: list[tuple[int, int]]
) -> None:
    memories = [Memory(base * 10 + 5, 10) for base in bases]
    regions = Regions(memories)
    inside = [any(m.base <= a and a + n <= m.end for m in memories) for a, n in runs]
    columns = np.array(runs, dtype=np.uint64).T.copy()
    error = regions.outside("remote", columns[0], columns[1], HOST)
    assert (error is None) == all(inside)
    if error is not None:
        assert f"remote run {inside.index(False)}, " in str(error)


def test_a_run_does_not_cross_from_one_memory_to_the_next() -> None:
    regions = Regions([Memory(100, 50), Memory(150, 50)])
    assert not _outside(regions, 100, 50)
    assert not _outside(regions, 150, 50)
    assert _outside(regions, 140, 20)


def test_memories_on_two_devices_do_not_meet() -> None:
    regions = Regions([Memory(100, 50)])
    regions.add_memories([Memory(100, 50, GPU)])
    assert len(regions) == 2
    assert Memory(100, 50, GPU) in regions
    assert _outside(regions, 100, 50, Device("cuda", 0))


def test_overlapping_memories_are_refused_and_none_is_kept() -> None:
    regions = Regions([Memory(100, 50)])
    with pytest.raises(BadSpans, match=r"\[0x64, 0x96\) on cpu:0 and \[0x95, 0x96\)"):
        regions.add_memories([Memory(200, 10), Memory(149, 1)])
    assert list(regions) == [Memory(100, 50)]
    regions.add_memories([Memory(150, 10), Memory(90, 10)])  # neighbours do not overlap
    assert len(regions) == 3
