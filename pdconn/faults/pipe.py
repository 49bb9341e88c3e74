"""One direction of a relayed connection: from a socket, through faults, to a socket."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from pdconn.faults.frame_faults import DelayedFrame, FlowState, FrameCutter, FrameFaults

_CHUNK = 1 << 18

MAX_WAITING = 1 << 20
"""Queued bytes above which the source is not read."""


class PipeLost(Exception):
    """The connection ended in both directions: cut, reset, or closed under a stalled direction."""

    def __init__(self, why: str, never_connected: bool = False) -> None:
        self.never_connected = never_connected
        super().__init__(why)


class Pipe:
    """Reads frames from ``source``, applies ``faults``, and sends the results to ``sink``.

    Both sockets are non-blocking; the sink may still be connecting.  The end of the source is
    passed on after all queued frames.  A stalled pipe keeps reading and discards, so that it
    detects the end of its source.

    Args:
        max_waiting: queued bytes above which the source is not read.
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
        """Whether the source is open and the queue has room."""
        return not self._ended and self._queued + len(self._unsent) <= self._max_waiting

    @property
    def wants_to_write(self) -> bool:
        """Whether frames or the end of the stream are still to be written to the sink."""
        return bool(self._unsent)

    @property
    def next_due(self) -> float | None:
        """When to call :meth:`send_due` even if no socket is ready."""
        dues = [self._queue[0].due] if self._queue else []
        if self._faults.held_until is not None:
            dues.append(self._faults.held_until)
        return min(dues, default=None)

    def read_source(self, now: float) -> None:
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
        for frame in self._cutter.cut_frames(data) if data else self._cutter.take_remainder():
            self._enqueue(self._faults.pass_frame(frame, now))
            if self._faults.state is FlowState.CUT:
                raise PipeLost("cut by a fault")
        if not data:
            self._ended = True
            self._enqueue(self._faults.release_held(now))

    def send_due(self, now: float) -> None:
        """Send the frames that are due, as far as the sink accepts bytes.

        Raises:
            PipeLost: the connection broke.
        """
        if self._faults.held_until is not None and self._faults.held_until <= now:
            self._enqueue(self._faults.release_held(now))
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
