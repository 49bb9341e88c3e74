"""``kv_connector_extra_config``, read once and strictly.

=========================  =========================================================
``side_channel_host``      address prefill listens at and tickets name; default
                           ``VLLM_NIXL_SIDE_CHANNEL_HOST``, then ``localhost``
``side_channel_port``      its port, plus the data-parallel index; default
                           ``VLLM_NIXL_SIDE_CHANNEL_PORT``, then 5600
``kv_lease_duration``      seconds that prefill keeps lent blocks without hearing
                           from decode; default 30
``claim_timeout``          seconds that decode waits for a greeting and a claim;
                           default 10
``backends``               NIXL backends; default ``["UCX"]``
``backend_options``        options per backend, as NIXL takes them; default none
``huge_pages``             ask for huge pages under host KV memory; default true
``enforce_handshake_compat``  refuse peers whose model or block content differs by
                           name; default true
``description_file``       where to write what this engine's KV looks like, for
                           ``pdconn diff``; default nowhere
``debug_flip_bytes``       spoil one byte of every pull, to see that a check notices;
                           host memory only; default false
=========================  =========================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A key of ``kv_connector_extra_config`` that is unknown or has a wrong value."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings; see the module for what each means."""

    side_channel_host: str
    side_channel_port: int
    kv_lease_duration: float = 30.0
    claim_timeout: float = 10.0
    backends: tuple[str, ...] = ("UCX",)
    backend_options: dict[str, dict[str, str]] = field(default_factory=dict)
    huge_pages: bool = True
    enforce_handshake_compat: bool = True
    description_file: str | None = None
    debug_flip_bytes: bool = False


def read_settings(extra: Mapping[str, Any], host: str, port: int, port_offset: int) -> Settings:
    """Check ``kv_connector_extra_config``.

    Args:
        extra: the mapping as the user wrote it.
        host, port: defaults for the side channel, from vLLM's environment.
        port_offset: the data-parallel index, added to the port.

    Raises:
        ConfigError: naming the key, what was expected and what came.
    """
    known = Settings.__dataclass_fields__
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}; {hint}")
    settings = Settings(
        side_channel_host=_read(extra, "side_channel_host", _text, host),
        side_channel_port=_read(extra, "side_channel_port", _port, port) + port_offset,
        kv_lease_duration=_read(extra, "kv_lease_duration", _seconds, 30.0),
        claim_timeout=_read(extra, "claim_timeout", _seconds, 10.0),
        backends=_read(extra, "backends", _names, ("UCX",)),
        backend_options=_read(extra, "backend_options", _options, {}),
        huge_pages=_read(extra, "huge_pages", _flag, True),
        enforce_handshake_compat=_read(extra, "enforce_handshake_compat", _flag, True),
        description_file=_read(extra, "description_file", _text, None),
        debug_flip_bytes=_read(extra, "debug_flip_bytes", _flag, False),
    )
    if settings.side_channel_host in ("0.0.0.0", "::"):
        raise ConfigError(
            "side_channel_host: expected an address that decode engines can reach, since "
            f"tickets name it; got {settings.side_channel_host!r}"
        )
    return settings


def _read(extra: Mapping[str, Any], key: str, check: Callable[[Any], Any], default: Any) -> Any:
    if key not in extra:
        return default
    try:
        return check(extra[key])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: expected {error}, got {extra[key]!r}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def _port(value: Any) -> int:
    if type(value) is not int or not 0 < value < 65536:
        raise ValueError("a port number from 1 to 65535")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 86400:
        raise ValueError("seconds above 0 and below 86400")
    return float(value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError("a list of backend names")
    return tuple(value)


def _options(value: Any) -> dict[str, dict[str, str]]:
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise ValueError("options per backend, like {'UCX': {'num_threads': '2'}}")
    return {name: {k: str(v) for k, v in options.items()} for name, options in value.items()}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004 - _read turns it into a ConfigError
    return value
