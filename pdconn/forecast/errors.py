"""What cannot be foretold, and why: field, what was expected, what was seen."""

from __future__ import annotations

from transport.errors import FieldError


class ForecastError(Exception):
    """Base of everything that the forecast refuses."""


class ShapeError(FieldError, ForecastError):
    """A model, an engine or a link that makes no sense: ``field`` is wrong."""


class UnreadableConfig(ShapeError):
    """A ``config.json`` whose key cannot be understood."""
