"""What the scheduler's half tells the workers' half every step, and the other way."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import Ticket


@dataclass
class PdMetadata(KVConnectorMetadata):
    """One step's orders.

    ``holds``: requests seen, with pull id and ticket.  ``pulls``: requests that got
    blocks.  ``cancels``: held requests that want nothing any more.  ``doomed``:
    requests to report failed, with the reason.  ``freed``: lent requests that every
    reader is done with, for the workers to report as sent.
    """

    holds: list[tuple[str, str, Ticket]] = field(default_factory=list)
    pulls: list[tuple[str, Need]] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    doomed: list[tuple[str, str]] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.holds or self.pulls or self.cancels or self.doomed or self.freed)


@dataclass
class PdHandshake(KVConnectorHandshakeMetadata):
    """One worker's memory and transport address: an encoded ``RankGeometry``."""

    geometry: bytes
    traits: dict[str, str]
