"""Counts, sizes and times as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def grouped(number: int) -> str:
    """A count with commas.

    >>> grouped(12000)
    '12,000'
    """
    return f"{number:,}"


def binary_size(nbytes: int) -> str:
    """Bytes in one binary unit.

    >>> binary_size(1023), binary_size(9 << 20), binary_size(5 << 41)
    ('1,023 B', '9.00 MiB', '10.00 TiB')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{nbytes:,} B" if units[0] == "B" else f"{value:,.2f} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds in one unit.

    >>> duration(0.2), duration(90), duration(7 * 86400)
    ('0 s', '90 s', '7 d')
    """
    for least, unit_s, unit in ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def scaled(factor: float, form: str) -> Callable[[float], str]:
    """A formatter of numbers, multiplied by ``factor``.

    >>> scaled(1e3, ",.2f")(0.0125)
    '12.50'
    """
    return lambda number: format(factor * number, form)


def known(show: Callable[[Any], str], unknown: str = "-") -> Callable[[Any], str]:
    """``show``, with ``unknown`` for None.

    >>> known(str)(None), known(str)(3)
    ('-', '3')
    """
    return lambda value: unknown if value is None else show(value)
