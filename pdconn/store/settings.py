"""Settings of a store: the value of ``store`` in ``kv_connector_extra_config``, read strictly."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from pdconn.lifecycle.promises import KeepShares
from pdconn.store.store_errors import StoreSettingError
from transport.errors import did_you_mean

WINDOW_EVERY = ("auto", "all", "last")
SHELVES = ("files", "posix", "obj")
OF_OBJ = ("bucket", "endpoint", "region")
"""Keys that have a meaning with the shelf ``obj`` alone."""
REPEAT_S = 10.0
"""The least time between two logs of a warning that every row repeats while a device refuses."""
SAVE = ("prompt", "all")
BESIDE = ("auto", "always", "never")
COMPRESSION = ("none", "exponents")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}){0,8}")
_ENDPOINT = re.compile(r"https?://(?:[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:]{2,45}\])(?::\d{1,5})?/?")
_MOST_NBYTES = (1 << 63) - 1
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Checked settings; ``docs/stores.md`` says what each means.  Sizes in bytes."""

    root: str
    capacity: int
    shelf: str = "files"
    bucket: str | None = None
    endpoint: str | None = None
    region: str | None = None
    staging: int = 1 << 30
    block_tokens: int = 256
    window_every: int | Literal["auto", "all", "last"] = "auto"
    wa_share: float | None = None
    save: Literal["prompt", "all"] = "prompt"
    read_only: bool = False
    min_tokens: int = 256
    direct_io: bool | Literal["auto"] = "auto"
    beside: Literal["auto", "always", "never"] = "auto"
    compression: Literal["none", "exponents"] = "none"
    key_file: str | None = None
    tenant_quota: int | None = None
    keep: KeepShares | None = field(default_factory=KeepShares)


def read_store_settings(given: Any) -> StoreSettings:
    """Check the mapping that a user wrote.

    Raises:
        StoreSettingError: naming the key, the expected value and the given one.
    """
    if not isinstance(given, Mapping):
        raise StoreSettingError("store", "an object with root and capacity", repr(given))
    checks: dict[str, Callable[[Any], Any]] = {
        "root": lambda value: os.path.expanduser(_text(value)),
        "capacity": size_of,
        "shelf": lambda value: _one_of(value, SHELVES),
        "bucket": _bucket,
        "endpoint": _endpoint,
        "region": _region,
        "staging": size_of,
        "block_tokens": _block_tokens,
        "window_every": _window_every,
        "wa_share": _share,
        "save": lambda value: _one_of(value, SAVE),
        "read_only": _flag,
        "min_tokens": lambda value: _number(value, 0),
        "beside": lambda value: _one_of(value, BESIDE),
        "direct_io": lambda value: value if value == "auto" else _flag(value),
        "compression": lambda value: _one_of(value, COMPRESSION),
        "key_file": lambda value: os.path.expanduser(_text(value)),
        "tenant_quota": size_of,
        "keep": lambda value: KeepShares.from_setting(value, "the capacity"),
    }
    values = {}
    for key, value in given.items():
        if key not in checks:
            hint = did_you_mean(str(key), checks)
            raise StoreSettingError("store", "a known key", repr(key), hint)
        try:
            values[key] = checks[key](value)
        except ValueError as error:
            raise StoreSettingError(f"store.{key}", error, repr(value)) from None
    for key in ("root", "capacity"):
        if key not in values:
            raise StoreSettingError(f"store.{key}", "a value", "none")
    _check_obj(values)
    return StoreSettings(**values)


def _check_obj(values: Mapping[str, Any]) -> None:
    if values.get("shelf") == "obj":
        if "bucket" not in values:
            raise StoreSettingError("store.bucket", "a value with shelf 'obj'", "none")
        return
    for key in OF_OBJ:
        if key in values:
            shelf = values.get("shelf", "files")
            raise StoreSettingError(f"store.{key}", f"none with shelf {shelf!r}", values[key])


def size_of(value: Any) -> int:
    """Bytes of ``20GiB``, ``512 MiB`` or a number.

    Raises:
        ValueError: with what was expected.

    >>> size_of("1.5 KiB")
    1536
    """
    text = "" if isinstance(value, bool | float) else str(value)
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]iB)?\s*", text, re.ASCII)
    nbytes = 0 if match is None else int(Decimal(match[1]) * _UNITS[match[2] or ""])
    if not 0 < nbytes <= _MOST_NBYTES:
        raise ValueError("a size of 1 byte to 8 EiB like 20GiB or 512MiB, or a number of bytes")
    return nbytes


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def _bucket(value: Any) -> str:
    if not isinstance(value, str) or _BUCKET.fullmatch(value) is None:
        raise ValueError("the name of an S3 bucket, or BUCKET/PREFIX of letters, digits, . _ - /")
    return value


def _endpoint(value: Any) -> str:
    if not isinstance(value, str) or _ENDPOINT.fullmatch(value) is None:
        raise ValueError("a URL like https://s3.example.com:9000, without credentials or path")
    return value.rstrip("/")


def _region(value: Any) -> str:
    if not isinstance(value, str) or re.fullmatch(r"[a-z0-9-]{1,64}", value) is None:
        raise ValueError("a region like eu-central-1")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004 - turned into a StoreSettingError
    return value


def _number(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"a number from {least}")
    return value


def _block_tokens(value: Any) -> int:
    number = _number(value, 1)
    if number & (number - 1) and number % 16:
        raise ValueError("a power of two or a multiple of 16")
    return number


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError("a share above 0 and at most 1")
    return float(value)


def _window_every(value: Any) -> Any:
    if value in WINDOW_EVERY:
        return value
    if type(value) is not int or value < 1:
        raise ValueError(f"{', '.join(WINDOW_EVERY)} or a number of tokens")
    return value


def _one_of(value: Any, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise ValueError(" or ".join(known))
    return value
