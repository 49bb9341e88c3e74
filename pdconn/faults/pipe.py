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
    """Reads frames of ``source``, sends to ``sink`` what ``faults`` makes of them.

    Both sockets are non-blocking; the sink may still be connecting.  The end of the
    source is passed on once everything before it was sent.  A stalled pipe reads on
    and throws away, so that it hears of the end: nobody is left to wait for it.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, faults: FrameFaults) -> None:
        self._source = source
        self._sink = sink
        self._faults = faults
        self._units = FrameCutter()
        self._queue: deque[DelayedFrame] = deque()
        self._queued = 0
        self._unsent = bytearray()
        self._ended = False
        self.is_over = False

    @property
    def wants_to_read(self) -> bool:
        """Whether there is more to come, and room for it."""
        return not self._ended and self._queued + len(self._unsent) <= MAX_WAITING

    @property
    def wants_to_write(self) -> bool:
        """Whether the sink has yet to take something."""
        return bool(self._unsent)

    @property
    def next_due(self) -> float | None:
        """When to send next, whatever the sockets say."""
        dues = [self._queue[0].due] if self._queue else []
        if self._faults.held_until is not None:
            dues.append(self._faults.held_until)
        return min(dues, default=None)

    def receive(self, now: float) -> None:
        """The source can be read.

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
        for unit in self._units.feed(data) if data else self._units.rest():
            self._enqueue(self._faults.feed(unit, now))
            if self._faults.state is FlowState.CUT:
                raise PipeLost("cut on purpose")
        if not data:
            self._ended = True
            self._enqueue(self._faults.flush(now))

    def send(self, now: float) -> None:
        """Send what is due, as far as the sink takes it.

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
