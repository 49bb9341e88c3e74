"""Host memory for rows, and copies between it and KV memory.

KV is scattered, rows are not: sorted by their address in host memory, the runs of a plan form
few contiguous *segments*.  A segment is gathered or scattered by one indexed copy in units of
the *grain*, the greatest common divisor of lengths and distances of the runs in an allocation::

    KV memory     ..[ b7 ]......[ b2 ][ b3 ]..........     grain 4 KiB, index 5 9 10
                       |           |     |
    host memory   [ b7 |  b2   |  b3  ]                    one segment of 12 KiB

Measured on one shared core, host memory, rows of 9 MiB, GB/s out of and into KV: runs of 16 KiB
9 and 15, of 4 KiB 8 and 9, of 256 bytes 4 and 4.  ``process_vm_readv`` on our own process moved 8
at 16 KiB and 4 at 4 KiB.  A loop of ``memmove`` does, too, but contends with the engine's thread
for the interpreter at every run.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdconn.integrity.memory import OnDevice
from pdconn.store.format.row import ALIGNMENT, aligned
from transport import Device, Memory, Spans

log = logging.getLogger(__name__)

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python's module from 3.13 on
_HUGE = 1 << 21


class HostArea:
    """``nbytes`` of zeroed host memory, rounded up to pages.

    Where the KV is on a GPU it is pinned, so that copies to and from it are asynchronous and fast;
    without pinning they are slower and as correct.  It is freed with its last view, after
    :meth:`unpin_pages`.

    Attributes:
        nbytes: its size, a multiple of 4096.
        address: of its first byte, a multiple of 4096.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = aligned(max(nbytes, 1))
        # Lazy: pages cost nothing until a row is read into them.  No tensor: vLLM's workers run in
        # inference mode, and a tensor that is made in it cannot be used outside of it.
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

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """The writable bytes ``[offset, offset + nbytes)``."""
        return self._view[offset : offset + nbytes]

    def pin_pages(self) -> bool:
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

    def unpin_pages(self) -> None:
        """Undo :meth:`pin_pages`; nothing may be copied any more."""
        if self._is_pinned:
            self._is_pinned = False
            _cuda_runtime().cudaHostUnregister(self.address)


def _cuda_runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

_PIECE_NBYTES = 16 << 20
_PIECE_GRAINS = 1 << 17
"""GPU memory that a thread of a store holds from its start on: bytes, and index entries of 8 bytes.
A load allocates no more, since vLLM has given the rest to KV."""

_LARGEST_GRAIN = _PIECE_NBYTES


class Copies(Protocol):
    """Copies runs between KV memory (``Spans.local``) and host memory (``Spans.remote``).

    Nothing else may write either side meanwhile.  A call returns when all bytes are there.

    Raises:
        ValueError: a run that leaves the allocations of KV memory; nothing was copied.
    """

    def copy_out(self, spans: Spans) -> None:
        """From KV memory to host memory."""
        ...

    def copy_in(self, spans: Spans) -> None:
        """From host memory to KV memory."""
        ...


def copies_of(memories: Sequence[Memory]) -> Copies:
    """Make copies for these allocations of KV memory, all on one device.

    Raises:
        ValueError: allocations on several devices, or none.
    """
    devices = {memory.device for memory in memories}
    if len(devices) != 1:
        raise ValueError(f"device: expected one, got {sorted(map(str, devices))}")
    return HostCopies(memories) if devices.pop().kind == "cpu" else TorchCopies(memories)


