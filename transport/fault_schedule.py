"""How likely a fault is: what every record of faults is checked with and drawn by.

A record of faults names, per kind, the chance that it befalls one thing, from 0
to 1.  Every kind is drawn for every thing, wanted or not: what befalls thing n
depends on the seed, on n and on the chance of that kind, and on nothing else, so
a run can be replayed with one kind turned off and the others stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from transport.errors import FieldError

_DAY_S = 86400


class FaultError(FieldError, ValueError):
    """A setting of faults on demand is unknown or out of range."""

    show = repr


def check_chances(record: object, kinds: Sequence[str]) -> None:
    """Whether every attribute of ``kinds`` is a chance.

    Raises:
        FaultError: it is no number from 0 to 1.
    """
    for kind in kinds:
        value = getattr(record, kind)
        if not _is_number(value) or not 0 <= value <= 1:
            raise FaultError(kind, "a chance from 0 to 1", value)


def check_seconds(field: str, value: object) -> None:
    """Whether ``value`` is a delay.

    Raises:
        FaultError: it is no number of seconds from 0 to less than a day.
    """
    if not _is_number(value) or not 0 <= value < _DAY_S:  # type: ignore[operator]
        raise FaultError(field, f"seconds from 0 to below {_DAY_S}", value)


def check_count(field: str, value: object) -> None:
    """Whether ``value`` counts something.

    Raises:
        FaultError: it is no whole number, or below 0.
    """
    if type(value) is not int or value < 0:
        raise FaultError(field, "a whole number from 0", value)


def drawn(rng: Random, record: object, kinds: Sequence[str]) -> frozenset[str]:
    """The kinds that befall the next thing; takes one number per kind from ``rng``."""
    return frozenset([kind for kind in kinds if rng.random() < getattr(record, kind)])


def in_words(record: object, kinds: Sequence[str]) -> str:
    """What can happen, for a log line: ``corrupt 1.0, delay 0.5``; empty if nothing can."""
    chances = [(kind, getattr(record, kind)) for kind in kinds]
    return ", ".join(f"{kind} {chance}" for kind, chance in chances if chance)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
