"""The compiled part of the index, built from ``module.cpp``."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

def decode(
    payload: bytes,
    stored: Callable[..., object],
    removed: Callable[..., object],
    cleared: object,
    raw: Callable[[memoryview], object],
    /,
) -> tuple[float, list[object], int | None] | None:
    """Time, events and rank of a batch that is as vLLM writes it; None leaves it to Python.

    ``stored`` and ``removed`` are called with the fields of ``Stored`` and ``Removed`` in order.
    """

class HeldBlocks:
    """As :class:`pdconn.router.prefix.held_blocks.HeldBlocks`."""

    @property
    def num_hashes(self) -> int: ...
    @property
    def num_words(self) -> int: ...
    def add_word(self) -> None: ...
    def add_plane(self) -> int: ...
    def drop_plane(self, plane: int, /) -> None: ...
    def store(
        self,
        place: int,
        plane: int,
        hashes: Sequence[int],
        room: int,
        counts_copies: bool,
        /,
    ) -> tuple[int, int]: ...
    def remove(self, place: int, plane: int, hashes: Sequence[int], /) -> tuple[int, int]: ...
    def clear(self, place: int, /) -> dict[int, int]: ...
    def num_copies(self, place: int, /) -> int: ...
    def slots_of(self, hashes: Sequence[int], /) -> bytes: ...
    def leading_slots_of(self, hashes: Sequence[int], /) -> bytes: ...
    def held(self, plane: int, word: int, slots: NDArray[np.intp], /) -> bytes: ...
