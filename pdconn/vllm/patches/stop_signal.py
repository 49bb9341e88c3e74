"""Lets vLLM's engine process wait for leases when it is shutting down.

vLLM's engine process handles SIGTERM: it finishes its requests for up to ``--shutdown-timeout``
seconds, and exits.  Leases are not requests, and no hook notifies a connector of the signal, so
that handler is wrapped::

    SIGTERM ──► ShutdownSignal ──► vLLM's handler
                     │
    engine loop: any work left? ──► has_pending_push_work() ──► leases, if a stop was requested

Replaced: the handlers of SIGTERM and SIGINT in the engine's process, if they are vLLM's.
Checked at the start: handlers of other programs are kept, and an engine stops without waiting for
leases then.
Tested by ``tests/vllm/patches/test_stop_signal.py``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from pdconn.sidechannel.clock import steady

SOURCES = {
    "vllm.v1.engine.core:EngineCoreProc.run_engine_core": (1391, 1462),
}

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_TEARDOWN_S = 1.0
"""Reserved of the shutdown time-out for closing the engine, before vLLM kills the process."""


def drain_s(config: Any) -> float:
    """Seconds for which an engine that is shutting down may wait for leases.

    Args:
        config: vLLM's configuration; without ``--shutdown-timeout`` the engine does not wait.
    """
    return max(0.0, config.shutdown_timeout - _TEARDOWN_S)


class ShutdownSignal:
    """Records that vLLM's engine process has been signalled to stop.

    Args:
        wait_s: seconds for which it may wait for leases then.

    Attributes:
        requested_at: when the first signal arrived, by ``clock``; None before.
    """

    def __init__(self, clock: Callable[[], float] = steady, wait_s: float = 0.0) -> None:
        self._clock, self._wait_s = clock, wait_s
        self.requested_at: float | None = None

    @property
    def until(self) -> float | None:
        """Until when it may wait for leases, by ``clock``; None while no stop was requested."""
        return None if self.requested_at is None else self.requested_at + self._wait_s

    def install_handlers(self) -> None:
        """Wrap vLLM's signal handlers; handlers of other programs are kept."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; vLLM's engine process creates us there
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and getattr(handler, "__module__", "").startswith("vllm."):
                signal.signal(number, self._noting(handler))

    def _noting(self, handler: Any) -> Any:
        def note(number: int, frame: FrameType | None) -> Any:
            if self.requested_at is None:
                self.requested_at = self._clock()
            return handler(number, frame)

        return note
