"""Worker threads and the boxes between them: all that two threads share.

::

    engine's thread ── put ──────► inbox  ── take_all ──► Worker: one thread, one function
                    ◄── take_all ── outbox ◄── put ──────

A thread owns the objects that it works on, and no other thread reads them.  Threads exchange
items through a :class:`Box`; the sender does not touch an item after ``put``.  So only the
classes of this file hold locks (``tests/threads/test_boundary.py``).
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

from pdconn.lifecycle.turns import MOST_WAIT_S, TurnKey, TurnQueue, Urgency

log = logging.getLogger(__name__)

T = TypeVar("T")
In = TypeVar("In")

_FEW = 64
"""Bytes of a recv.  One is the rule, and Python allocates the maximum first."""


class Box(Generic[T]):
    """Items in order, from any number of threads to the one that owns the box.

    Several threads may own a box together; each item is taken by one of them.

    Attributes:
        items: put and not taken yet; the owner may test whether it is empty.
        is_closed: whether the owners are to end.
        sleeps_until: when the owner wakes by itself; the owner sets it before it sleeps.
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
        """Add ``item`` without waking an owner."""
        self.items.append(item)

    def put_before(self, item: T, due: float) -> None:
        """Add ``item``; wake the owner only if it sleeps longer than until ``due``."""
        # The owner sets ``sleeps_until`` first and tests ``items`` second; here it is the other way
        # round.  So whichever thread comes second sees what the first one did.
        self.items.append(item)
        if self.sleeps_until > due:
            self.wake()

    def take_all(self) -> list[T]:
        """Take all items, in order.  Never blocks."""
        items: list[T] = []
        waiting = self.items
        try:
            for _ in range(len(waiting)):
                items.append(waiting.popleft())
        except IndexError:
            return items  # another owner took the last of them
        return items

    def take_back(self, is_meant: Callable[[T], bool]) -> list[T]:
        """Take the matching items that no owner has taken yet; the others keep their order."""
        found = []
        for item in [item for item in list(self.items) if is_meant(item)]:
            try:
                self.items.remove(item)  # in one step: items are compared by identity
            except ValueError:
                continue  # an owner has taken it meanwhile
            found.append(item)
        return found

    def take_one(self, timeout_s: float | None = None) -> T | None:
        """Wait for an item and take it; None after ``timeout_s`` or when the box is closed."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return self.items.popleft()
            except IndexError:
                left = None if until is None else until - time.monotonic()
            if self.is_closed or (left is not None and left <= 0):
                return None
            self.wait_for_item(left)

    def wait_for_item(self, timeout_s: float | None = None) -> bool:
        """Sleep until there is an item or the box is closed; whether there is an item."""
        if self.items or self.is_closed:
            return bool(self.items)
        bed = threading.Lock()
        bed.acquire()
        self._sleepers.append(bed)
        is_woken = False
        try:
            # An item that was put before the line above has woken no sleeper.
            if not self.items and not self.is_closed:
                is_woken = bed.acquire(timeout=-1 if timeout_s is None else timeout_s)
        finally:
            if not is_woken:
                with contextlib.suppress(ValueError):  # wake() has removed it meanwhile
                    self._sleepers.remove(bed)
        return bool(self.items)

    def wake(self) -> None:
        """Wake one sleeping owner."""
        try:
            bed = self._sleepers.popleft()
        except IndexError:
            return
        bed.release()

    def close(self) -> None:
        """Wake all owners, which end.  Items put later are kept."""
        self.is_closed = True
        for _ in range(len(self._sleepers)):
            self.wake()


class SelectedBox(Box[T]):
    """A box whose owner sleeps in a selector, on ``socket`` and on sockets of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.socket, self._poke = socket.socketpair()
        self.socket.setblocking(False)
        self._poke.setblocking(False)
        self._poked = False

    def wake(self) -> None:
        """Make ``select`` return.

        Where the system has no room for a byte, the next ``put`` tries again.
        """
        # One byte suffices until the owner has read it.  Writing a second one would release the
        # interpreter's lock to an owner that waits for exactly that lock: the engine's thread would
        # wait until the owner has handled all items before this one.
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

    def drain_socket(self) -> None:
        """Read the wake-up bytes.  Call it when the socket is readable, before :meth:`take_all`."""
        try:
            while len(self.socket.recv(_FEW)) == _FEW:
                pass
        except BlockingIOError:
            pass
        # Reset before the items are taken: every later put writes a new byte, and a put that
        # skipped the byte has appended its item already.
        self._poked = False

    def close(self) -> None:
        """Let the owner end."""
        self.is_closed = True
        self.wake()

    def free_sockets(self) -> None:
        """Close both ends, once the owner has ended.  Items put later are never taken."""
        self.socket.close()
        self._poke.close()


