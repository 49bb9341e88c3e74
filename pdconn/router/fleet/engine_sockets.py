"""The sockets of connections to engines, and those whose host is gone.

An engine that does not read a long body for minutes is busy, and one whose host lost its power is
gone.  The kernel's own time-out (``TCP_USER_TIMEOUT``) breaks both connections off: it counts the
time that sent bytes wait for a full window, too.  So it is not set.  A host that lives acknowledges
whatever reaches it, full window or not::

    nothing is sent     keepalive probes of the kernel (``SO_KEEPALIVE``)
    bytes are under     repeated again and again, and no acknowledgement of anything for
    way                 ``DEAD_HOST_S``: a sweep reads that of the kernel (``TCP_INFO``)

A host that dies while its window is full takes longer: the kernel asks for room ever less often.
An engine that reads not a byte for ``HUNG_S`` is no longer busy: its connections are broken off,
too, and with them those of clients that left, whose bodies would be kept for ever.
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
"""A host that acknowledges nothing for this long is gone."""
HUNG_S = 300.0
SWEEP_S = 3.0
_PROBE_AFTER_S, _PROBE_EVERY_S = 6, 3
_REPEATS = 2
"""Of packets or of questions for room, in a row and unanswered: one may just be on its way."""

_INFO = struct.Struct("=8B24I4Q3I")
"""Linux's ``struct tcp_info``, up to ``tcpi_notsent_bytes``."""
_RETRANSMITS, _PROBES, _LAST_ACK, _BYTES_ACKED, _NOT_SENT = 2, 3, 20, 34, 38

Address = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, object]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What the kernel knows of a connection's other host.

    Attributes:
        silent_s: since it last acknowledged anything.
        repeats: packets, or questions for room in its window, repeated in a row since then.
        nbytes: that it has acknowledged.
        waiting_nbytes: that wait for room in its window.
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
    """What the kernel knows; None where it does not say, or there is no connection."""
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
        limit_s, hung_s, sweep_s: see the constants.
    """

    def __init__(
        self, limit_s: float = DEAD_HOST_S, hung_s: float = HUNG_S, sweep_s: float = SWEEP_S
    ) -> None:
        self._limit_s = limit_s
        self._hung_s = hung_s
        self._sweep_s = sweep_s
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._full: weakref.WeakKeyDictionary[socket.socket, tuple[int, float]] = (
            weakref.WeakKeyDictionary()  # bytes acknowledged, and since when no more
        )
        self._sweeping: asyncio.Task[None] | None = None

    def open(self, address: Address) -> socket.socket:
        """A socket for a connection; aiohttp's ``socket_factory``."""
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
        """Break off every connection whose host is gone or hangs; its request fails."""
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
        """For how long bytes have waited for room, and none was acknowledged."""
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
