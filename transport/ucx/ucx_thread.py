"""The one thread of a UCX transport: it alone touches UCX, for reader and lender.

    owner ──command──► queue ──┐ wakes
    UCX's sockets ─────────────┴─► progress → frames → lender → reader ─┐
                        wait ◄── nothing to do ◄────────────────────────┘

It answers readers while the owner does nothing.  When there is nothing to do it waits in ``epoll``,
on UCX's descriptor, armed, and on an eventfd for the owner's commands.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping

from transport.errors import BackendFailure, TransportError
from transport.types import ReadId, Settled
from transport.ucx.control import is_answer
from transport.ucx.lender_side import UcxLender
from transport.ucx.library import UcxLibrary
from transport.ucx.reader_side import UcxReader
from transport.ucx.ucx_worker import UcxWorker

_log = logging.getLogger(__name__)

_MAX_WAIT_S = 1.0
"""Longest sleep, so that idle connections are checked regularly."""

_ENDING_WAIT_S = 0.005
"""Longest sleep while closed connections end, which may cause no event."""

_MAX_PROGRESS = 16

_failed: list[UcxThread] = []
"""Threads that ended with an error, kept until the process ends.

Collecting one would close its connections, in which UCX makes progress: on the thread of the
garbage collector, and into memory that its owner may have freed.
"""

Command = Callable[[], None]


class UcxThread:
    """Runs from construction until ``close``.

    Args:
        settle: called on the thread with each read that ended.

    Raises:
        BackendFailure: UCX does not start.
    """

    def __init__(
        self,
        name: str,
        *,
        library: UcxLibrary,
        options: Mapping[str, str],
        secret: bytes,
        settle: Callable[[ReadId, Settled], None],
        clock: Callable[[], float],
        draw: Callable[[int], int],
    ) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._worker = UcxWorker(library, options, self._wake_fd)
        except TransportError:
            os.close(self._wake_fd)
            raise
        self.worker_address = self._worker.address
        self.config = self._worker.config
        self.reader = UcxReader(self._worker, settle, clock, draw)
        self.lender = UcxLender(self._worker, secret, clock)
        self._commands: deque[Command] = deque()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"ucx-{name}", daemon=True)
        self._thread.start()

    def run_soon(self, command: Command) -> None:
        """Queue ``command`` for the thread.

        Raises:
            BackendFailure: the thread has ended with an error.
        """
        self.raise_failure()
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    def raise_failure(self) -> None:
        """Raise if the thread has failed; may be called on any thread.

        Raises:
            BackendFailure: it has ended with an error.
        """
        if self._failure is not None:
            raise BackendFailure(f"ucx thread ended: {self._failure}") from self._failure

    def close(self, wait_s: float) -> bool:
        """Close all connections and end; False if something can still be written after ``wait_s``.

        It may be called again then.  Once it has returned True nothing is read or written.
        """
        if self._wake_fd < 0:
            return True
        if self._thread.is_alive():
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join(wait_s)
        if self._thread.is_alive() or self._failure is not None:
            return False
        os.close(self._wake_fd)
        self._wake_fd = -1
        return True

    def _run(self) -> None:
        try:
            while not self._step():
                pass
            self._worker.close()
        except Exception as error:  # noqa: BLE001 - the thread's outermost loop
            _log.exception("pdconn: ucx thread ended")
            _failed.append(self)
            self._failure = error

    def _step(self) -> bool:
        """One round; whether the thread is to end."""
        worked = False
        for _ in range(_MAX_PROGRESS):
            if not self._worker.progress():
                break
            worked = True
        while self._commands:
            self._commands.popleft()()
            worked = True
        for frame in self._worker.frames():
            (self.reader if is_answer(frame) else self.lender).handle_frame(frame)
            worked = True
        worked |= self.lender.serve_readers()
        worked |= self.reader.advance_reads()
        if self._closing:
            self.lender.close()
            self.reader.close()
            if not self.lender.num_sending and not self.reader.num_outstanding:
                return True
        if not worked:
            ending = self._closing or self.reader.num_ending or self.lender.num_ending
            self._worker.wait_for_work(_ENDING_WAIT_S if ending else _MAX_WAIT_S)
        return False
