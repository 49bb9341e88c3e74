"""The compiled part of the index, built from ``module.cpp``."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

INTERFACE: int
HAS_SHA: int
"""Whether this processor has instructions for SHA-256."""

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

def token_ids(json: Buffer, /) -> array[int] | None:
    """The integers of a JSON array, of type ``i``; None if it holds anything else."""

def hash_blocks(
    is_cbor: bool,
    parent: bytes,
    tokens: NDArray[np.int32],
    block_tokens: int,
    is_portable: bool,
    /,
) -> bytes:
    """SHA-256 digests of whole blocks without extra keys, of 32 bytes each, one after the other.

    ``tokens`` are at least 0, and ``block_tokens`` at most 8192.  ``is_portable``: without the
    processor's instructions.
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
