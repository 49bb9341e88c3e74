"""Free ports for servers on this machine.

They lie below the kernel's ephemeral range: the local end of an outgoing connection takes
a port from that range at any time, also one that a slow server is about to listen on.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOCALHOST = "127.0.0.1"

_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FALLBACK = 32_768
_TRIES_PER_PORT = 1000

_given: set[int] = set()
"""Ports given out by this process: no port is given out twice."""


def free_ports(
    count: int,
    host: str = LOCALHOST,
    source: random.Random | None = None,
    *,
    in_a_row: bool = False,
) -> list[int]:
    """``count`` ports that are free now and were not given out before.

    ``in_a_row``: consecutive ports, as the ranks of one engine use them.  For a server that
    listens on every address, ``host`` is "0.0.0.0".  Another program may still take a
    port before its server starts; ``is_free`` checks.
    """
    source = source or random.SystemRandom()
    length = count if in_a_row else 1
    highest = _lowest_ephemeral() - length
    found: list[int] = []
    for _ in range(count * _TRIES_PER_PORT):
        first = source.randint(_LOWEST, highest)
        row = range(first, first + length)
        if _given.isdisjoint(row) and all(is_free(port, host) for port in row):
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


def _lowest_ephemeral() -> int:
    try:
        lowest = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError):
        return _FALLBACK
    # Where the ephemeral range is nearly everything, it cannot be avoided.
    return lowest if lowest > _LOWEST + 1000 else _FALLBACK
