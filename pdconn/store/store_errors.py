"""Errors of a store.  None of them fails a request: what cannot be loaded is computed."""

from __future__ import annotations

from transport.errors import FieldError, shown


class StoreError(Exception):
    """Base of a store's errors, but for wrong settings."""


class StoreSettingError(FieldError, ValueError):
    """A setting of the store that is unknown or has a wrong value."""


class FormatError(StoreError):
    """KV memory that rows cannot hold, or a row or footer that is not of the expected form."""

    def __init__(self, field: str, expected: object, seen: object) -> None:
        self.field, self.expected, self.seen = field, expected, seen
        super().__init__(f"{field}: expected {expected}, got {shown(seen)}")


class RowMissing(StoreError):
    """The row was never saved, or is removed."""


class RowDamaged(StoreError):
    """The row's bytes are not those that were saved."""


class RowLocked(StoreError):
    """The row is encrypted with a key that we do not have."""


class ShelfFailure(StoreError):
    """The shelf cannot be read or written now: a device error, no space, no permission."""
