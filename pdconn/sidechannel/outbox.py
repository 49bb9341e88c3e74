"""What one of our threads hands to the engine's thread: reports and counts.

The other direction is :mod:`pdconn.sidechannel.wakeup_queue`.  A core keeps reports and
counts that its own thread alone touches; the shell around it moves them here once per turn
of its loop, and the engine's thread takes them, under one lock that is held for a few
additions.  Without the lock an increment that meets the swap of a counter is lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Reports in order, and counts, from one thread to another.  Nothing blocks for long.

    Attributes:
        has_reports: whether :meth:`take_reports` has something to return.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: list[T] = []
        self.has_reports = False
        self._counts: Counter[str] = Counter()

    def put(self, reports: Iterable[T] = (), counts: Mapping[str, int] | None = None) -> None:
        """Add ``reports``, and ``counts`` to those that were not taken yet."""
        with self._lock:
            self._reports.extend(reports)
            self.has_reports = bool(self._reports)
            if counts:
                self._counts.update(counts)

    @property
    def counts(self) -> Counter[str]:
        """A copy of what was counted since :meth:`take_counts`; safe on any thread."""
        with self._lock:
            return Counter(self._counts)

    def take_reports(self) -> list[T]:
        """Every report since the last call, oldest first."""
        if not self.has_reports:
            return []
        with self._lock:
            reports, self._reports = self._reports, []
            self.has_reports = False
        return reports

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        if not self._counts:
            return {}
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)
