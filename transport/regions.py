"""The memories that one side has registered, and bounds checks of spans.

Every backend refuses overlapping memories, and runs that leave registered memory.  A run must lie
inside *one* memory: two adjacent memories are still two registrations, with two keys, for the
network card.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from transport.errors import BadSpans, OutOfBounds
from transport.types import U64, Device, Memory

Side = Literal["local", "remote"]


class Regions:
    """A set of memories that do not overlap, searchable by address."""

    def __init__(self, memories: Sequence[Memory] = ()) -> None:
        self._memories: list[Memory] = []
        self._bounds: dict[Device, tuple[U64, U64]] = {}
        self.add_memories(memories)

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._memories)

    def __len__(self) -> int:
        return len(self._memories)

    def __contains__(self, memory: object) -> bool:
        return memory in self._memories

    def add_memories(self, memories: Sequence[Memory]) -> None:
        """Add all ``memories``, or none of them.

        Raises:
            BadSpans: two memories overlap, among themselves or with earlier ones.
        """
        merged = sorted([*self._memories, *memories], key=lambda m: (str(m.device), m.base))
        for low, high in itertools.pairwise(merged):
            if low.device == high.device and low.end > high.base:
                raise BadSpans(f"memories overlap: {_shown(low)} and {_shown(high)}")
        self._memories = merged
        self._bounds = {device: self._bounds_of(device) for device in {m.device for m in merged}}

    def outside(
        self, side: Side, addresses: U64, nbytes: U64, device: Device
    ) -> OutOfBounds | None:
        """The error for the first run that is not inside one memory, or None.

        ``addresses`` and ``nbytes`` are uint64 of shape (n,); run i is the bytes
        ``[addresses[i], addresses[i] + nbytes[i])`` on ``device``.
        """
        if device not in self._bounds:
            return OutOfBounds(f"{side}: no memory is registered on {device}")
        bases, ends = self._bounds[device]
        home = np.searchsorted(bases, addresses, side="right") - 1
        inside = (home >= 0) & (addresses + nbytes <= ends[home])
        if inside.all():
            return None
        run = int(np.argmin(inside))
        shown = _shown(Memory(int(addresses[run]) or 1, int(nbytes[run]), device))
        return OutOfBounds(f"{side} run {run}, {shown}, lies in no registered memory")

    def _bounds_of(self, device: Device) -> tuple[U64, U64]:
        memories = [m for m in self._memories if m.device == device]
        return (
            np.array([m.base for m in memories], dtype=np.uint64),
            np.array([m.end for m in memories], dtype=np.uint64),
        )


def _shown(memory: Memory) -> str:
    return f"[{memory.base:#x}, {memory.end:#x}) on {memory.device}"
