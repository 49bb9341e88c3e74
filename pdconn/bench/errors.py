"""What can be wrong with a benchmark: how it was asked for, or its other side."""

from __future__ import annotations

from transport.errors import FieldError


class BenchError(Exception):
    """A benchmark that cannot run."""


class BadCase(FieldError, BenchError, ValueError):
    """An option of a benchmark that makes no sense."""


class LenderFailed(BenchError):
    """The side that lends refused, or went away."""


class WrongBytes(BenchError):
    """A pull that reported success brought other bytes than the lender's."""
