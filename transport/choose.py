"""Which backend is used: NIXL where it runs, UCX alone where it does not.

    nixl   NIXL or nothing
    ucx    UCX or nothing
    auto   NIXL; if it is not available here, UCX

Only ``TransportUnavailable`` means "not available": an invalid option is an error with either
backend.  Two engines with different backends cannot use each other's addresses, and report
``BadAddress``, which names both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from transport.base import Transport
from transport.errors import TransportUnavailable

Wanted = Literal["nixl", "ucx", "auto"]
WANTED: tuple[Wanted, ...] = get_args(Wanted)

Opener = Callable[[], Transport]

_ORDER: Mapping[Wanted, tuple[str, ...]] = {
    "nixl": ("nixl",),
    "ucx": ("ucx",),
    "auto": ("nixl", "ucx"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Backend ``name`` was opened for ``reason``; ``tried`` are those that were not available."""

    name: str
    reason: str
    tried: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose(wanted: Wanted, openers: Mapping[str, Opener]) -> tuple[Transport, Choice]:
    """Open the first backend that ``wanted`` allows and that is available.

    Args:
        openers: functions that open a transport, by name of backend.

    Raises:
        TransportUnavailable: none is available; gives the reason for each.
    """
    tried: list[str] = []
    for name in _ORDER[wanted]:
        try:
            transport = openers[name]()
        except TransportUnavailable as error:
            tried.append(f"{name}: {error}")
            continue
        return transport, Choice(name, _reason(wanted, tried), tuple(tried))
    raise TransportUnavailable(f"transport {wanted}: {'; '.join(tried)}")


def ucx_options(backend_options: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The UCX settings in ``backend_options``, which have NIXL's format.

    >>> ucx_options({"UCX": {"engine_config": "TLS=tcp,TCP_TX_SEG_SIZE=64K"}})
    {'TLS': 'tcp', 'TCP_TX_SEG_SIZE': '64K'}

    Raises:
        ValueError: an option that only NIXL has.
    """
    foreign = [f"{b}.{key}" for b, opts in backend_options.items() for key in opts]
    foreign = [key for key in foreign if key != "UCX.engine_config"]
    if foreign:
        raise ValueError(
            f"backend_options {', '.join(foreign)}: the ucx transport takes UCX.engine_config only"
        )
    settings = {}
    text = backend_options.get("UCX", {}).get("engine_config", "")
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"engine_config {text!r}: {part!r} is not KEY=value")
        settings[key.strip().removeprefix("UCX_")] = value.strip()
    return settings


def _reason(wanted: Wanted, tried: list[str]) -> str:
    if wanted != "auto":
        return "as configured"
    return f"since {'; '.join(tried)}" if tried else "preferred where it runs"
