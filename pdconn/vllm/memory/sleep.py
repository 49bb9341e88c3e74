"""Engines that sleep: their KV memory is unmapped, and other pages are mapped when they wake.

vLLM 0.33 resets the prefix cache first, which ends all leases (``Lending``), then notifies the
workers, and after waking requests their registrations again::

    reset ──► unregister_kv_caches ──► unmapped …  mapped ──► restore_kv_caches ──► handshake
              pulls end, the transport closes                 a new transport       a new boot

For peers an engine that has slept is a restarted one: it has another incarnation, and transports
with other names, so its former tickets and descriptions are refused.  Nothing of a transport
outlives the sleep: neither registrations nor UCX's cache of them.  vLLM 0.32 does not notify
connectors of the sleep.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from pdconn.vllm.config import ConfigError

IS_TOLD = hasattr(KVConnectorBase_V1, "restore_kv_caches")
"""Whether this vLLM notifies connectors of the sleep."""

_FIELD = "enable_sleep_mode"
_WITHOUT = "^cuda_ipc"
_ANY_OF = ("all", "cuda", "cuda_ipc")
"""Names in a list of UCX's transports that include ``cuda_ipc``."""


def check_sleep(transfer: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Check that an engine of this configuration may sleep.

    Args:
        transfer: vLLM's ``KVTransferConfig``.

    Raises:
        ConfigError: it may not; with the reason.
    """
    if not IS_TOLD:
        hint = "vLLM 0.32 does not notify connectors, and peers would read unmapped memory"
        raise ConfigError(_FIELD, False, True, hint)
    extra = transfer.kv_connector_extra_config
    if extra.get("store") is not None:
        hint = "a store reads and writes KV memory at any time; disable one of the two"
        raise ConfigError(_FIELD, False, True, hint)
    backends = extra.get("backends", ["UCX"])
    if backends != ["UCX"]:
        hint = f"{_FIELD} is on, and other backends may keep references to memory"
        raise ConfigError("backends", ["UCX"], backends, hint)
    # A peer on the same host may map GPU memory (``cuda_ipc``), and keep the mapping: the pages
    # would not be free while the engine sleeps.  So an engine that lends offers no such mappings.
    if transfer.is_kv_producer:
        for name, asked in _asked_transports(extra, environ).items():
            if _includes_cuda_ipc(asked):
                hint = f"{_FIELD} is on, and peers would keep the memory of a sleeping GPU mapped"
                raise ConfigError(name, f"{_WITHOUT}, or a list without it", repr(asked), hint)


def options_for_sleep(options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """NIXL's options for an engine that lends and may sleep; the user's override ours."""
    made = {name: dict(values) for name, values in options.items()}
    ucx = made.setdefault("UCX", {})
    ucx["engine_config"] = ",".join(filter(None, (f"TLS={_WITHOUT}", ucx.get("engine_config", ""))))
    return made


def _asked_transports(extra: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of UCX's transports, by name; the environment overrides options."""
    if "UCX_TLS" in environ:
        return {"UCX_TLS": environ["UCX_TLS"]}
    options = extra.get("backend_options")
    ucx = options.get("UCX") if isinstance(options, Mapping) else None
    config = str(ucx.get("engine_config", "")) if isinstance(ucx, Mapping) else ""
    for part in config.split(","):
        key, _, value = part.strip().partition("=")
        if key.removeprefix("UCX_") == "TLS":
            return {"backend_options UCX engine_config TLS": value}
    return {}


def _includes_cuda_ipc(asked: str) -> bool:
    """Whether UCX's ``TLS`` allows ``cuda_ipc``."""
    named = {name.strip() for name in asked.removeprefix("^").split(",")}
    is_named = not named.isdisjoint(_ANY_OF)
    return is_named != asked.startswith("^")
