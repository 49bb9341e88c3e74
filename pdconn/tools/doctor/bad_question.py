"""Errors of the command line of ``pdconn doctor``: not findings, but questions without sense."""

from __future__ import annotations

from transport.errors import FieldError


class BadQuestion(FieldError, ValueError):
    """An option of the doctor makes no sense, or a file that it names cannot be read."""
