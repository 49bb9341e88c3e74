"""Errors of benchmarks: invalid options, and failures of the other side."""

from __future__ import annotations

from transport.errors import FieldError


class BenchError(Exception):
    """A benchmark that cannot run."""


class BadOption(FieldError, BenchError, ValueError):
    """An invalid option of a benchmark."""


class LenderFailed(BenchError):
    """The side that lends refused, or is gone."""


class WrongBytes(BenchError):
    """A pull that reported success brought other bytes than the lender's."""
