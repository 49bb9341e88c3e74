"""Errors of benchmarks: invalid options, and failures of the remote side."""

from __future__ import annotations

from transport.errors import FieldError


class BenchError(Exception):
    """A benchmark that cannot run."""


class BadOption(FieldError, BenchError, ValueError):
    """An invalid option of a benchmark."""


class LenderFailed(BenchError):
    """The lending side refused, or disconnected."""


class WrongBytes(BenchError):
    """A pull that reported success delivered bytes that differ from the lender's."""
