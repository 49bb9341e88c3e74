"""Free ports for servers on this machine.

They lie below the kernel's ephemeral range, from which the local end of any outgoing connection may
take a port, even one that a slow server is about to listen on.

Between the choice of a port and the start of its server the port is free, so a second process could
choose it too, and clients of one would reach the server of the other.  Processes of one user
therefore lock the ports that they reserve: one byte of a file per port::

    $TMPDIR/pdconn-ports-UID     0 … 10000 ……… 20417 ……… 31208 … 65535
                                             process A  process B

The kernel drops the locks of a process that ends, and a forked child has none of them.  If the file
is not available, ports are reserved without it.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import random
import socket
import stat
import tempfile
from pathlib import Path

LOCALHOST = "127.0.0.1"

_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FALLBACK = 32_768
_TRIES_PER_PORT = 1000

_given: set[int] = set()
"""Ports reserved by this process: no port is reserved twice."""


def free_ports(
    count: int,
    host: str = LOCALHOST,
    source: random.Random | None = None,
    *,
    in_a_row: bool = False,
) -> list[int]:
    """``count`` ports that are free now and were not reserved before.

    Other processes of this user on this machine cannot reserve them until this one ends.

    ``in_a_row``: consecutive ports, as the ranks of one engine use them.  For a server that listens
    on every address, ``host`` is "0.0.0.0".  Another program may still take a port before its
    server starts; ``is_free`` checks.
    """
    source = source or random.SystemRandom()
    length = count if in_a_row else 1
    highest = _lowest_ephemeral() - length
    found: list[int] = []
    for _ in range(count * _TRIES_PER_PORT):
        first = source.randint(_LOWEST, highest)
        row = range(first, first + length)
        if _given.isdisjoint(row) and _reserve(row, host):
            _given.update(row)
            found.extend(row)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports on {host} from {_LOWEST} to {highest}")


def is_free(port: int, host: str = LOCALHOST) -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket() as probe:
        # As servers do: a connection in TIME_WAIT does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _reserve(row: range, host: str) -> bool:
    """Lock ports that this process has not reserved; keeps the locks if all are free."""
    if not _lock(row):
        return False
    if all(is_free(port, host) for port in row):
        return True
    _unlock(row)
    return False


def _lock(row: range) -> bool:
    """Lock the ports against other processes; returns whether none has one of them."""
    file = _lock_file()
    if file is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, len(row), row.start)
    except OSError as error:
        # Any other error: locks are not available.
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _unlock(row: range) -> None:
    if (file := _lock_file()) is not None:
        fcntl.lockf(file, fcntl.LOCK_UN, len(row), row.start)


@functools.cache
def _lock_file() -> int | None:
    """The descriptor of the lock file, or None if there is no file that only this user can access.

    It is opened once: a process that closes any descriptor of a file loses all its locks in it.
    """
    path = Path(tempfile.gettempdir()) / f"pdconn-ports-{os.getuid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o600)
    except OSError:
        return None
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
        return file
    os.close(file)
    return None


def _lowest_ephemeral() -> int:
    try:
        lowest = int(_EPHEMERAL.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError):
        return _FALLBACK
    # An ephemeral range of nearly all ports cannot be avoided.
    return lowest if lowest > _LOWEST + 1000 else _FALLBACK
