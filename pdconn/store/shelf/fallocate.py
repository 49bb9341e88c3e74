"""``fallocate(2)`` itself, which Python does not offer.

``os.posix_fallocate`` is not the same where the file system lacks the call (NFS before 4.2, ramfs):
glibc then writes a zero into each block that reads as zero.  It fails with EBADF on a descriptor
that cannot read, and it undoes what another process writes between its read and its write.
"""

from __future__ import annotations

import ctypes
import functools
import os


def fallocate(fd: int, nbytes: int) -> None:
    """Reserve the first ``nbytes`` of a file, which is as long afterwards.

    Raises:
        OSError: no space, or the file system cannot reserve (EOPNOTSUPP).
    """
    call, offset = _call(), 0
    if call(fd, 0, offset, nbytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@functools.cache
def _call() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    call.restype = ctypes.c_int
    return call
