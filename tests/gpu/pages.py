"""Memory that is unmapped while its address stays ours, as KV memory is while an engine sleeps."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from tests.gpu.bytes_on import BytesOn
from transport import Device, Memory

U8 = NDArray[np.uint8]
_MAP_FIXED_NOREPLACE = 0x100000


class Pages:
    """Bytes on a device that can be unmapped, and mapped anew where they were.

    On a GPU they are allocated anew, which need not be at the same address.
    """

    def __init__(self, content: U8, device: Device) -> None:
        self._device = device
        self._on_gpu: BytesOn | None = None
        self.memory = Memory(1, content.size, device)
        self.map(content)

    def map(self, content: U8) -> None:
        """Other pages, with this content."""
        if self._device.kind == "cuda":
            self._on_gpu = BytesOn(content, self._device)
            self.memory = self._on_gpu.memory
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        wanted = self.memory.base if self.memory.base > 1 else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_FIXED_NOREPLACE if wanted else 0)
        found = libc.mmap(
            ctypes.c_void_p(wanted), ctypes.c_size_t(content.size),
            mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0),
        )  # fmt: skip
        assert found not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
        assert not wanted or found == wanted
        self.memory = Memory(found, content.size)
        ctypes.memmove(found, np.ascontiguousarray(content).ctypes.data, content.size)

    def unmap(self) -> None:
        """Nothing may be read there any more: this process would end by a signal."""
        if self._device.kind == "cuda":
            import torch

            self._on_gpu = None
            torch.cuda.empty_cache()
            return
        libc = ctypes.CDLL(None, use_errno=True)
        memory = self.memory
        assert libc.munmap(ctypes.c_void_p(memory.base), ctypes.c_size_t(memory.nbytes)) == 0
