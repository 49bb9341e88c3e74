"""What a rank's store threads report to the engine's thread: results, counts, few warnings."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.commands import StoreResult
from pdconn.store.settings import REPEAT_S

log = logging.getLogger(__name__)


class StoreReports:
    """Any thread adds, the engine's thread takes; nothing blocks for long.

    Args:
        wake: called on the adding thread whenever something was added that a scheduler or a
            request may wait for.
    """

    def __init__(
        self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wake = wake
        self._warnings = QuietLog(log, clock, pause_s=REPEAT_S)
        self._lock = threading.Lock()
        self._results: list[StoreResult] = []
        self._loaded: list[str] = []
        self._failed: list[str] = []
        self._counts: Counter[str] = Counter()

    @property
    def has_any(self) -> bool:
        """Whether there is a result or a request to take."""
        return bool(self._results or self._loaded or self._failed)

    def answer(self, result: StoreResult) -> None:
        """Add an answer for the scheduler."""
        with self._lock:
            self._results.append(result)
        self._awake()

    def loaded(self, request: str) -> None:
        """Add a request whose rows are in its blocks."""
        with self._lock:
            self._loaded.append(request)
        self._awake()

    def load_failed(self, request: str) -> None:
        """Add a request whose blocks do not hold what they should."""
        with self._lock:
            self._failed.append(request)
        self._awake()

    def count(self, **counts: int) -> None:
        """Add to the counts that were not taken yet."""
        with self._lock:
            self._counts.update(counts)

    def warn(self, text: str, *values: object) -> None:
        """Log a warning; each text at most once in ``REPEAT_S``."""
        self._warnings.warning(f"pdconn: store: {text}", *values)

    def _awake(self) -> None:
        try:
            self._wake()
        except Exception:  # the caller's; the report is there all the same
            log.exception("pdconn: store: a wake-up failed")

    def take_results(self) -> list[StoreResult]:
        """Answers since the last call, oldest first."""
        with self._lock:
            taken, self._results = self._results, []
        return taken

    def take_loaded(self) -> list[str]:
        """Requests loaded since the last call, oldest first."""
        with self._lock:
            taken, self._loaded = self._loaded, []
        return taken

    def take_failed(self) -> list[str]:
        """Requests whose load failed since the last call, oldest first."""
        with self._lock:
            taken, self._failed = self._failed, []
        return taken

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        if not self._counts:
            return {}
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)
