"""Checks of single settings: each returns the value, or raises ValueError with the expected one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pdconn.lifecycle.lease import MIN_TTL_S
from pdconn.lifecycle.promises import KeepShares
from pdconn.planning.layouts import LAYOUTS
from pdconn.puller.verification import Verify
from transport.choose import WANTED

OUR_LAYOUT, NO_LAYOUT = "auto", "none"
"""Values of ``layout`` besides names: pdconn's preference, and that of the attention backend."""


@dataclass(frozen=True, slots=True)
class LendBack:
    """How answers are lent (:mod:`pdconn.vllm.lends.answers`).

    Attributes:
        seconds: the lease.
        share: of the engine's blocks that answers may pin; the oldest lease ends first.
    """

    seconds: float = 60.0
    share: float = 0.2


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("1 to 64 of: letters, digits, '.', '_', '-'")
    return value


def port(value: Any) -> int:
    if type(value) is not int or not 0 < value < 65536:
        raise ValueError("a port number from 1 to 65535")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("a number")  # noqa: TRY004 - it becomes a FieldError
    return value


def seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 86400:
        raise ValueError("seconds above 0 and below 86400")
    return float(value)


def lease(value: Any) -> float:
    if seconds(value) < MIN_TTL_S:
        raise ValueError(f"at least {MIN_TTL_S} seconds")
    return float(value)


def cores(value: Any) -> int | None:
    if value == "auto":
        return None
    if type(value) is not int or value not in (0, 1):
        raise ValueError("'auto', 0 or 1")
    return value


def names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError("a list of backend names")
    return tuple(value)


def options(value: Any) -> dict[str, dict[str, str]]:
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise ValueError("options per backend, like {'UCX': {'num_threads': '2'}}")
    return {name: {k: str(v) for k, v in given.items()} for name, given in value.items()}


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004 - it becomes a FieldError
    return value


def truth(value: Any) -> bool:
    """A flag that may be text, as in manifests for NixlConnector."""
    written = str(value).lower()
    if written not in ("true", "false"):
        raise ValueError("true or false")
    return written == "true"


def verify(value: Any) -> Verify:
    if value not in list(Verify):
        raise ValueError(" or ".join(Verify))
    return Verify(value)


def transport(value: Any) -> Any:
    if value not in WANTED:
        raise ValueError(" or ".join(WANTED))
    return value


def layout(value: Any) -> str:
    words = (OUR_LAYOUT, NO_LAYOUT, *LAYOUTS)
    if value not in words:
        raise ValueError(" or ".join(words))
    return str(value)


def lend_back(value: Any) -> LendBack | None:
    expected = 'true, false, or like {"seconds": 60, "share": 0.2}'
    if isinstance(value, bool):
        return LendBack() if value else None
    if not isinstance(value, dict) or not set(value) <= {"seconds", "share"}:
        raise ValueError(expected)
    settings = LendBack(**value)
    share = settings.share
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 0.5:
        raise ValueError(f"{expected}, with a share above 0 and at most 0.5 of the blocks")
    return LendBack(lease(settings.seconds), float(share))


def keep(value: Any) -> KeepShares | None:
    return KeepShares.from_setting(value, "the blocks")
