"""Bytes that may be written at once: reserved in advance, taken without a system call.

The engine's thread takes; a background thread reserves more, up to a target that follows what
was asked for and could not be given.
"""

from __future__ import annotations

import threading

from pdconn.store.budget.accounts import Accounts

_SHARE = 16
"""An allowance is at most one byte of so many, divided by the number of writers."""


class Allowance:
    """Bytes that are ready.  ``take`` and ``give_back`` on any thread."""

    def __init__(self, least: int) -> None:
        """``least``: bytes that are kept ready where the capacity has room for them."""
        self._least = least
        self._ready = 0
        self._missed = 0
        self._lock = threading.Lock()

    @property
    def ready(self) -> int:
        """Bytes that can be taken now."""
        return self._ready

    def take(self, nbytes: int) -> bool:
        """Whether ``nbytes`` may be written."""
        with self._lock:
            if self._ready < nbytes:
                self._missed += nbytes
                return False
            self._ready -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Taken bytes were not written."""
        with self._lock:
            self._ready += nbytes

    def top_up(self, accounts: Accounts) -> None:
        """Reserve up to the target, and return what is above it.  May wait for the accounts."""
        usage = accounts.usage()
        most = usage.capacity // (_SHARE * max(1, usage.num_writers))
        with self._lock:
            missed, self._missed = self._missed, 0
            target = min(max(most, self._least), usage.capacity // 2)
            if missed:
                target = min(max(target, missed), usage.capacity // 4)
            lacking = target - self._ready
        if lacking > 0:
            self.give_back(accounts.reserve(lacking))
        elif -lacking > target:
            with self._lock:
                excess = min(self._ready, -lacking)
                self._ready -= excess
            accounts.release(excess)

    def empty(self) -> int:
        """Take all that is ready; how much."""
        with self._lock:
            taken, self._ready = self._ready, 0
        return taken
