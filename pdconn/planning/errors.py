"""Why no plan can be made."""

from __future__ import annotations

from pdconn.protocol.compat import Difference

_SHOWN = 8


class PlanningError(Exception):
    """Base of planning errors."""


class Incompatible(PlanningError):
    """Two engines whose KV cannot be exchanged, and every difference that says why."""

    def __init__(self, *differences: Difference) -> None:
        self.differences = differences
        shown = [str(difference) for difference in differences[:_SHOWN]]
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        super().__init__("; ".join(shown))

    @classmethod
    def in_field(cls, field: str, theirs: object, ours: object) -> Incompatible:
        """One difference."""
        return cls(Difference(field, str(theirs), str(ours)))


class MissingBlock(PlanningError):
    """The lender does not hold a block that we need."""


class BlockOutOfRange(PlanningError):
    """A block id beyond the end of its cache."""


class TooManyRuns(PlanningError):
    """A pull in more runs than the limit: ``pdconn plan`` finds better pairs of engines."""
