"""The clock of lease deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

steady: Callable[[], float] = partial(time.clock_gettime, _CLOCK)
"""Seconds that never go back, and that advance while the machine is suspended.

A reader whose clock stops would believe a lease that has expired at its lender.
"""
