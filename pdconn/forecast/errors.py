"""Errors of bad models, engines and links."""

from __future__ import annotations

from transport.errors import FieldError


class ForecastError(Exception):
    """Base of every error of the forecast."""


class ShapeError(FieldError, ForecastError):
    """``field`` of a model, an engine or a link is wrong."""


class UnreadableConfig(ShapeError):
    """A key of a ``config.json`` is missing, wrong or not supported."""
