"""Prefill and decode on a machine each, whose KV goes over a cable of a given rate."""

from __future__ import annotations

import secrets
from pathlib import Path

from pdconn.tools.lab.spec import EngineSpec
from tests.multinode.namespaces import Machine, Network
from tests.vllm.engines.engines import transfer_config

ADDRESSES = {"client": 2, "prefill": 11, "decode": 21}
TBF = {"burst_nbytes": 64 << 10, "queue_nbytes": 1 << 20}
_HTTP, _SIDE_CHANNEL = 8000, 5600


def linked_specs(network: Network, model: Path) -> list[EngineSpec]:
    """``prefill`` and ``decode``, each on its machine and core."""
    secret = model.with_suffix(".secret")
    if not secret.exists():
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32), encoding="utf-8")
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    return [
        _spec(network[name], model, core, role, str(secret))
        for core, (name, role) in enumerate(roles.items())
    ]


def _spec(machine: Machine, model: Path, core: int, role: str, secret: str) -> EngineSpec:
    return EngineSpec(
        name=machine.name,
        model=model,
        host=machine.address,
        port=_HTTP,
        side_channel_port=_SIDE_CHANNEL,
        kv_transfer_config=transfer_config(role, policy="fail", secret_file=secret),
        cpus=(core,),
        env={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "VLLM_HOST_IP": machine.address},
        within=machine.within,
    )
