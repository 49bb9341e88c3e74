"""What cannot be foretold, and why: field, what was expected, what was seen."""

from __future__ import annotations


class ForecastError(Exception):
    """Base of everything that the forecast refuses."""


class ShapeError(ForecastError):
    """A model, an engine or a link that makes no sense: ``field`` is wrong."""

    def __init__(self, field: str, expected: object, seen: object) -> None:
        self.field = field
        self.expected = expected
        self.seen = seen
        super().__init__(f"{field}: expected {expected}, got {seen}")

    def of(self, owner: str) -> ShapeError:
        """The same, with whose field it is.

        >>> print(ShapeError("tp", "a number above 0", 0).of("--prefill"))
        --prefill tp: expected a number above 0, got 0
        """
        return type(self)(f"{owner} {self.field}", self.expected, self.seen)


class UnreadableConfig(ShapeError):
    """A ``config.json`` whose key cannot be understood."""
