"""The percentile that every benchmark reports."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest of ``values`` that is at least as large as ``part`` of them.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    needed = part * len(ordered)
    return ordered[max(0, -int(-needed // 1) - 1)]
