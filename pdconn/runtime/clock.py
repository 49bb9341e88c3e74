"""The clock that leases are kept by."""

from __future__ import annotations

import time


def steady() -> float:
    """Seconds that never go back, and that go on while the machine is suspended.

    A reader whose clock stood still would believe a lease that is over at its lender.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
