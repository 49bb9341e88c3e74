"""The one thread of a UCX transport: it alone touches UCX, for reader and lender.

    owner ──order──► mailbox ──┐ wakes
    UCX's sockets ─────────────┴─► progress → frames → lender → reader ─┐
                        rest ◄── nothing to do ◄────────────────────────┘

It answers readers while the owner does nothing, and rests in ``epoll`` when
there is nothing to do: on UCX's descriptor, armed, and on the mailbox's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping

from transport.errors import BackendFailure, TransportError
from transport.types import ReadId, Settled
from transport.ucx.frames import is_answer
from transport.ucx.lender import UcxLender
from transport.ucx.library import UcxLibrary
from transport.ucx.reader import UcxReader
from transport.ucx.worker import UcxWorker

_log = logging.getLogger(__name__)

_REST_S = 1.0
"""Longest sleep, so that quiet connections are looked after now and then."""

_ENDING_REST_S = 0.005
"""While connections that were cut wind up, which no event may announce."""

_MAX_PROGRESS = 16

_failed: list[UcxThread] = []
"""Those that ended by an error, kept as long as the process lives.

To collect one would close its connections, which has UCX work: on whichever thread
collects, and into memory that its owner may have freed since.
"""

Order = Callable[[], None]


class UcxThread:
    """Runs from its making until ``close``.

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
            self._wire = UcxWorker(library, options, self._wake_fd)
        except TransportError:
            os.close(self._wake_fd)
            raise
        self.worker_address = self._wire.address
        self.config = self._wire.config
        self.reader = UcxReader(self._wire, settle, clock, draw)
        self.lender = UcxLender(self._wire, secret, clock)
        self._orders: deque[Order] = deque()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"ucx-{name}", daemon=True)
        self._thread.start()

    def post(self, order: Order) -> None:
        """Have the thread do ``order`` soon.

        Raises:
            BackendFailure: the thread ended by an error of its own.
        """
        self.check()
        self._orders.append(order)
        os.eventfd_write(self._wake_fd, 1)

    def check(self) -> None:
        """See that the thread lives; from any thread.

        Raises:
            BackendFailure: it ended by an error of its own.
        """
        if self._failure is not None:
            raise BackendFailure(f"ucx thread ended: {self._failure}") from self._failure

    def close(self, wait_s: float) -> bool:
        """Cut all connections and end; False if something can still be written after ``wait_s``.

        It may be called again then.  Once it returned True nothing is read or written.
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
            self._wire.close()
        except Exception as error:  # noqa: BLE001 - the thread's outermost loop
            _log.exception("ucx thread ended")
            _failed.append(self)
            self._failure = error

    def _step(self) -> bool:
        """One round; whether all is over."""
        worked = False
        for _ in range(_MAX_PROGRESS):
            if not self._wire.progress():
                break
            worked = True
        while self._orders:
            self._orders.popleft()()
            worked = True
        for frame in self._wire.frames():
            (self.reader if is_answer(frame) else self.lender).take(frame)
            worked = True
        worked |= self.lender.step()
        worked |= self.reader.step()
        if self._closing:
            self.lender.close()
            self.reader.close()
            if not self.lender.num_sending and not self.reader.num_outstanding:
                return True
        if not worked:
            ending = self._closing or self.reader.num_leaving or self.lender.num_ending
            self._wire.rest(_ENDING_REST_S if ending else _REST_S)
        return False
