"""Engines that sleep: their KV memory is unmapped, and other pages are mapped when they wake.

vLLM 0.33 resets the prefix cache first, which takes back everything lent (``Lending``),
then tells the workers, and after waking asks for their registrations anew::

    reset ──► unregister_kv_caches ──► unmapped …  mapped ──► restore_kv_caches ──► handshake
              pulls end, the transport closes                 a new transport       a new boot

To peers a woken engine is a restarted one: it has another incarnation, and transports of other
names.  So tickets and descriptions from before are refused by name, as those of any boot that is
gone; nothing else is needed for them, and nothing of a transport outlives the sleep: neither
registrations nor UCX's cache of them.

A peer on the same host may map memory of a GPU itself (``cuda_ipc``), and keeps such a mapping:
the pages would not be free while the engine sleeps.  So an engine that lends and may sleep offers
no such mappings.  vLLM 0.32 does not tell connectors of the sleep.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from pdconn.vllm.config import ConfigError

IS_TOLD = hasattr(KVConnectorBase_V1, "restore_kv_caches")
"""Whether this vLLM tells connectors of the sleep."""

_FIELD = "enable_sleep_mode"
_WITHOUT = "^cuda_ipc"
_ANY_OF = ("all", "cuda", "cuda_ipc")
"""Names under which a list of UCX's transports includes ``cuda_ipc``."""


def check_sleep(transfer: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Whether an engine of this configuration may sleep.

    Args:
        transfer: vLLM's ``KVTransferConfig``.

    Raises:
        ConfigError: it may not, and why.
    """
    if not IS_TOLD:
        hint = "vLLM 0.32 does not tell connectors, and peers would read unmapped memory"
        raise ConfigError(_FIELD, False, True, hint)
    extra = transfer.kv_connector_extra_config
    if extra.get("store") is not None:
        hint = "a store reads and writes KV memory at any time; leave out one of the two"
        raise ConfigError(_FIELD, False, True, hint)
    backends = extra.get("backends", ["UCX"])
    if backends != ["UCX"]:
        hint = f"{_FIELD} is on, and what other backends keep of memory is not known"
        raise ConfigError("backends", ["UCX"], backends, hint)
    if transfer.is_kv_producer:
        for name, asked in _asked_transports(extra, environ).items():
            if _includes_cuda_ipc(asked):
                hint = f"{_FIELD} is on, and peers would keep the memory of a sleeping GPU mapped"
                raise ConfigError(name, f"{_WITHOUT}, or a list without it", repr(asked), hint)


def options_for_sleep(options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Options of NIXL's backends for an engine that lends and may sleep; the user's go first."""
    made = {name: dict(values) for name, values in options.items()}
    ucx = made.setdefault("UCX", {})
    ucx["engine_config"] = ",".join(filter(None, (f"TLS={_WITHOUT}", ucx.get("engine_config", ""))))
    return made


def _asked_transports(extra: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Where UCX is told which transports to use; the environment goes before options."""
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
    """Whether UCX's ``TLS`` lets ``cuda_ipc`` in."""
    named = {name.strip() for name in asked.removeprefix("^").split(",")}
    is_named = not named.isdisjoint(_ANY_OF)
    return is_named != asked.startswith("^")
