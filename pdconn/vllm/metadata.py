"""vLLM's envelopes for what our two halves tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from pdconn.vllm.orders import Orders


@dataclass
class PdMetadata(KVConnectorMetadata):
    """A step's orders, from the scheduler to every worker."""

    orders: Orders


@dataclass
class PdHandshake(KVConnectorHandshakeMetadata):
    """One worker's memory and transport address: an encoded ``RankGeometry``."""

    geometry: bytes
    traits: dict[str, str]
