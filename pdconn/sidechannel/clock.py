"""The clock that leases are kept by."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady() -> float:
    """Seconds that never go back, and that go on while the machine is suspended.

    A reader whose clock stood still would believe a lease that is over at its lender.
    """
    return time.clock_gettime(_CLOCK)
