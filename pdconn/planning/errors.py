"""Why no plan can be made."""

from __future__ import annotations

from pdconn.protocol.compat import Difference

_SHOWN = 8


class PlanningError(Exception):
    """Base of everything that planning refuses."""


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
    """A block that we need is not among those that the lender holds."""


class BlockOutOfRange(PlanningError):
    """A block id that the cache it is in does not have."""


class TooManyRuns(PlanningError):
    """A pull in more pieces than we are willing to plan: see ``pdconn plan`` for better pairs."""