class AmountBox:
    """A counter that one thread adds to, and another subtracts from if there is enough."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_missed = False
        self.amount = 0

    def add_amount(self, amount: int) -> None:
        """Add ``amount``, which may be negative; so may the result."""
        with self._lock:
            self.amount += amount

    def take_amount(self, amount: int) -> bool:
        """Subtract ``amount`` if there is as much; whether there was."""
        with self._lock:
            if self.amount < amount:
                self._has_missed = True
                return False
            self.amount -= amount
            return True

    def note_missed(self) -> None:
        """Note that more was wanted than might be taken."""
        with self._lock:
            self._has_missed = True

    def take_above(self, target: int, slack: int) -> int:
        """Subtract the excess over ``target`` if it exceeds ``slack``; returns it, or 0."""
        with self._lock:
            excess = self.amount - target
            if excess <= slack:
                return 0
            self.amount = target
            return excess

    def take_missed(self) -> bool:
        """Whether more was wanted than there was since the last call."""
        with self._lock:
            missed, self._has_missed = self._has_missed, False
            return missed


@dataclass(frozen=True, slots=True)
class ThreadDied:
    """A thread ended with an error.  Items that it had taken from its inbox are not answered."""

    thread: str
    error: str


@dataclass(frozen=True, slots=True)
class ThreadTurn(Generic[T]):
    """Reports of one turn of a thread, in order, and counts of events in it."""

    reports: list[T]
    counts: dict[str, int]


class ThreadReports(Generic[T]):
    """The engine's end of a thread's outbox: reports and counts until they are taken.

    Attributes:
        outbox: where the thread puts its turns.
        reports: taken in, and not removed by the owner yet.
        counts: likewise.
        error: why the thread has died; None while it has not.
    """

    def __init__(self) -> None:
        self.outbox: Box[ThreadTurn[T] | ThreadDied] = Box()
        self.reports: list[T] = []
        self.counts: dict[str, int] = {}
        self.error: str | None = None

    def take_in(self) -> None:
        """Take in what the thread has put.  Never blocks."""
        if not self.outbox.items:  # in most steps
            return
        for turn in self.outbox.take_all():
            if isinstance(turn, ThreadDied):
                self.error = turn.error
            else:
                self.reports += turn.reports
                for name, amount in turn.counts.items():
                    self.counts[name] = self.counts.get(name, 0) + amount

    def remove_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        self.take_in()
        counts, self.counts = self.counts, {}
        return counts


def put_turn(
    outbox: Box[ThreadTurn[T] | ThreadDied], reports: list[T], counts: dict[str, int]
) -> None:
    """Move ``reports`` and ``counts`` into ``outbox``; counts alone wake no owner."""
    if not (reports or counts):
        return
    turn = ThreadTurn(reports.copy(), dict(counts))
    reports.clear()
    counts.clear()
    if turn.reports:
        outbox.put(turn)
    else:
        outbox.put_quietly(turn)


class Worker(Generic[In]):
    """A thread that takes from ``inbox`` and puts to ``outbox``.

    Args:
        name: of the thread.
        run: the function that the thread runs; it returns soon after the inbox is closed.  An
            exception is logged, and a :class:`ThreadDied` is put into the outbox.
        inbox: owned by the thread, or by several.
        outbox: receives results.
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

    def start_thread(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system cannot start a thread.
        """
        self._thread.start()

    def end_thread(self, timeout_s: float | None = None) -> bool:
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


class RightOfWay:
    """What other threads move: work that is less urgent gives way to it.

    One thread says what is the most urgent of it; the others ask before each piece of their work.
    """

    def __init__(self) -> None:
        # A box of such work has the same lock, since its owners sleep until either changes.
        self.changed = threading.Condition()
        self.most_urgent: Urgency | None = None

    def set_most_urgent(self, urgency: Urgency | None) -> None:
        """Say what is the most urgent class that is moved; None if nothing is."""
        if urgency is not self.most_urgent:
            with self.changed:
                self.most_urgent = urgency
                self.changed.notify_all()

    def give_way(self, urgency: Urgency) -> bool:
        """Wait until nothing more urgent is moved, for as long as the class waits at most.

        Returns:
            Whether nothing more urgent is moved now.
        """
        if self._is_free(urgency):
            return True
        with self.changed:
            return self.changed.wait_for(lambda: self._is_free(urgency), MOST_WAIT_S[urgency])

    def _is_free(self, urgency: Urgency) -> bool:
        known = self.most_urgent
        return known is None or known >= urgency


class TurnBox(Box[T]):
    """A box whose items are taken in the order of :mod:`pdconn.lifecycle.turns`.

    Args:
        turn_of: what an item is served by.
        right_of_way: of what other threads move.
    """

    def __init__(self, turn_of: Callable[[T], TurnKey], right_of_way: RightOfWay) -> None:
        super().__init__()
        self._turn_of, self._way = turn_of, right_of_way
        self._changed = right_of_way.changed
        self._queue: TurnQueue[T] = TurnQueue()

    def __len__(self) -> int:
        """Items that no owner has taken."""
        return len(self._queue)

    def put(self, item: T) -> None:
        """Add ``item`` and wake an owner."""
        turn = self._turn_of(item)
        with self._changed:
            self._queue.add_item(item, turn)
            self._changed.notify()

    def put_all(self, items: Iterable[T]) -> None:
        """Add ``items``, and wake the owners."""
        for item in items:
            self.put(item)

    def put_first(self, items: Iterable[T]) -> None:
        """Add ``items`` in order before the others of their class and tenant; wake the owners."""
        turns = [(item, self._turn_of(item)) for item in items]
        with self._changed:
            self._queue.add_first(turns)
            self._changed.notify_all()

    def put_quietly(self, item: T) -> None:
        """Add ``item`` without waking an owner."""
        with self._changed:
            self._queue.add_item(item, self._turn_of(item))

    def take_all(self) -> list[T]:
        """Take all items.  Never blocks."""
        return self.take_back(lambda item: True)

    def take_back(self, is_meant: Callable[[T], bool]) -> list[T]:
        """Take the matching items that no owner has taken yet; the others keep their order."""
        with self._changed:
            return self._queue.remove_items(is_meant)

    def take_one(self, timeout_s: float | None = None) -> T | None:
        """Wait for an item that may be taken; None after ``timeout_s`` or when it is closed."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                item = self._queue.take_item(now, self._way.most_urgent)
                if item is not None or self.is_closed or now >= until:
                    return item
                due = self._queue.due_at()
                wakes = until if due is None else min(until, due)
                self._changed.wait(None if wakes == math.inf else max(0.0, wakes - now))

    def first_item(self) -> T | None:
        """The item that an owner would take now."""
        with self._changed:
            return self._queue.first_item(time.monotonic(), self._way.most_urgent)

    def take_overdue(self) -> int:
        """Items that were taken while more urgent ones waited, since the last call."""
        with self._changed:
            return self._queue.take_overdue()

    def wake(self) -> None:
        """Wake the owners."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all owners, which end.  Items put later are kept."""
        self.is_closed = True
        self.wake()
