"""Free ports, and whether one is."""

from __future__ import annotations

import socket
from contextlib import ExitStack

LOCALHOST = "127.0.0.1"


def free_ports(count: int, host: str = LOCALHOST) -> list[int]:
    """``count`` different ports that nobody listens on just now.

    They are held together before they are let go, so they differ.  Another
    process may still take one before you do; ``is_free`` tells.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


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
