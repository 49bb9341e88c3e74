"""Every layout pulls from every other, whole heads and slices of them, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes.layouts import LAYOUTS
from tests.gpu.cases import Case, Request
from tests.gpu.rigs import DeviceLender
from tests.gpu.test_pulls import pulled
from transport import Device

_NEXT = dict(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True))
SLICES = [(1, 1), (4, 1), (1, 4), (2, 4), (4, 2)]
"""Ranks of theirs and of ours; the model has four heads."""

CASES = [Case(layout, layout, *tp) for layout in LAYOUTS for tp in SLICES] + [
    Case(theirs, ours, *tp) for theirs, ours in _NEXT.items() for tp in ((1, 1), (4, 2), (1, 4))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_arrives_whatever_the_layout_and_the_slice(
    case: Case, lender: DeviceLender, device: Device
) -> None:
    ranks, _ = lender.lend(case)
    request = Request.of(case)
    for _, rank, ours, _ in pulled(case, ranks, device):
        wrong = np.flatnonzero(ours != request.expected(rank))
        assert not len(wrong), f"rank {rank}: {len(wrong)} bytes are wrong, first {wrong[0]}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_read_as_another_is_noticed(layout: str) -> None:
    """Negative control: the same request in another layout holds other bytes at most places."""
    ours = Request.of(Case(layout, layout, 1, 1)).expected(0)
    other = Request.of(Case(layout, _NEXT[layout], 1, 1)).expected(0)
    assert (ours != other).any()
