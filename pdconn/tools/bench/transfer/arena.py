"""Memory like an engine's, on pages of a chosen size, filled with a pattern.

In a lender's arena no two words of the pattern are equal, within an arena and between arenas of
different seeds.  A reader can compute any part of it, so arrived bytes are verified without
fetching them a second time.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdconn.tools.bench.bench_errors import BenchError
from pdconn.tools.bench.interrupts import raise_noted
from transport import Memory, Spans
from transport.closing import Closing
from transport.hugepages import HUGE_PAGE_BYTES

_WORD = 8
_CHUNK_WORDS = 1 << 20
_CHECKED_RUNS = 4096


class BenchMemory(Closing):
    """``nbytes`` bytes aligned to 2 MiB, with every page touched.

    Raises:
        BenchError: there is too little memory.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool) -> None:
        whole = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            # Private: the kernel gives no huge pages to shared anonymous memory.
            self._map = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
        except OSError as error:
            raise BenchError(f"cannot allocate {whole:,} bytes of memory: {error}") from error
        self._map.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        held = ctypes.c_char.from_buffer(self._map)
        start = ctypes.addressof(held)
        del held  # a map with a view on it cannot be closed
        skip = -start % HUGE_PAGE_BYTES
        self.memory = Memory(start + skip, nbytes)
        self._words: NDArray[np.uint64] | None = np.frombuffer(
            self._map, np.uint64, whole // _WORD, skip
        )
        self._taken = 0
        self.blank()

    def take_tensor(self, nbytes: int) -> Any:
        """The next ``nbytes`` bytes as an int8 tensor, which must not outlive the memory.

        Raises:
            BenchError: fewer bytes are left.
        """
        import torch

        begin, self._taken = self._taken, self._taken + nbytes
        if self._taken > self.memory.nbytes:
            left = self.memory.nbytes - begin
            raise BenchError(f"memory: expected at most {left:,} bytes more, got {nbytes:,}")
        assert self._words is not None
        return torch.from_numpy(self._words.view(np.int8)[begin : self._taken])

    def blank(self) -> None:
        """Set every byte to 0xEE, which is unlikely in a pattern."""
        assert self._words is not None
        for first in range(0, len(self._words), _CHUNK_WORDS):
            raise_noted()
            self._words[first : first + _CHUNK_WORDS] = np.uint64(0xEEEEEEEEEEEEEEEE)

    def fill(self, seed: int) -> None:
        """Write the pattern of ``seed``."""
        assert self._words is not None
        for first in range(0, len(self._words), _CHUNK_WORDS):
            raise_noted()  # here no view is left that would keep the map from closing
            count = min(_CHUNK_WORDS, len(self._words) - first)
            self._words[first : first + count] = _pattern(seed, first, count)

    def wrong_bytes(self, spans: Spans, source: Memory, seed: int) -> int:
        """The number of bytes of ``spans`` that differ from the arena of ``seed`` at ``source``.

        At most 4096 runs are compared, spread evenly.
        """
        step = -(-len(spans) // _CHECKED_RUNS) or 1
        return sum(
            self._wrong_in(int(local), int(remote) - source.base, int(nbytes), seed)
            for local, remote, nbytes in zip(
                spans.local[::step], spans.remote[::step], spans.nbytes[::step], strict=True
            )
        )

    def close(self) -> None:
        """Free the memory."""
        self._words = None
        self._map.close()

    def _wrong_in(self, local: int, offset: int, nbytes: int, seed: int) -> int:
        chunk, wrong = _CHUNK_WORDS * _WORD, 0
        for done in range(0, nbytes, chunk):
            raise_noted()
            count = min(chunk, nbytes - done)
            wrong += self._wrong_in_chunk(local + done, offset + done, count, seed)
        return wrong

    def _wrong_in_chunk(self, local: int, offset: int, nbytes: int, seed: int) -> int:
        assert self._words is not None
        first = offset // _WORD
        last = -(-(offset + nbytes) // _WORD)
        expected = _pattern(seed, first, last - first).view(np.uint8)[offset - first * _WORD :]
        at = local - self.memory.base
        seen = self._words.view(np.uint8)[at : at + nbytes]
        return int((seen != expected[:nbytes]).sum())


def copy(target: Memory, source: Memory, nbytes: int) -> None:
    """One memcpy of ``nbytes`` bytes, without holding the GIL."""
    ctypes.memmove(target.base, source.base, nbytes)


def _pattern(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Words ``first`` to ``first + count`` of the pattern of ``seed``.

    SplitMix64 of the words' numbers (Steele, Lea and Flood, OOPSLA 2014): each bit of a number
    flips half the bits of its word, so that single bytes differ too, not only words.
    """
    words = np.arange(first, first + count, dtype=np.uint64)
    words += np.uint64((seed + 1) << 40)
    words *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words
