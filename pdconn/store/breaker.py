"""A circuit breaker: after a failure calls are refused for a while, then one is tried.

::

    closed ──failed──► open ──pause over──► one try is allowed ──succeeded──► closed
                        ▲                            │ failed
                        └──── a longer pause ────────┘

The bucket of an object store has one: its calls fail at once while the server is down.  The
store's scheduler has one in its :class:`LoadPatience`: while the shelf hangs, one request waits for
it and the others are computed.  That one serves shelves of every kind, since a call to a file
system that hangs does not return.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_S = 5.0, 60.0
"""How long no request is looked up after one has timed out; doubled each time."""


class Breaker:
    """Decides whether a call is made now.

    Threads may share one: each field changes by one assignment, so that at worst two of them try.

    Args:
        pause_s: the pause after the first failure.
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
        """Note that a try failed, or took too long."""
        self._pause_s = min(2 * self._pause_s, self._longest_s) or self._first_s
        self._until = now + self._pause_s

    def succeeded(self) -> None:
        """Note that a try was answered in time."""
        self._pause_s = 0.0


class LoadPatience:
    """Limits how long requests wait for the shelf: while it hangs one of them does, the others not.

    One thread; all times are of one clock.
    """

    def __init__(self) -> None:
        self._breaker = Breaker(_PAUSE_S, _LONGEST_S)
        self._trying = ""

    @property
    def is_hung(self) -> bool:
        """Whether the last request that waited for the shelf got no answer."""
        return self._breaker.is_open

    def admits(self, request: str, now: float) -> bool:
        """Whether a request may be looked up: while the shelf hangs one may, after each pause."""
        was_open = self._breaker.is_open
        if not self._breaker.allows(now):
            return False
        self._trying = request if was_open else ""
        return True

    def is_over(self, request: str, waited_s: float, most_s: float, now: float) -> bool:
        """Whether a request stops waiting for the shelf, and is computed."""
        # 1. Within its time it waits, unless the shelf hangs and another request tries it.
        if waited_s <= most_s:
            return self._breaker.is_open and request != self._trying
        # 2. It has waited too long.  Only the first such request, and the one that tries, count as
        #    failures: others of the same hang would lengthen the pause.
        if not self._breaker.is_open or request == self._trying:
            self._trying = ""
            self._breaker.failed(now)
            log.warning(
                "pdconn: store: the shelf does not answer, prompts are computed for %.0f s: "
                "request=%s waited=%.1f",
                self._breaker.left_s(now),
                request,
                waited_s,
            )
        return True

    def shelf_answered(self) -> None:
        """Note that the shelf answered in time."""
        if self._breaker.is_open:
            log.info("pdconn: store: the shelf answers again")
            self._breaker.succeeded()
