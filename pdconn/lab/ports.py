"""Free ports, and whether one is.

Servers of an experiment get ports that the kernel hands to nobody: it takes the
local ends of outgoing connections from a range of its own, and a port from that
range can be gone again before a slow server comes to listen on it.
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

#: Ports given out by this process, so that no two of its servers get the same one.
_given: set[int] = set()


def free_ports(
    count: int,
    host: str = LOCALHOST,
    source: random.Random | None = None,
    *,
    in_a_row: bool = False,
) -> list[int]:
    """``count`` ports that nobody listens on now and that were not given out before.

    ``in_a_row``: each the next of the one before, as the ranks of one engine take
    them. A server that listens on every address wants ``host`` "0.0.0.0". Another
    program may still come to listen on one; ``is_free`` tells.
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
        # As servers do: a connection that lingers after its server is no obstacle.
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
    # Where the kernel takes nearly everything, there is nothing to stay clear of.
    return lowest if lowest > _LOWEST + 1000 else _FALLBACK
