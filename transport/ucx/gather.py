"""Copying between many runs and one buffer, without the interpreter lock.

A ``memmove`` per run releases the lock and takes it back each time.  Beside a busy
Python thread taking it back may last 5 ms, so that 4 KB runs then move at 0.03 GB/s.
One call of numpy moves a whole piece instead, and holds no lock:

    memory   ░░██░░░░██░░██░░      seen as an array of items of g bytes, where g
    items      1    5   7          divides every run's start and length
    buffer   ██ ██ ██              = memory[[1, 5, 7]]

The array spans everything from the first run to the last, registered or not;
only the items of the runs are touched.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transport.ucx.pieces import Runs

Bytes = NDArray[np.uint8]

_MIN_ITEM_BYTES = 16
"""Runs whose starts and lengths have a smaller common divisor are copied one by one."""

# Holds the lock: a piece has few enough runs, and see above.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


class _Unowned:
    """Describes memory to numpy that numpy does not own."""

    def __init__(self, address: int, items: int, typestr: str, stride: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (items,),
            "typestr": typestr,
            "strides": (stride,),
            "version": 3,
        }


def bytes_at(address: int, nbytes: int) -> Bytes:
    """The memory itself, as uint8 of shape (nbytes,); it must outlive the array."""
    return np.asarray(_Unowned(address, nbytes, "|u1", 1))


def gather(runs: Runs, into: Bytes) -> None:
    """Copy ``runs`` one after the other into ``into``, whose size is theirs."""
    item = _item_bytes(runs)
    if item < _MIN_ITEM_BYTES:
        _copy_singly(runs, into, to_runs=False)
        return
    memory, indices = _items(runs, item)
    # "clip" since "raise" would copy through a buffer; no index is out of range.
    np.take(memory, indices, out=into.view(f"V{item}"), mode="clip")


def scatter(source: Bytes, runs: Runs) -> None:
    """Copy ``source`` into ``runs``, one after the other, whose size is its own."""
    item = _item_bytes(runs)
    if item < _MIN_ITEM_BYTES:
        _copy_singly(runs, source, to_runs=True)
        return
    memory, indices = _items(runs, item)
    memory[indices] = source.view(f"V{item}")


def _item_bytes(runs: Runs) -> int:
    distances = runs.addresses - runs.addresses.min()
    return int(np.gcd(np.gcd.reduce(distances), np.gcd.reduce(runs.nbytes)))


def _items(runs: Runs, item: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All memory from the first run to the last as items, and those of the runs in order."""
    low, high = int(runs.addresses.min()), int((runs.addresses + runs.nbytes).max())
    memory = np.asarray(_Unowned(low, (high - low) // item, f"|V{item}", item))
    starts = ((runs.addresses - np.uint64(low)) // np.uint64(item)).astype(np.int64)
    counts = (runs.nbytes // np.uint64(item)).astype(np.int64)
    if (counts == 1).all():
        return memory, starts
    ends = np.cumsum(counts)
    return memory, np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])


def _copy_singly(runs: Runs, buffer: Bytes, *, to_runs: bool) -> None:
    at = buffer.ctypes.data
    for address, nbytes in zip(runs.addresses.tolist(), runs.nbytes.tolist(), strict=True):
        if to_runs:
            _memmove(address, at, nbytes)
        else:
            _memmove(at, address, nbytes)
        at += nbytes
