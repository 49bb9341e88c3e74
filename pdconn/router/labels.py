"""Values of labels of the router's metrics, each with its meaning.

An outcome or a reason is a member of an enum that derives from ``LabelValue``; ``metric_table``
says which label takes its values from which enum.  The series of each value exist from the start,
and ``docs/metrics.md`` lists them from here.
"""

from __future__ import annotations

from enum import Enum
from typing import Self


class LabelValue(Enum):
    """A value of a label; ``meaning`` is a line of the documentation.

    >>> class End(LabelValue):
    ...     OK = ("ok", "The client has its answer.")
    >>> End.OK.value, End("ok").meaning
    ('ok', 'The client has its answer.')
    """

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Only ``value`` is the member's value."""
        made = object.__new__(cls)
        made._value_ = value
        made.meaning = meaning
        return made
