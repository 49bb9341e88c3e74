"""Bytes that may be written at once: reserved in advance, taken without a system call.

The engine's thread takes them from a box; the keeper's reserves more, up to a target that doubles
when something could not be given, and falls back slowly when all was::

    share of the capacity, a few rows  <=  target  <=  a quarter of the capacity, by writers
"""

from __future__ import annotations

from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.records import Usage
from pdconn.store.errors import StoreError
from pdconn.threads import AmountBox

_SHARE = 16
"""An allowance is one byte of so many, divided by the number of writers, until more is missed."""

_MOST = 4
"""As :data:`_SHARE`, of what an allowance may become."""

_FALL = 32
"""Demand falls by one part of so many at each step: to half in 10 s of an idle engine."""


class Allowance:
    """Keeps bytes ready in a box.

    Args:
        least: bytes that are kept ready where the capacity has room for them.

    Attributes:
        room: the box, of which another thread takes.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self.room = AmountBox()
        self._demand = self._target = 0

    @property
    def ready(self) -> int:
        """Bytes that can be taken now."""
        return self.room.amount

    def give_back(self, nbytes: int) -> None:
        """Taken bytes were not written."""
        self.room.add(nbytes)

    def lose(self, nbytes: int) -> None:
        """Reserved bytes are reserved no more; where they were taken already, less than none is
        ready until the rows they were taken for are given up."""
        self.room.add(-nbytes)

    def top_up(self, accounts: Accounts) -> None:
        """Reserve up to the target, and return what is far above it.  May wait for the accounts.

        Raises:
            ShelfFailure: neither was done.
        """
        target = self._next_target(accounts.usage())
        lacking = target - self.ready
        if lacking > 0:
            self.give_back(accounts.reserve(lacking))
        elif excess := self.room.take_above(target, slack=target // 4):
            try:
                accounts.release(excess)
            except StoreError:
                self.give_back(excess)
                raise

    def _next_target(self, usage: Usage) -> int:
        if self.room.take_missed():
            self._demand = 2 * self._target
        else:
            self._demand -= self._demand // _FALL
        num_writers = max(1, usage.num_writers)
        usual = max(usage.capacity // (_SHARE * num_writers), self._least)
        most = usage.capacity // (_MOST * num_writers)
        most = max(most, min(self._least, usage.capacity // (2 * num_writers)))
        self._target = min(max(usual, self._demand), most)
        return self._target
