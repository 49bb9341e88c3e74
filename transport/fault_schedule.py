"""Draws faults from a seeded generator, and checks their probabilities.

A record of faults has an attribute per kind: the probability, from 0 to 1, that an operation gets
that fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from transport.errors import FieldError

_DAY_S = 86400


class FaultError(FieldError, ValueError):
    """A setting of fault injection is unknown or out of range."""

    show = repr


def check_chances(record: object, kinds: Sequence[str]) -> None:
    """Check that every attribute of ``kinds`` is a probability.

    Raises:
        FaultError: it is not a number from 0 to 1.
    """
    for kind in kinds:
        value = getattr(record, kind)
        if not _is_number(value) or not 0 <= value <= 1:
            raise FaultError(kind, "a chance from 0 to 1", value)


def check_seconds(field: str, value: object) -> None:
    """Check that ``value`` is a delay.

    Raises:
        FaultError: it is not a number of seconds from 0 to less than a day.
    """
    if not _is_number(value) or not 0 <= value < _DAY_S:  # type: ignore[operator]
        raise FaultError(field, f"seconds from 0 to below {_DAY_S}", value)


def check_count(field: str, value: object) -> None:
    """Check that ``value`` is a count.

    Raises:
        FaultError: it is not a whole number, or below 0.
    """
    if type(value) is not int or value < 0:
        raise FaultError(field, "a whole number from 0", value)


def drawn(rng: Random, record: object, kinds: Sequence[str]) -> frozenset[str]:
    """The faults of the next operation; takes one number per kind from ``rng``."""
    # Also at probability 0: a run can be replayed without one kind, and the others stay the same.
    return frozenset([kind for kind in kinds if rng.random() < getattr(record, kind)])


def in_words(record: object, kinds: Sequence[str]) -> str:
    """The possible faults, for a log line: ``corrupt 1.0, delay 0.5``; empty if there are none."""
    chances = [(kind, getattr(record, kind)) for kind in kinds]
    return ", ".join(f"{kind} {chance}" for kind, chance in chances if chance)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
