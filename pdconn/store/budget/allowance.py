"""Bytes that may be written at once: reserved in advance, taken without a system call.

The engine's thread takes; a background thread reserves more, up to a target that doubles when
something could not be given, and falls back slowly when all was::

    share of the capacity, a few rows  <=  target  <=  a quarter of the capacity, by writers
"""

from __future__ import annotations

import threading

from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.records import Usage
from pdconn.store.errors import StoreError

_SHARE = 16
"""An allowance is one byte of so many, divided by the number of writers, until more is missed."""

_MOST = 4
"""As :data:`_SHARE`, of what an allowance may become."""

_FALL = 32
"""Demand falls by one part of so many at each step: to half in 10 s of an idle engine."""


class Allowance:
    """Bytes that are ready.  ``take`` and ``give_back`` on any thread."""

    def __init__(self, least: int) -> None:
        """``least``: bytes that are kept ready where the capacity has room for them."""
        self._least = least
        self._ready = 0
        self._has_missed = False
        self._demand = self._target = 0
        self._lock = threading.Lock()

    @property
    def ready(self) -> int:
        """Bytes that can be taken now."""
        return self._ready

    def take(self, nbytes: int) -> bool:
        """Whether ``nbytes`` may be written."""
        with self._lock:
            if self._ready < nbytes:
                self._has_missed = True
                return False
            self._ready -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Taken bytes were not written."""
        with self._lock:
            self._ready += nbytes

    def lose(self, nbytes: int) -> None:
        """Reserved bytes are reserved no more; where they were taken already, less than none is
        ready until the rows they were taken for are given up."""
        with self._lock:
            self._ready -= nbytes

    def top_up(self, accounts: Accounts) -> None:
        """Reserve up to the target, and return what is far above it.  May wait for the accounts.

        Raises:
            ShelfFailure: neither was done.
        """
        usage = accounts.usage()
        with self._lock:
            target = self._next_target(usage)
            lacking = target - self._ready
            excess = 0
            if -lacking > target // 4:
                excess = -lacking
                self._ready -= excess
        if lacking > 0:
            self.give_back(accounts.reserve(lacking))
        elif excess:
            try:
                accounts.release(excess)
            except StoreError:
                self.give_back(excess)
                raise

    def _next_target(self, usage: Usage) -> int:
        if self._has_missed:
            self._demand = 2 * self._target
        else:
            self._demand -= self._demand // _FALL
        self._has_missed = False
        num_writers = max(1, usage.num_writers)
        usual = max(usage.capacity // (_SHARE * num_writers), self._least)
        most = usage.capacity // (_MOST * num_writers)
        most = max(most, min(self._least, usage.capacity // (2 * num_writers)))
        self._target = min(max(usual, self._demand), most)
        return self._target