class HostCopies:
    """Copies by numpy, which releases the interpreter's lock."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = _Allocations(memories)

    def copy_out(self, spans: Spans) -> None:
        """From KV memory to host memory."""
        for gathered in self._memories.gathers(spans):
            grains = self._grains(gathered)
            for part, address, nbytes in gathered.segments():
                host = host_bytes(address, nbytes).view(grains.dtype)
                # No index is out of bounds; with mode "raise", numpy copies by way of a buffer.
                np.take(grains, gathered.index[part], out=host, mode="clip")

    def copy_in(self, spans: Spans) -> None:
        """From host memory to KV memory."""
        for gathered in self._memories.gathers(spans):
            grains = self._grains(gathered)
            for part, address, nbytes in gathered.segments():
                grains[gathered.index[part]] = host_bytes(address, nbytes).view(grains.dtype)

    @staticmethod
    def _grains(gathered: _Gather) -> NDArray[np.void]:
        memory, start, end = gathered.memory, gathered.shift, gathered.end
        return host_bytes(memory.base + start, end - start).view(f"V{gathered.grain}")


class TorchCopies:
    """Copies by torch, through a buffer on the device, piece by piece.

    The buffer is held from the start on, so that no copy can run out of a GPU's memory.  A GPU's
    copies run on a stream of their own, beside the engine's; the caller ensures that the pass that
    wrote the KV has ended.

    Raises:
        RuntimeError: no room for the buffer.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        import torch

        self._memories = _Allocations(memories)
        self._bytes = {memory: _tensor_of(memory) for memory in memories}
        device = memories[0].device
        self._device = torch.device(device.kind, device.index)
        self._stream = _stream_on(device)
        # On the stream that uses them: torch gives memory that was freed on a stream to the next
        # allocation there at once, while kernels of that stream may still write it.
        with torch.cuda.stream(self._stream):
            self._buffer = torch.empty(_PIECE_NBYTES, dtype=torch.uint8, device=self._device)
            self._index = torch.empty(_PIECE_GRAINS, dtype=torch.int64, device=self._device)

    def copy_out(self, spans: Spans) -> None:
        """From KV memory to host memory."""
        self._on_stream(spans, self._out)

    def copy_in(self, spans: Spans) -> None:
        """From host memory to KV memory."""
        self._on_stream(spans, self._in)

    def _on_stream(self, spans: Spans, move: Any) -> None:
        import torch

        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                for gathered in self._memories.gathers(spans):
                    grains = self._grains(gathered)
                    most = min(_PIECE_NBYTES // gathered.grain, _PIECE_GRAINS)
                    for part, segments in gathered.pieces(most):
                        count = part.stop - part.start
                        index = self._index[:count]
                        index.copy_(torch.from_numpy(gathered.index[part]))
                        found = self._buffer[: count * gathered.grain].view(grains.dtype)
                        move(grains, index, found.view(count, -1), segments)
            finally:
                # Also where it fails: the engine gives the blocks to another request then.
                if self._stream is not None:
                    self._stream.synchronize()

    @staticmethod
    def _out(grains: Any, index: Any, found: Any, segments: Sequence[_Segment]) -> None:
        import torch

        torch.index_select(grains, 0, index, out=found)
        for part, address, nbytes in segments:
            host = _tensor(host_bytes(address, nbytes)).view(found.dtype)
            host.copy_(found[part].view(-1), non_blocking=True)

    @staticmethod
    def _in(grains: Any, index: Any, found: Any, segments: Sequence[_Segment]) -> None:
        for part, address, nbytes in segments:
            host = _tensor(host_bytes(address, nbytes)).view(found.dtype)
            found[part].view(-1).copy_(host, non_blocking=True)
        grains.index_copy_(0, index, found)

    def _grains(self, gathered: _Gather) -> Any:
        """The allocation in rows of a grain, of the widest integers that fit."""
        import torch

        memory, start, end = gathered.memory, gathered.shift, gathered.end
        found = self._bytes[memory][start:end]
        if not (gathered.grain % 8 or (memory.base + start) % 8):
            found = found.view(torch.int64)
        return found.view((end - start) // gathered.grain, -1)


_Segment = tuple[slice, int, int]
"""Grains that are contiguous in host memory, their address there, and their bytes."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """Runs of one allocation in order of host memory.

    Grain ``i`` of the runs is the ``index[i]``-th ``grain`` bytes after byte ``shift`` of the
    allocation; ``end`` is where its last whole grain ends.  Segment ``j`` are grains
    ``[firsts[j], firsts[j + 1])``, at ``addresses[j]`` in host memory.
    """

    memory: Memory
    grain: int
    shift: int
    index: I64
    firsts: tuple[int, ...]
    addresses: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.memory.nbytes - (self.memory.nbytes - self.shift) % self.grain

    def pieces(self, most: int) -> Iterator[tuple[slice, list[_Segment]]]:
        """Runs of at most so many grains, with the segments of each, counted from its first."""
        for start in range(0, len(self.index), most):
            stop = min(start + most, len(self.index))
            segments = []
            number = bisect_right(self.firsts, start) - 1
            while number < len(self.addresses) and self.firsts[number] < stop:
                first, last = max(self.firsts[number], start), min(self.firsts[number + 1], stop)
                address = self.addresses[number] + (first - self.firsts[number]) * self.grain
                part = slice(first - start, last - start)
                segments.append((part, address, (last - first) * self.grain))
                number += 1
            yield slice(start, stop), segments

    def segments(self) -> Iterator[_Segment]:
        """Each segment."""
        for number, address in enumerate(self.addresses):
            first, last = self.firsts[number], self.firsts[number + 1]
            yield slice(first, last), address, (last - first) * self.grain


class _Allocations:
    """Allocations by address."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = tuple(sorted(memories, key=lambda memory: memory.base))
        self._bases = np.array([memory.base for memory in self._memories], dtype=np.int64)
        self._ends = np.array([memory.end for memory in self._memories], dtype=np.int64)

    def gathers(self, spans: Spans) -> list[_Gather]:
        """The runs of each allocation.

        Raises:
            ValueError: a run that leaves them.
        """
        if not len(spans):
            return []
        columns = spans.local.view(np.int64), spans.remote.view(np.int64), spans.nbytes
        local, remote, nbytes = columns[0], columns[1], columns[2].view(np.int64)
        if (remote[1:] < remote[:-1]).any():
            order = np.argsort(remote, kind="stable")
            local, remote, nbytes = local[order], remote[order], nbytes[order]
        owner = np.searchsorted(self._bases, local, side="right") - 1
        outside = (owner < 0) | (local + nbytes > self._ends[owner])
        if outside.any():
            at = int(np.argmax(outside))
            raise ValueError(
                f"run of {nbytes[at]} bytes at {local[at]:#x}: expected one in KV memory"
            )
        if (owner == owner[0]).all():
            return [_gather(self._memories[owner[0]], local, remote, nbytes)]
        found = []
        for number in np.unique(owner).tolist():
            mine = owner == number
            found.append(_gather(self._memories[number], local[mine], remote[mine], nbytes[mine]))
        return found


def _gather(memory: Memory, local: I64, remote: I64, nbytes: I64) -> _Gather:
    offset = local - memory.base
    grain = int(np.gcd(np.gcd.reduce(nbytes), np.gcd.reduce(offset - offset[0])))
    if grain > _LARGEST_GRAIN:
        grain = int(np.gcd(grain, _LARGEST_GRAIN))
    shift = int(offset[0]) % grain
    counts = nbytes // grain
    ends = np.cumsum(counts)
    index = np.arange(ends[-1]) + np.repeat((offset - shift) // grain - (ends - counts), counts)
    is_first = np.concatenate(([True], remote[:-1] + nbytes[:-1] != remote[1:]))
    firsts = (ends - counts)[is_first]
    return _Gather(
        memory,
        grain,
        shift,
        index,
        (*firsts.tolist(), int(ends[-1])),
        tuple(remote[is_first].tolist()),
    )


def host_bytes(address: int, nbytes: int) -> U8:
    """Host memory of this process, writable; the caller keeps it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _stream_on(device: Device) -> Any:
    import torch

    if device.kind == "cpu":
        return None
    made: Any = torch.cuda.Stream
    return made(torch.device("cuda", device.index))


def _tensor(data: U8) -> Any:
    import torch

    return torch.from_numpy(data)


def _tensor_of(memory: Memory) -> Any:
    import torch

    if memory.device.kind == "cpu":
        return _tensor(host_bytes(memory.base, memory.nbytes))
    return torch.as_tensor(OnDevice(memory), device=torch.device("cuda", memory.device.index))
