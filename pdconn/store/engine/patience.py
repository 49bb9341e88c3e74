"""How long requests wait for the shelf: one of them while it hangs, and the others not at all."""

from __future__ import annotations

import logging

from pdconn.store.breaker import Breaker

log = logging.getLogger(__name__)

LOOKUP_S = 5.0
"""How long a request waits for its look-up, and for room in the staging area."""
FETCH_S = 10.0
"""How long a request waits for its rows; then it is computed."""
_PAUSE_S, _LONGEST_S = 5.0, 60.0
"""How long no request is looked up after one waited in vain, doubled each time."""


class LoadPatience:
    """The breaker of one engine's loads.  Its thread only; times are of one clock."""

    def __init__(self) -> None:
        self._breaker = Breaker(_PAUSE_S, _LONGEST_S)
        self._trying = ""

    @property
    def is_hung(self) -> bool:
        """Whether the shelf did not answer the last time."""
        return self._breaker.is_open

    def admits(self, request: str, now: float) -> bool:
        """Whether a request may be looked up: while the shelf hangs one may, after each pause."""
        was_open = self._breaker.is_open
        if not self._breaker.allows(now):
            return False
        self._trying = request if was_open else ""
        return True

    def is_over(self, request: str, waited_s: float, most_s: float, now: float) -> bool:
        """Whether a request that waits for the shelf gives up, so that it is computed."""
        if waited_s <= most_s:
            return self._breaker.is_open and request != self._trying
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

    def answered(self) -> None:
        """The shelf answered in time."""
        if self._breaker.is_open:
            log.info("pdconn: store: the shelf answers again")
            self._breaker.succeeded()
