"""What our scheduler and our workers send each other, in vLLM's classes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdconn.integrity.lent import LentSums
from pdconn.integrity.sums import Terms
from pdconn.protocol.compat import DRAFT, UNPROVEN, WEIGHTS, proofs_in
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ClaimOutcome, Command
from pdconn.store.rank_commands import StoreCommand, StoreResult
from pdconn.vllm.blocks.partial import PartialBlocks, joined

if TYPE_CHECKING:
    from pdconn.vllm.tracing.pulls import TracedPull


@dataclass
class PdMetadata(KVConnectorMetadata):
    """What the scheduler tells every worker in one step.

    Attributes:
        commands: for the puller, in this order.
        to_sum: finished requests whose lent blocks are to be summed: terms, lent blocks.
        store: for the ranks' part of the store, in this order.
        is_idle: the step computes nothing.
        weights: traits of our weights from now on, if they have changed.
    """

    commands: list[Command] = field(default_factory=list)
    to_sum: list[tuple[Terms, tuple[BlockList, ...]]] = field(default_factory=list)
    store: list[StoreCommand] = field(default_factory=list)
    is_idle: bool = False
    weights: dict[str, str] | None = None


@dataclass
class PdWorkerReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler after a step; several workers' lists are joined.

    Attributes:
        quarantined: failed requests to whose blocks a worker's reads can still write.
        released: those of them for which that is over, once per worker.
        sums: checksums of what a rank lends: request, rank, sums; None if they failed.
        store: answers of the ranks' part of the store.
        claims: what came of awaited claims, once or twice per worker.
        partial: requests that were received, each with blocks of which only the end was written.
        pulled: pulls that were received, where they are traced.
    """

    quarantined: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    sums: list[tuple[str, int, LentSums | None]] = field(default_factory=list)
    store: list[StoreResult] = field(default_factory=list)
    claims: list[ClaimOutcome] = field(default_factory=list)
    partial: dict[str, PartialBlocks] = field(default_factory=dict)
    pulled: list[TracedPull] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell; asked in every step."""
        if self.quarantined or self.released or self.sums:
            return False
        return not (self.store or self.claims or self.partial or self.pulled)

    def add_partial(self, request: str, blocks: PartialBlocks) -> None:
        """A request was received, some of whose blocks may be written in part."""
        if blocks:
            self.partial[request] = blocks

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PdWorkerReport:
        """Ours and another worker's."""
        assert isinstance(other, PdWorkerReport)
        return PdWorkerReport(
            self.quarantined + other.quarantined,
            self.released + other.released,
            self.sums + other.sums,
            self.store + other.store,
            self.claims + other.claims,
            joined(self.partial, other.partial),
            self.pulled + other.pulled,
        )


@dataclass
class PdHandshake(KVConnectorHandshakeMetadata):
    """One worker's memory and transport address: an encoded ``RankGeometry``.

    ``traits`` are compared with peers; ``content`` are all of them, also where peers are not
    compared: what the bytes of stored rows mean.
    """

    geometry: bytes
    traits: dict[str, str]
    content: dict[str, str] = field(default_factory=dict)


def welcome_of(
    engine_id: str, incarnation: str, handshakes: Mapping[tuple[int, int], PdHandshake]
) -> Welcome:
    """What the engine tells its peers, made of every worker's handshake by (pp, tp) rank."""
    decoder = msgspec.msgpack.Decoder(RankGeometry)
    ranks = tuple(decoder.decode(handshakes[key].geometry) for key in sorted(handshakes))
    traits = joint_traits([one.traits for one in handshakes.values()])
    return Welcome.of(engine_id, incarnation, traits, ranks)


def joint_traits(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The traits of an engine's ranks, which agree; weights are proven by what proves all ranks'.

    Ranks on several machines each load their own files.
    """
    traits = dict(ranks[0])
    for name in (WEIGHTS, DRAFT + WEIGHTS):
        if name in traits:
            common = frozenset.intersection(*(proofs_in(rank.get(name)) for rank in ranks))
            kept = [proof for proof in traits[name].split() if proof in common]
            if kept:
                traits[name] = " ".join(kept)
            elif proofs_in(traits[name]):
                traits[name] = f"{UNPROVEN}ranks of this engine have loaded other weights"
    return traits
