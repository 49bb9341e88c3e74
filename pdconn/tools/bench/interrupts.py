"""Ctrl-C ends a benchmark between two steps, never within one.

Python raises KeyboardInterrupt at any instruction of the main thread.  Within NIXL's bindings that
can end the process (a handle is released twice), and in a finalizer Python prints the exception and
continues: the benchmark would never end.  So SIGINT is only noted, and raised at safe points.  A
second one, which users send when closing takes too long, ends the process at once without closing:
raised during closing, it would free memory that a thread still reads into::

    with held_interrupts(end_now):
        transport.read(...)           # Ctrl-C is noted
        with interruptible():
            results.get(timeout=60)   # raised here, at once
        raise_noted()                 # or here

Python handles signals on the main thread; on other threads this module has no effect.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class _NotedInterrupts:
    """The state of interrupts that are held back."""

    def __init__(self, end_now: Callable[[], object]) -> None:
        self.has_arrived = False
        self._end_now = end_now
        self._is_waiting = False
        self._is_noted = False

    def note_interrupt(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.has_arrived:
            self._end_now()
        self.has_arrived = self._is_noted = True
        if self._is_waiting:
            self.raise_noted()

    def raise_noted(self) -> None:
        if self._is_noted:
            self._is_noted = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interruptible_wait(self) -> Iterator[None]:
        self._is_waiting = True
        try:
            self.raise_noted()
            yield
        finally:
            self._is_waiting = False


class _Here(threading.local):
    """The interrupt state of this thread; used on the main thread only."""

    held: _NotedInterrupts | None = None


_here = _Here()


@contextlib.contextmanager
def held_interrupts(end_now: Callable[[], object]) -> Iterator[None]:
    """Hold Ctrl-C back, except in :func:`interruptible` and :func:`raise_noted`.

    No-op on other threads, or where SIGINT has another handler (or is ignored).

    Args:
        end_now: called at the second one, at any instruction; must end the process.

    Raises:
        KeyboardInterrupt: one was noted, whether the block returned or raised: its error is
            probably a consequence.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _here.held = held = _NotedInterrupts(end_now)
    signal.signal(signal.SIGINT, held.note_interrupt)
    try:
        yield
    except Exception as error:
        if held.has_arrived:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _here.held = None
    held.raise_noted()


def interruptible() -> contextlib.AbstractContextManager[None]:
    """A context in which Ctrl-C may be raised: a wait that leaves no partial state."""
    held = _here.held
    return contextlib.nullcontext() if held is None else held.interruptible_wait()


def raise_noted() -> None:
    """Raise the Ctrl-C that was noted, if any."""
    if _here.held is not None:
        _here.held.raise_noted()
