"""Why no plan can be made."""

from __future__ import annotations


class PlanningError(Exception):
    """Base of everything that planning refuses."""


class Incompatible(PlanningError):
    """Two engines whose KV cannot be exchanged: ``field`` differs."""

    def __init__(self, field: str, theirs: object, ours: object) -> None:
        self.field = field
        self.theirs = theirs
        self.ours = ours
        super().__init__(f"{field}: theirs {theirs}, ours {ours}")


class MissingBlock(PlanningError):
    """A block that we need is not among those that the lender holds."""


class BlockOutOfRange(PlanningError):
    """A block id that the cache it is in does not have."""
