"""Errors about invalid models, engines and links."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from transport import errors
from transport.errors import FieldError

_SHOWN = 60


class ForecastError(Exception):
    """Base of every error of the forecast."""


class ShapeError(FieldError, ForecastError):
    """``field`` of a model, an engine or a link is invalid."""


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class UnreadableConfig(ShapeError):
    """A key of a ``config.json`` is missing, invalid or not supported."""

    show: ClassVar[Callable[[object], str]] = staticmethod(_cut)


def shown(value: object) -> str:
    """A value from a file, shortened for an error of one line.

    >>> shown([8] * 80)
    '[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8,...'
    """
    return errors.shown(value, _SHOWN)
