"""The sockets of connections to engines, and detection of dead hosts.

An engine that does not read a long body for minutes is busy; one whose host lost its power is gone.
The kernel's own time-out (``TCP_USER_TIMEOUT``) breaks both connections, because it also counts the
time in which sent bytes wait for a full window.  So it is not set.  A living host acknowledges
every packet, with a full window or not::

    nothing is sent     keepalive probes of the kernel (``SO_KEEPALIVE``)
    bytes are in        retransmitted, with no acknowledgement of anything for ``DEAD_HOST_S``:
    flight              a periodic sweep reads that from the kernel (``TCP_INFO``)

Detecting a host that dies while its window is full takes longer: the kernel probes the window at
growing intervals.  An engine that reads no byte for ``HUNG_S`` no longer counts as busy: its
connections are broken too, and with them those of clients that left, whose bodies would be kept
forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
import weakref
from dataclasses import dataclass

log = logging.getLogger(__name__)

DEAD_HOST_S = 15.0
"""Seconds without an acknowledgement after which a host counts as dead."""
HUNG_S = 300.0
SWEEP_S = 3.0
_PROBE_AFTER_S, _PROBE_EVERY_S = 6, 3
_REPEATS = 2
"""Unanswered retransmissions or window probes in a row; a single one may be in flight."""

_INFO = struct.Struct("=8B24I4Q3I")
"""Linux's ``struct tcp_info``, up to ``tcpi_notsent_bytes``."""
_RETRANSMITS, _PROBES, _LAST_ACK, _BYTES_ACKED, _NOT_SENT = 2, 3, 20, 34, 38

Address = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, object]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The kernel's view of a connection's remote host.

    Attributes:
        silent_s: seconds since its last acknowledgement.
        repeats: packets or window probes repeated in a row since then.
        nbytes: bytes that it has acknowledged.
        waiting_nbytes: bytes that wait for room in its window.
    """

    silent_s: float
    repeats: int
    nbytes: int = 0
    waiting_nbytes: int = 0

    def is_dead(self, limit_s: float) -> bool:
        """Whether the host should have answered, and has not for ``limit_s``.

        >>> Acknowledged(silent_s=60.0, repeats=0).is_dead(15.0)  # nothing was sent
        False
        """
        return self.repeats >= _REPEATS and self.silent_s >= limit_s


def acknowledged(sock: socket.socket) -> Acknowledged | None:
    """The kernel's view; None where it is not available, or there is no connection."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    if len(raw) < _INFO.size:
        return None
    info = _INFO.unpack(raw)
    return Acknowledged(
        info[_LAST_ACK] / 1000,
        max(info[_RETRANSMITS], info[_PROBES]),
        info[_BYTES_ACKED],
        info[_NOT_SENT],
    )


class EngineSockets:
    """Every open socket to an engine.

    Args:
        limit_s, hung_s, sweep_s: bounds; the module's constants by default.
    """

    def __init__(
        self, limit_s: float = DEAD_HOST_S, hung_s: float = HUNG_S, sweep_s: float = SWEEP_S
    ) -> None:
        self._limit_s = limit_s
        self._hung_s = hung_s
        self._sweep_s = sweep_s
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._full: weakref.WeakKeyDictionary[socket.socket, tuple[int, float]] = (
            # Acknowledged bytes, and the time since which they have not grown.
            weakref.WeakKeyDictionary()
        )
        self._sweeping: asyncio.Task[None] | None = None

    def open_socket(self, address: Address) -> socket.socket:
        """A socket for a new connection."""
        sock = socket.socket(address[0], address[1], address[2])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probes = (int(DEAD_HOST_S) - _PROBE_AFTER_S) // _PROBE_EVERY_S
        for option, value in (
            ("TCP_KEEPIDLE", _PROBE_AFTER_S),
            ("TCP_KEEPINTVL", _PROBE_EVERY_S),
            ("TCP_KEEPCNT", probes),
        ):
            if hasattr(socket, option):  # Linux has all three
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._open.add(sock)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="break off dead connections")
        return sock

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            self.break_off_dead()

    def break_off_dead(self) -> None:
        """Break every connection whose host is dead or whose engine hangs; its request fails."""
        now = time.monotonic()
        for sock in list(self._open):
            seen = acknowledged(sock)
            if seen is None:
                continue
            if seen.is_dead(self._limit_s):
                self._break_off(sock, "its host acknowledges nothing", seen.silent_s)
            elif (full_s := self._full_s(sock, seen, now)) >= self._hung_s:
                self._break_off(sock, "its engine reads nothing", full_s)

    def _full_s(self, sock: socket.socket, seen: Acknowledged, now: float) -> float:
        """Seconds for which bytes have waited for room without an acknowledgement."""
        if not seen.waiting_nbytes:
            self._full.pop(sock, None)
            return 0.0
        nbytes, since = self._full.setdefault(sock, (seen.nbytes, now))
        if nbytes != seen.nbytes:
            since = now
            self._full[sock] = (seen.nbytes, now)
        return now - since

    def _break_off(self, sock: socket.socket, why: str, for_s: float) -> None:
        with contextlib.suppress(OSError):
            peer = sock.getpeername()[0]
            log.warning("pdconn: connection broken off, %s peer=%s for_s=%.0f", why, peer, for_s)
            sock.shutdown(socket.SHUT_RDWR)
        self._open.discard(sock)

    async def close(self) -> None:
        """Stop looking."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
