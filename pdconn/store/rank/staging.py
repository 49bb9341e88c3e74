"""Host memory that rows pass through: the staging area of fetches, and a buffer for saves.

The memory is anonymous and lazy: pages cost nothing until a row first lies in them.  Where the
KV is on a GPU it is pinned, so that copies to and from it are asynchronous and fast; without
pinning they are slower and as correct.  numpy and mmap alone, no tensors: vLLM's workers run in
inference mode, and what is made in it cannot be used outside of it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from typing import Any

import numpy as np

from pdconn.store.format.layout import ALIGNMENT, aligned

log = logging.getLogger(__name__)

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python's module from 3.13 on
_HUGE = 1 << 21


class HostArea:
    """``nbytes`` of zeroed host memory, rounded up to pages.

    It is freed when the last view of it is; :meth:`unpin` first.

    Attributes:
        nbytes: its size, a multiple of 4096.
        address: of its first byte, a multiple of 4096.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = aligned(max(nbytes, 1))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        pages = mmap.mmap(-1, self.nbytes, flags=flags)
        if self.nbytes >= _HUGE:
            with contextlib.suppress(OSError, ValueError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(pages)
        self.address = int(np.frombuffer(pages, np.uint8).ctypes.data)
        self._is_pinned = False

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether ``nbytes`` from ``offset`` on lie in the area, beginning at a page."""
        return offset >= 0 and offset % ALIGNMENT == 0 and offset + nbytes <= self.nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The writable bytes ``[offset, offset + nbytes)``."""
        return self._view[offset : offset + nbytes]

    def pin(self) -> bool:
        """Pin the memory for the GPUs of this process; False where that fails."""
        try:
            code: Any = _cuda_runtime().cudaHostRegister(self.address, self.nbytes, 0)
            self._is_pinned = int(code) == 0
        except (RuntimeError, OSError, AttributeError, AssertionError) as error:
            code = error
        if not self._is_pinned:
            log.warning(
                "pdconn: store: host memory not pinned, copies are slower: nbytes=%d error=%s",
                self.nbytes,
                code,
            )
        return self._is_pinned

    def unpin(self) -> None:
        """Undo :meth:`pin`; nothing may be copied any more."""
        if self._is_pinned:
            self._is_pinned = False
            _cuda_runtime().cudaHostUnregister(self.address)


def _cuda_runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()
