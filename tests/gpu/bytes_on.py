"""Bytes on a device, with numpy on this side: the same tests run over host memory and VRAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transport import Device, Memory
from transport.testing.contract import GUARD_BYTES, Arena

U8 = NDArray[np.uint8]
ALIGNMENT = 4096


class BytesOn:
    """A contiguous allocation on ``device`` that holds ``content``, its start page-aligned.

    Every access copies between host and device and waits for it, so that no kernel of ours
    runs while a peer reads.
    """

    def __init__(self, content: U8, device: Device) -> None:
        where = torch.device("cpu" if device.kind == "cpu" else f"cuda:{device.index}")
        raw = torch.empty(content.size + ALIGNMENT, dtype=torch.uint8, device=where)
        skip = -raw.data_ptr() % ALIGNMENT
        self._tensor = raw[skip : skip + content.size]
        self.memory = Memory(self._tensor.data_ptr(), content.size, device)
        self[:] = content

    def allocator(self) -> Callable[[int], torch.Tensor]:
        """Gives these bytes piece by piece, from the first one on, as an engine's allocator."""
        taken = 0

        def empty(nbytes: int) -> torch.Tensor:
            nonlocal taken
            begin, taken = taken, taken + nbytes
            return self._tensor.view(torch.int8)[begin:taken]

        return empty

    def __setitem__(self, at: Any, value: Any) -> None:
        """As a numpy array: a slice, or one byte."""
        given = torch.from_numpy(np.array(value, dtype=np.uint8))
        self._tensor[at] = given.to(self._tensor.device)
        self._wait()

    def __getitem__(self, at: Any) -> U8:
        """A copy on the host."""
        self._wait()
        found: U8 = self._tensor[at].cpu().numpy().copy()
        return found

    def __ne__(self, other: object) -> Any:
        """Byte by byte, as numpy does."""
        return self[:] != other

    __hash__ = object.__hash__

    def flip(self, offset: int) -> None:
        """Change one byte."""
        self[offset] = int(self[offset]) ^ 1

    def _wait(self) -> None:
        if self._tensor.device.type == "cuda":
            torch.cuda.synchronize(self._tensor.device)


class ArenaOn(Arena):
    """The contract's arena on a device; ``bytes`` is a :class:`BytesOn`."""

    @classmethod
    def on(cls, device: Device, like: Arena) -> ArenaOn:
        """With the bytes of ``like``."""
        return cls(BytesOn(like.bytes, device))  # type: ignore[arg-type]

    @property
    def memory(self) -> Memory:
        """The registered middle of the arena."""
        whole: Memory = self.bytes.memory  # type: ignore[attr-defined]
        return Memory(whole.base + GUARD_BYTES, whole.nbytes - 2 * GUARD_BYTES, whole.device)
