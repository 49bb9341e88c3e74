"""What can be wrong with a benchmark: how it was asked for, or its other side."""

from __future__ import annotations


class BenchError(Exception):
    """A benchmark that cannot run."""


class BadCase(BenchError, ValueError):
    """A case that cannot be meant; names the field, what was expected and what came."""

    def __init__(self, field: str, expected: object, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")


class LenderFailed(BenchError):
    """The side that lends refused, or went away."""


class WrongBytes(BenchError):
    """A pull that reported success brought other bytes than the lender's."""
