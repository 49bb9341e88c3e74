"""Steps of an engine that computes nothing, and waits for what others do.

vLLM steps an engine without a pause while a request waits for KV.  Where the workers are processes
of their own, whoever waits for the other spins (vLLM's ``SpinCondition``, for a second after the
last message), on any core for the scheduler's process, and so on one that a prefill engine beside
it computes on::

    a report may come at any time      the workers wait for it, and the scheduler spins
    none is expected for a while       the scheduler sleeps; the workers spin, on their own cores
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pdconn.sidechannel.clock import steady

IDLE_STEP_S = 0.003
"""How long a step without work may take; new requests wait as long."""
NOTICE_S = 0.01
"""Before the time at which something is expected the workers wait for it, and see it at once."""


class IdleSteps:
    """The pauses of the scheduler's process.

    Args:
        quiet_until: before when nothing is expected of the workers; 0 if that is not known.
        clock, sleep: of seconds.
    """

    def __init__(
        self,
        quiet_until: Callable[[], float],
        clock: Callable[[], float] = steady,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._quiet_until, self._clock, self._sleep = quiet_until, clock, sleep
        self._is_idle = False

    def rest(self, num_tokens: int) -> bool:
        """Sleep if the step computes nothing, nor did the last one; returns whether it did.

        The last step may still be in flight, and its tokens wait for this one to be scheduled.
        """
        was_idle, self._is_idle = self._is_idle, not num_tokens
        if not (was_idle and self._is_idle):
            return False
        left_s = self._quiet_until() - self._clock() - NOTICE_S
        if left_s <= 0:
            return False
        self._sleep(min(left_s, IDLE_STEP_S))
        return True
