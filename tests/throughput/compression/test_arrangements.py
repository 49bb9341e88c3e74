"""Every arrangement gives back the bytes it was given, whatever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.throughput.compression import four_bits
from tests.throughput.compression.arrangements import ARRANGEMENTS, Arrangement, Parts, Unit
from tests.throughput.compression.four_bits import FourBits

_ALL = {**ARRANGEMENTS, "exponents in 4 bits": FourBits()}


@st.composite
def units(draw: st.DrawFn, dtype: type) -> Unit:
    """Any bits, or numbers of a few exponents with any bits here and there; one or many groups."""
    shape = draw(st.sampled_from([(1, 16, 2, 32), (3, 32, 2, 64), (2, 256, 2, 512)]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    noise = rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    usual: Unit = rng.normal(size=shape).astype(np.float32).view(np.uint32) >> np.uint32(16)
    odd = rng.random(shape) < draw(st.sampled_from([0.0, 0.001, 0.1, 1.0]))
    return np.where(odd, noise, usual.astype(dtype))


def _there_and_back(arrangement: Arrangement, unit: Unit) -> Unit:
    parts = arrangement.split(unit)
    return arrangement.join([part.tobytes() for part in parts.coded], parts.kept, unit)


@pytest.mark.parametrize("name", _ALL)
@given(st.data())
def test_every_arrangement_is_lossless(name: str, data: st.DataObject) -> None:
    wide_only = name == "exponents in 4 bits"
    dtype = data.draw(st.sampled_from([np.uint16] if wide_only else [np.uint16, np.uint8]))
    unit = data.draw(units(dtype))
    found = _there_and_back(_ALL[name], unit)
    assert found.dtype == unit.dtype
    assert np.array_equal(found, unit)


def test_exponents_outside_of_the_sixteen_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the law above: a version that forgets escapes loses numbers."""
    unit = np.full((1, 16, 2, 32), 0x3F80, np.uint16)
    unit[0, 3, 1, 7] = 0x0001
    assert np.array_equal(_there_and_back(FourBits(), unit), unit)
    monkeypatch.setattr(four_bits, "_escapes", lambda flat: np.empty(0, np.int64))
    assert not np.array_equal(_there_and_back(FourBits(), unit), unit)


def test_four_bits_take_three_quarters_and_six_bytes_an_escape() -> None:
    unit = np.full((2, 16, 2, 32), 0x3F80, np.uint16)
    unit[1, 0, 0, :5] = 0x0001
    kept: tuple[NDArray[Any], ...] = FourBits().split(unit).kept
    assert sum(part.nbytes for part in kept) == unit.nbytes * 3 // 4 + 2 * len(unit) + 6 * 5


def test_planes_keep_the_exponent_apart() -> None:
    """Numbers that differ in sign and mantissa alone have one exponent byte."""
    signs = np.array([0x3F80, 0xBF80, 0x3FFF, 0xBFC1] * 16, np.uint16).reshape(1, 4, 2, 8)
    parts: Parts = ARRANGEMENTS["planes"].split(signs)
    assert set(parts.coded[0].reshape(-1).tolist()) == {0x7F}


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="expected uint16"):
        FourBits().split(np.zeros((1, 16, 2, 32), np.uint8))
