"""How the bytes of a unit are arranged before a codec compresses them, and the way back.

A *unit* is what the heads of a rank are made of: one head's slabs in a row, as an array of shape
``(layers, tokens, 2, head size)`` of uint16 (bfloat16, float16) or uint8 (float8 e4m3).

A number is split into its *exponent plane*, which compresses, and the *rest*, whose bits are
close to random and are kept as they are::

    bfloat16        s eeeeeeee mmmmmmm     plane eeeeeeee    rest mmmmmmms
    float16         s eeeee mmmmmmmmmm     plane eeeeemmm    rest mmmmmmms
    float8 e4m3     s eeee mmm             plane eeee        rest smmm       two of them a byte
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Unit = NDArray[Any]
Bytes = NDArray[Any]
"""Of uint8."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A unit taken apart: a codec compresses ``coded``; ``kept`` stay as they are."""

    coded: tuple[NDArray[Any], ...]
    kept: tuple[NDArray[Any], ...]


class Arrangement(Protocol):
    """Takes a unit apart without loss."""

    def split(self, unit: Unit) -> Parts:
        """The parts of ``unit``."""
        ...

    def join(self, coded: Sequence[bytes], kept: Sequence[NDArray[Any]], like: Unit) -> Unit:
        """The unit of these parts, of the shape and dtype of ``like``."""
        ...


class AsStored:
    """The bytes as they lie in a row."""

    def split(self, unit: Unit) -> Parts:
        """All of it is coded."""
        return Parts((unit,), ())

    def join(self, coded: Sequence[bytes], kept: Sequence[NDArray[Any]], like: Unit) -> Unit:
        """The bytes that a codec has given back."""
        return np.frombuffer(coded[0], like.dtype).reshape(like.shape)


class Order(StrEnum):
    """In which order the exponent plane is given to the codec."""

    TOKENS = "planes"
    CHANNELS = "planes, channels outermost"
    DELTA = "planes, difference from the token before"
    BITS = "bit planes of the exponents"


@dataclass(frozen=True, slots=True)
class Planes:
    """Exponents apart from the rest; they alone are coded."""

    order: Order

    def split(self, unit: Unit) -> Parts:
        """The plane in ``order``, and the rest."""
        plane, rest = split_number(unit)
        width = 4 if unit.dtype == np.uint8 else 8
        if self.order is Order.CHANNELS:
            plane = np.ascontiguousarray(plane.transpose(0, 2, 3, 1))
        elif self.order is Order.DELTA:
            before, plane = plane, plane.copy()
            plane[:, 1:] -= before[:, :-1]
            plane &= (1 << width) - 1
        if self.order is Order.BITS:
            coded = tuple(np.packbits((plane >> bit) & 1) for bit in range(width))
        else:
            coded = (_paired(plane) if width == 4 else plane,)
        return Parts(coded, (_paired(rest) if width == 4 else rest,))

    def join(self, coded: Sequence[bytes], kept: Sequence[NDArray[Any]], like: Unit) -> Unit:
        """The inverse of :meth:`split`."""
        width = 4 if like.dtype == np.uint8 else 8
        parts = [np.frombuffer(part, np.uint8) for part in coded]
        if self.order is Order.BITS:
            plane: Bytes = np.zeros(like.size, np.uint8)
            for bit, packed in enumerate(parts):
                plane |= np.unpackbits(packed, count=like.size) << bit
        else:
            plane = _unpaired(parts[0]) if width == 4 else parts[0]
        layers, tokens, two, size = like.shape
        if self.order is Order.CHANNELS:
            plane = plane.reshape(layers, two, size, tokens).transpose(0, 3, 1, 2)
        plane = plane.reshape(like.shape)
        if self.order is Order.DELTA:
            plane = np.cumsum(plane, axis=1, dtype=np.uint8) & ((1 << width) - 1)
        rest = _unpaired(kept[0]) if width == 4 else kept[0]
        return join_number(plane, rest.reshape(like.shape), like.dtype)


def split_number(unit: Unit) -> tuple[Bytes, Bytes]:
    """Exponent plane and rest of each number, one byte each."""
    if unit.dtype == np.uint8:
        return (unit >> 3) & 15, ((unit >> 4) & 8) | (unit & 7)
    turned: Unit = (unit << 1) | (unit >> 15)
    return (turned >> 8).astype(np.uint8), turned.astype(np.uint8)


def join_number(plane: Bytes, rest: Bytes, dtype: np.dtype[Any]) -> Unit:
    """The inverse of :func:`split_number`."""
    if dtype == np.uint8:
        narrow: Unit = ((rest & 8) << 4) | (plane << 3) | (rest & 7)
        return narrow
    turned: Unit = (plane.astype(np.uint16) << 8) | rest
    wide: Unit = (turned >> 1) | (turned << 15)
    return wide


def _paired(nibbles: Bytes) -> Bytes:
    flat = nibbles.reshape(-1)
    half = flat.size // 2
    pairs: Bytes = flat[:half] | (flat[half:] << 4)
    return pairs


def _unpaired(pairs: Bytes) -> Bytes:
    return np.concatenate((pairs & 15, pairs >> 4))


ARRANGEMENTS: dict[str, Arrangement] = {
    "as stored": AsStored(),
    **{order.value: Planes(order) for order in Order},
}
"""By the names of the table."""
