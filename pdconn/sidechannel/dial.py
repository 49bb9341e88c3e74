"""Host names to addresses, and sockets that connect without blocking."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Any

MAX_WELCOME = 1 << 21
"""Bytes of a Welcome: some 200 ranks of 60 layers each.  Decoding as many takes 0.2 s."""

MAX_REPLIES = 1 << 20
"""Bytes of a frame after a Welcome; lenders cut their replies at half of it."""

Address = tuple[socket.AddressFamily, Any]


def resolve(host: str, port: int) -> Address:
    """The address of ``host:port``; takes as long as the name server does.

    Raises:
        OSError: the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} is not a host name: {error}") from error
    family, _, _, _, address = found[0]
    return family, address


def connecting_to(address: Address) -> socket.socket:
    """A socket that is connecting; it turns writable when it is connected or has failed.

    Raises:
        OSError: the connection fails at once.
    """
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    failed = sock.connect_ex(where)
    if failed not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(failed, os.strerror(failed))
    return sock


def literal_address(host: str, port: int) -> Address | None:
    """The address where ``host`` is one already, or None where it is a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, UnicodeError, ValueError):
            socket.inet_pton(family, host)
            return family, (host, port)
    return None
