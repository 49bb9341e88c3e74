"""vLLM's engine process is asked to stop, and leases are waited for.

vLLM's engine process notes SIGTERM in a handler of its own, finishes its requests for up to
``--shutdown-timeout`` seconds, and exits.  Leases are not requests, and no hook tells a connector
of the signal, so we stand in front of that handler::

    SIGTERM ──► ShutdownSignal ──► vLLM's handler
                     │
    engine loop: any work left? ──► has_pending_push_work() ──► leases, if a stop was requested

Replaced: the handlers of SIGTERM and SIGINT in the engine's process, if they are vLLM's.
Checked at the start: handlers of other programs are left alone, and an engine stops without
waiting for leases then.
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
"""Left of the shutdown time-out for closing the engine, before vLLM kills the process."""


def drain_s(config: Any) -> float:
    """Seconds that leases may hold up an engine that was asked to stop.

    Args:
        config: vLLM's configuration; without ``--shutdown-timeout`` nothing is waited for.
    """
    return max(0.0, config.shutdown_timeout - _TEARDOWN_S)


class ShutdownSignal:
    """Notes that vLLM's engine process was asked to stop.

    Args:
        wait_s: seconds that leases may hold it up then.

    Attributes:
        requested_at: when the first signal since :meth:`watch` came, by ``clock``; None before.
    """

    def __init__(self, clock: Callable[[], float] = steady, wait_s: float = 0.0) -> None:
        self._clock, self._wait_s = clock, wait_s
        self.requested_at: float | None = None

    @property
    def until(self) -> float | None:
        """Until when leases may hold it up, by ``clock``; None while no stop was requested."""
        return None if self.requested_at is None else self.requested_at + self._wait_s

    def watch(self) -> None:
        """Stand in front of vLLM's handlers; handlers of other programs are left alone."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may, and vLLM's engine process builds us there
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
