"""The two queues between an engine's thread and one of ours.

::

    engine's thread ── put ──► WakeupQueue ── take ──► our thread
                    ◄── take_… ── Outbox ◄── put ─────

:meth:`WakeupQueue.put` never blocks: it appends, and writes one byte to a socket pair that the
owner selects on.  An item that can wait until the owner wakes anyway is put quietly, without
the byte; the owner looks once more before it sleeps::

    engine   put an item quietly  ──►  is the owner's sleep too long?  ──►  wake
    owner    publish until when it sleeps  ──►  is there an item?  ──►  select

Whichever comes second sees the other.

One byte suffices until the owner has drained it.  Writing it releases Python's lock, and an
owner that was woken a moment ago is waiting for exactly that lock: the engine's thread would
stand still until the owner has handled everything put before.

Back goes what a core reports and counts.  Its own thread alone touches that; the shell around
it moves it to the outbox once per turn of its loop, and the engine's thread takes it, under one
lock that is held for a few additions.  Without the lock an increment that meets the swap of a
counter is lost.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

_FEW = 64
"""Bytes of a recv: one waits as a rule, and Python allocates what may come."""


class WakeupQueue(Generic[T]):
    """Any number of threads put; one owner selects on ``self.socket`` and takes.

    Attributes:
        items: what was put and not taken yet; the owner may look whether there is any.
    """

    def __init__(self) -> None:
        self.socket, self._poke = socket.socketpair()
        self.socket.setblocking(False)
        self._poke.setblocking(False)
        self.items: deque[T] = deque()
        self._poked = False

    def put(self, item: T) -> None:
        """Add ``item`` and wake the owner."""
        self.items.append(item)
        self.wake()

    def put_quietly(self, item: T) -> None:
        """Add ``item`` without waking the owner."""
        self.items.append(item)

    def wake(self) -> None:
        """Make ``select`` return.  A full or closed pipe means it will, or need not.

        Where the system has no room for a byte, the next ``put`` tries again.
        """
        if self._poked:
            return
        try:
            self._poked = True
            self._poke.send(b"\0")
        except BlockingIOError:
            pass
        except OSError:
            self._poked = False
        except BaseException:  # raised by a signal handler: the next put writes the byte
            self._poked = False
            raise

    def drain(self) -> None:
        """Read the wake-up bytes: call it when the socket is readable, before :meth:`take`."""
        try:
            while len(self.socket.recv(_FEW)) == _FEW:
                pass
        except BlockingIOError:
            pass
        # Reset before the items are taken: every later put writes a new byte, and a put that
        # wrote none because of an earlier byte has appended its item already.
        self._poked = False

    def take(self) -> list[T]:
        """Everything put so far, in order.  Only the owner calls this."""
        items: list[T] = []
        while self.items:
            items.append(self.items.popleft())
        return items

    def close(self) -> None:
        """Close both ends; later items are kept and ignored."""
        self.socket.close()
        self._poke.close()


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
