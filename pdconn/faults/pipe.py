"""One direction of a relayed connection: from a socket, through faults, to a socket."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from pdconn.faults.frames import DelayedFrame, FlowState, FrameCutter, FrameFaults

_CHUNK = 1 << 18

MAX_WAITING = 1 << 20
"""Bytes that may wait to be sent before the source is no longer read."""


class PipeLost(Exception):
    """The connection is over, both ways: cut, reset, or closed under a stalled direction."""

    def __init__(self, why: str, never_connected: bool = False) -> None:
        self.never_connected = never_connected
        super().__init__(why)


class Pipe:
    """Reads frames from ``source``, and sends to ``sink`` what ``faults`` makes of them.

    Both sockets are non-blocking; the sink may still be connecting.  The end of the
    source is passed on after everything before it.  A stalled pipe keeps reading and
    discards, so that it notices the end of its source.

    Args:
        max_waiting: bytes that may wait to be sent before the source is no longer read.
    """

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        faults: FrameFaults,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._source = source
        self._sink = sink
        self._faults = faults
        self._max_waiting = max_waiting
        self._cutter = FrameCutter()
        self._queue: deque[DelayedFrame] = deque()
        self._queued = 0
        self._unsent = bytearray()
        self._ended = False
        self.is_over = False

    @property
    def wants_to_read(self) -> bool:
        """Whether the source has not ended, and there is room for more."""
        return not self._ended and self._queued + len(self._unsent) <= self._max_waiting

    @property
    def wants_to_write(self) -> bool:
        """Whether the sink has yet to take something."""
        return bool(self._unsent)

    @property
    def next_due(self) -> float | None:
        """When to call :meth:`send` even if no socket is ready."""
        dues = [self._queue[0].due] if self._queue else []
        if self._faults.held_until is not None:
            dues.append(self._faults.held_until)
        return min(dues, default=None)

    def receive(self, now: float) -> None:
        """Read from the source.

        Raises:
            PipeLost: the connection broke, or was cut by a fault.
        """
        try:
            data = self._source.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise _lost(error) from error
        if self._faults.state is FlowState.STALLED:
            if not data:
                raise PipeLost("closed by the end whose frames are stalled")
            return
        for frame in self._cutter.feed(data) if data else self._cutter.rest():
            self._enqueue(self._faults.feed(frame, now))
            if self._faults.state is FlowState.CUT:
                raise PipeLost("cut by a fault")
        if not data:
            self._ended = True
            self._enqueue(self._faults.flush(now))

    def send(self, now: float) -> None:
        """Send what is due, as much as the sink takes.

        Raises:
            PipeLost: the connection broke.
        """
        if self._faults.held_until is not None and self._faults.held_until <= now:
            self._enqueue(self._faults.flush(now))
        while self._queue and self._queue[0].due <= now:
            frame = self._queue.popleft().frame
            self._queued -= len(frame)
            self._unsent += frame
        self._flush()
        if self._ended and not self._queue and not self._unsent and not self.is_over:
            self.is_over = True
            with contextlib.suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)

    def _enqueue(self, outgoing: list[DelayedFrame]) -> None:
        self._queue.extend(outgoing)
        self._queued += sum(len(out.frame) for out in outgoing)

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._sink.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise _lost(error) from error
            del self._unsent[:sent]


def _lost(error: OSError) -> PipeLost:
    return PipeLost(str(error), never_connected=isinstance(error, ConnectionRefusedError))
