"""A breaker: what does not answer is left alone for a while, then tried once.  Pure.

::

    closed ──failed──► open ──pause over──► one try is allowed ──succeeded──► closed
                        ▲                            │ failed
                        └──── a longer pause ────────┘

The bucket of an object store has one, which its calls ask, so that they fail at once behind a
server that is down.  The store's scheduler has one, which requests ask, so that one of them waits
for a shelf that hangs and the others compute; that one is for shelves of all kinds, since no call
comes back from a file system that hangs.
"""

from __future__ import annotations


class Breaker:
    """Whether something is to be tried now.

    Fields change by one assignment each, so that threads may share one: at worst two of them try.

    Args:
        pause_s: after the first failure.
        longest_s: each further failure doubles the pause, up to this.
    """

    def __init__(self, pause_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = pause_s, longest_s
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last try failed."""
        return self._pause_s > 0

    def allows(self, now: float) -> bool:
        """Whether to try now.  While open: once after each pause, so not again before the next."""
        if not self.is_open:
            return True
        if now < self._until:
            return False
        self._until = now + self._pause_s
        return True

    def left_s(self, now: float) -> float:
        """Seconds until a try is allowed."""
        return max(0.0, self._until - now) if self.is_open else 0.0

    def failed(self, now: float) -> None:
        """A try failed, or took too long."""
        self._pause_s = min(2 * self._pause_s, self._longest_s) or self._first_s
        self._until = now + self._pause_s

    def succeeded(self) -> None:
        """A try was answered in time."""
        self._pause_s = 0.0
