"""Names to addresses, and sockets that connect without blocking."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Any

MAX_WELCOME = 1 << 24
"""Bytes of a greeting: some 4000 ranks of 60 layers each."""

Address = tuple[socket.AddressFamily, Any]


def resolve(host: str, port: int) -> Address:
    """Where ``host:port`` is; may take as long as the name server does.

    Raises:
        OSError: there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} is no host name: {error}") from error
    family, _, _, _, address = found[0]
    return family, address


def connecting_to(address: Address) -> socket.socket:
    """A socket that is connecting; it turns writable when that is decided.

    Raises:
        OSError: the network refuses at once.
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
    """``host:port`` without a look-up, or None where ``host`` is a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, UnicodeError, ValueError):
            socket.inet_pton(family, host)
            return family, (host, port)
    return None
