"""Messages between our scheduler and our workers, in vLLM's classes for them."""

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
from pdconn.puller.commands import ClaimOutcome, Command, ExpectedPull
from pdconn.store.rank_commands import StoreCommand, StoreResult
from pdconn.vllm.blocks.partial import PartialBlocks, joined

if TYPE_CHECKING:
    from pdconn.vllm.tracing.pull_spans import TracedPull


@dataclass
class PdMetadata(KVConnectorMetadata):
    """The scheduler's commands to every worker in one step.

    Attributes:
        commands: for the puller, in order.
        to_sum: finished requests whose lent blocks are summed: terms, lent blocks.
        store: for the ranks' part of the store, in order.
        is_idle: whether the step computes nothing, and the scheduler has not slept instead.
        weights: traits of our weights, if they have changed.
    """

    commands: list[Command] = field(default_factory=list)
    to_sum: list[tuple[Terms, tuple[BlockList, ...]]] = field(default_factory=list)
    store: list[StoreCommand] = field(default_factory=list)
    is_idle: bool = False
    weights: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """How long a rank's reads for a request have taken, and what they have brought."""

    request: str
    nbytes: int
    seconds: float


@dataclass
class PdWorkerReport(KVConnectorWorkerMetadata):
    """The workers' reports to the scheduler after a step; those of several workers are joined.

    Attributes:
        quarantined: failed requests to whose blocks a worker's reads can still write.
        released: quarantined requests whose reads have settled, once per worker.
        sums: checksums of lent blocks: request, rank, sums; None if summing has failed.
        store: answers of the ranks' part of the store.
        claims: outcomes of awaited claims, once or twice per worker.
        expected: pulls of which nothing is reported for a while.
        partial: received requests, each with blocks of which only the end was written.
        pulled: received pulls, if they are traced.
        read: received pulls, if a store may be loaded beside them.
    """

    quarantined: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    sums: list[tuple[str, int, LentSums | None]] = field(default_factory=list)
    store: list[StoreResult] = field(default_factory=list)
    claims: list[ClaimOutcome] = field(default_factory=list)
    expected: list[ExpectedPull] = field(default_factory=list)
    partial: dict[str, PartialBlocks] = field(default_factory=dict)
    pulled: list[TracedPull] = field(default_factory=list)
    read: list[ReadSpeed] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        if self.quarantined or self.released or self.sums or self.read:
            return False
        return not (self.store or self.claims or self.expected or self.partial or self.pulled)

    def add_partial(self, request: str, blocks: PartialBlocks) -> None:
        """Add a received request with blocks that were written in part, if there are any."""
        if blocks:
            self.partial[request] = blocks

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PdWorkerReport:
        """These reports and another worker's."""
        assert isinstance(other, PdWorkerReport)
        return PdWorkerReport(
            self.quarantined + other.quarantined,
            self.released + other.released,
            self.sums + other.sums,
            self.store + other.store,
            self.claims + other.claims,
            self.expected + other.expected,
            joined(self.partial, other.partial),
            self.pulled + other.pulled,
            self.read + other.read,
        )


@dataclass
class PdHandshake(KVConnectorHandshakeMetadata):
    """One worker's memory and transport address: an encoded ``RankGeometry``.

    ``traits`` are compared with peers, unless that is disabled; ``content`` always has all of them,
    to interpret stored rows.
    """

    geometry: bytes
    traits: dict[str, str]
    content: dict[str, str] = field(default_factory=dict)


def welcome_of(
    engine_id: str, incarnation: str, handshakes: Mapping[tuple[int, int], PdHandshake]
) -> Welcome:
    """The engine's Welcome, from every worker's handshake by (pp, tp) rank."""
    decoder = msgspec.msgpack.Decoder(RankGeometry)
    ranks = tuple(decoder.decode(handshakes[key].geometry) for key in sorted(handshakes))
    traits = joint_traits([one.traits for one in handshakes.values()])
    return Welcome.in_our_version(engine_id, incarnation, traits, ranks)


def joint_traits(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The traits of an engine's ranks, which are equal, with the proofs that all ranks share."""
    # Ranks on several machines load files of their own.
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
