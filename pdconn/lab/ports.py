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


def free_ports(count: int, host: str = LOCALHOST, source: random.Random | None = None) -> list[int]:
    """``count`` ports that nobody listens on now and that were not given out before.

    Another program may still come to listen on one; ``is_free`` tells.
    """
    source = source or random.SystemRandom()
    highest = _lowest_ephemeral() - 1
    found: list[int] = []
    for _ in range(count * _TRIES_PER_PORT):
        if len(found) == count:
            break
        port = source.randint(_LOWEST, highest)
        if port not in _given and is_free(port, host):
            _given.add(port)
            found.append(port)
    if len(found) < count:
        raise OSError(f"no {count} free ports on {host} from {_LOWEST} to {highest}")
    return found


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
