"""The clock that lease deadlines are kept by."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady() -> float:
    """Seconds that never go back, and that advance while the machine is suspended.

    A reader whose clock stops would believe a lease that has expired at its lender.
    """
    return time.clock_gettime(_CLOCK)
