"""Gaps are zeroed, and no byte beside them: by addresses, and by the index that a GPU is given."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pdconn.integrity.zeros import fill_tensor, fill_with_zeros
from pdconn.planning.runs import NO_GAPS, Gaps
from transport import HOST

NBYTES = 6000

RUNS = [
    ([0], [NBYTES]),
    ([5], [1]),
    ([NBYTES - 1], [1]),
    ([256, 1024, 2048], [256, 512, 256]),
    ([8, 72, 136], [32, 32, 32]),
    ([7, 110, 2999], [3, 89, 1000]),
]


def memory() -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(1, 255, NBYTES).astype(np.uint8)


def zeroed(starts: list[int], sizes: list[int]) -> NDArray[np.uint8]:
    """Byte by byte."""
    wanted = memory()
    for start, nbytes in zip(starts, sizes, strict=True):
        for at in range(start, start + nbytes):
            wanted[at] = 0
    return wanted


@pytest.mark.parametrize(("starts", "sizes"), RUNS)
def test_host_memory(starts: list[int], sizes: list[int]) -> None:
    held = memory()
    local = np.array(starts, dtype=np.uint64) + np.uint64(held.ctypes.data)
    fill_with_zeros(Gaps(local, np.array(sizes, dtype=np.uint64), HOST))
    assert (held == zeroed(starts, sizes)).all()


@pytest.mark.parametrize(("starts", "sizes"), RUNS)
def test_by_an_index(starts: list[int], sizes: list[int]) -> None:
    torch = pytest.importorskip("torch")
    held = memory()
    fill_tensor(torch.from_numpy(held), np.array(starts), np.array(sizes))
    assert (held == zeroed(starts, sizes)).all()


def test_no_gap_is_no_work() -> None:
    fill_with_zeros(NO_GAPS)
