"""Threads of ours, and the boxes between them: all that two threads share.

::

    engine's thread ── put ──► inbox  ── take ──► Worker: one thread, one run()
                    ◄── take ── outbox ◄── put ──

A thread owns what it works on, and no other thread looks at it.  What one is to know of another
travels in a :class:`Box`; who puts a mutable thing into a box does not touch it any more.  So
no class but those of this file needs a lock (``tests/threads/test_boundary.py``).

``put`` never blocks.  How the owner is woken depends on where it sleeps: in ``wait`` and
``take_one`` on a lock, in a selector on ``socket``.  An item that can wait until the owner wakes
anyway is put without waking it, and the owner looks once more before it sleeps::

    others   put an item quietly  ──►  is the owner's sleep too long?  ──►  wake
    owner    publish until when it sleeps  ──►  is there an item?  ──►  sleep

Whichever comes second sees the other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
In = TypeVar("In")

_FEW = 64
"""Bytes of a recv: one waits as a rule, and Python allocates what may come."""


class Box(Generic[T]):
    """Items in order, from any number of threads to the one that owns the box.

    Several threads may own a box together; each item is taken by one of them.

    Attributes:
        items: what was put and not taken yet; the owner may look whether there is any.
        is_closed: nothing more is awaited; owners end when they have done what they must.
        sleeps_until: when the owner wakes by itself, as it has published.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.is_closed = False
        self.sleeps_until = math.inf
        self._sleepers: deque[threading.Lock] = deque()

    def put(self, item: T) -> None:
        """Add ``item`` and wake an owner."""
        self.items.append(item)
        self.wake()

    def put_all(self, items: Iterable[T]) -> None:
        """Add ``items``, and wake an owner for each, up to all of them."""
        added = list(items)
        self.items.extend(added)
        for _ in range(min(len(added), len(self._sleepers) or 1)):
            self.wake()

    def put_first(self, items: Iterable[T]) -> None:
        """Add ``items`` in order before all others, and wake owners as :meth:`put_all` does."""
        added = list(items)
        self.items.extendleft(reversed(added))
        for _ in range(min(len(added), len(self._sleepers) or 1)):
            self.wake()

    def put_quietly(self, item: T) -> None:
        """Add ``item``, which is found when the owner wakes."""
        self.items.append(item)

    def put_before(self, item: T, due: float) -> None:
        """Add ``item``; wake the owner only if it sleeps longer than until ``due``."""
        self.items.append(item)
        if self.sleeps_until > due:
            self.wake()

    def take(self) -> list[T]:
        """Everything put so far, in order; never blocks."""
        items: list[T] = []
        waiting = self.items
        try:
            for _ in range(len(waiting)):
                items.append(waiting.popleft())
        except IndexError:
            return items  # another owner took the last of them
        return items

    def take_back(self, is_meant: Callable[[T], bool]) -> list[T]:
        """Take what was put by the caller and no owner has taken yet; the rest keeps its order."""
        found = []
        for item in [item for item in list(self.items) if is_meant(item)]:
            try:
                self.items.remove(item)  # in one step: items are compared by identity
            except ValueError:
                continue  # an owner was quicker
            found.append(item)
        return found

    def take_one(self, timeout_s: float | None = None) -> T | None:
        """The next item, once there is one; None when the time is over or the box is closed."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return self.items.popleft()
            except IndexError:
                left = None if until is None else until - time.monotonic()
            if self.is_closed or (left is not None and left <= 0):
                return None
            self.wait(left)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until there is an item or the box is closed; whether there is an item."""
        if self.items or self.is_closed:
            return bool(self.items)
        bed = threading.Lock()
        bed.acquire()
        self._sleepers.append(bed)
        is_woken = False
        try:
            # What was put before the line above has seen no sleeper.
            if not self.items and not self.is_closed:
                is_woken = bed.acquire(timeout=-1 if timeout_s is None else timeout_s)
        finally:
            if not is_woken:
                with contextlib.suppress(ValueError):  # it is woken just now
                    self._sleepers.remove(bed)
        return bool(self.items)

    def wake(self) -> None:
        """Have one sleeping owner look."""
        try:
            bed = self._sleepers.popleft()
        except IndexError:
            return
        bed.release()

    def close(self) -> None:
        """Let the owners end.  Later items are kept."""
        self.is_closed = True
        for _ in range(len(self._sleepers)):
            self.wake()


class SelectedBox(Box[T]):
    """A box whose owner sleeps in a selector, on ``socket``, and wakes for other sockets, too.

    One byte suffices until the owner has drained it.  Writing it releases Python's lock, and an
    owner that was woken a moment ago is waiting for exactly that lock: the engine's thread would
    stand still until the owner has handled everything put before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.socket, self._poke = socket.socketpair()
        self.socket.setblocking(False)
        self._poke.setblocking(False)
        self._poked = False

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

    def close(self) -> None:
        """Let the owner end."""
        self.is_closed = True
        self.wake()

    def free_sockets(self) -> None:
        """Close both ends, once the owner has ended; later items are kept and ignored."""
        self.socket.close()
        self._poke.close()


class AmountBox:
    """An amount that one thread adds to, and another takes from if there is enough."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_missed = False
        self.amount = 0

    def add(self, amount: int) -> None:
        """Add ``amount``; a negative one may leave less than nothing."""
        with self._lock:
            self.amount += amount

    def take_amount(self, amount: int) -> bool:
        """Take ``amount``, or nothing where less is there."""
        with self._lock:
            if self.amount < amount:
                self._has_missed = True
                return False
            self.amount -= amount
            return True

    def take_above(self, target: int, slack: int) -> int:
        """Take what is above ``target``, if that is more than ``slack``; how much it was."""
        with self._lock:
            excess = self.amount - target
            if excess <= slack:
                return 0
            self.amount = target
            return excess

    def take_missed(self) -> bool:
        """Whether something could not be taken since the last call."""
        with self._lock:
            missed, self._has_missed = self._has_missed, False
            return missed


@dataclass(frozen=True, slots=True)
class ThreadDied:
    """A thread ended by an error; what it had taken from its inbox is not answered."""

    thread: str
    error: str


class Worker(Generic[In]):
    """A thread that takes from ``inbox`` and puts to ``outbox``.

    Args:
        name: the thread's.
        run: its whole life; it ends soon after the inbox is closed.  An exception is logged,
            and the last item that it puts is a :class:`ThreadDied`.
        inbox: owned by the thread, or together with others.
        outbox: of whoever is to know what it did.
    """

    def __init__(
        self, name: str, run: Callable[[], None], inbox: Box[In], outbox: Box[Any]
    ) -> None:
        self.name, self.inbox, self.outbox = name, inbox, outbox
        self._work = run
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system has no thread to spare.
        """
        self._thread.start()

    def end(self, timeout_s: float | None = None) -> bool:
        """Close the inbox and wait for the thread; whether it has ended.  Idempotent."""
        self.inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            name = self.name.removeprefix("pdconn-")
            log.critical("pdconn: the %s thread stopped", name, exc_info=True)
            self.outbox.put(ThreadDied(self.name, f"{type(error).__name__}: {error}"))
