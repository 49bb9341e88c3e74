"""Errors in the command line of ``pdconn doctor``, as opposed to findings."""

from __future__ import annotations

from transport.errors import FieldError


class BadQuestion(FieldError, ValueError):
    """An option of the doctor is invalid, or a file that it names cannot be read."""
