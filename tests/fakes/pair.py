"""A lender and a puller on this machine: real sockets and threads, in-process bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from pdconn.integrity.lent import lent_sums
from pdconn.integrity.memory import HostMemory
from pdconn.integrity.sums import Terms
from pdconn.lender.server import Lender
from pdconn.lender.sessions import ConnectionLimits
from pdconn.lifecycle.pull import Patience
from pdconn.planning.plan import Need
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import CancelPull, ClaimTicket, PullRecord, ReadBlocks
from pdconn.puller.peers import MAX_PEERS, Rank
from pdconn.puller.thread import Puller, PullResults, Resolve
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import Pauses, Place, WarmUp
from pdconn.sidechannel.connection import resolve
from pdconn.sidechannel.security import Security
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from registration.scratch import Scratch
from tests.fakes.layouts import layout_memory
from transport import HOST
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

NUM_BLOCKS = 16
BLOCK_TOKENS = 4
LAYERS = ("a", "b")
TRAITS = {"model": "tiny"}


class Cache:
    """One engine's KV memory: bytes that differ everywhere, or are 0 everywhere."""

    def __init__(
        self, layout: str, filled: bool, groups: int = 1, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self.block_tokens = block_tokens
        page = 2 * block_tokens * 8
        self.bytes = np.zeros(NUM_BLOCKS * len(LAYERS) * page, dtype=np.uint8)
        if filled:
            self.bytes[:] = np.random.default_rng(7).integers(1, 255, self.bytes.size)
        self.references = self._describe(layout, groups)

    def _describe(self, layout: str, groups: int) -> KVCacheReferences:
        made = []
        for number, (kind, window) in enumerate(self._kinds(groups)):
            layers = layout_memory(
                layout,
                base=self.bytes.ctypes.data,
                num_blocks=NUM_BLOCKS,
                layers=[f"{name}{number}" for name in LAYERS],
                num_heads=2,
                block_tokens=self.block_tokens,
                token_nbytes=8,
            )
            made.append(GroupMemory(kind, window, self.block_tokens, layers))
        return build_kv_cache_references(made)

    def _kinds(self, groups: int) -> Sequence[tuple[AttentionKind, int | None]]:
        """What each group keeps, and its window."""
        return [(AttentionKind.FULL, None)] * groups

    def row(self, block: int) -> bytes:
        """A block's bytes, in a block-outermost layout."""
        size = self.bytes.size // NUM_BLOCKS
        return self.bytes[block * size : (block + 1) * size].tobytes()


@dataclass
class Pair:
    """Prefill and decode; use as a context manager."""

    layout: str = "BHLNC"
    groups: int = 1
    their_groups: int = 1
    block_tokens: int = BLOCK_TOKENS
    their_block_tokens: int = BLOCK_TOKENS
    ttl_s: float = 5.0
    claim_timeout_s: float = 2.0
    read_s: float = 60.0
    drain_s: float = 5.0
    security: Security | None = None
    limits: ConnectionLimits | None = None
    verify: Verify = Verify.OFF
    their_verify: Verify = Verify.OFF
    traits: dict[str, str] = field(default_factory=lambda: dict(TRAITS))
    incarnation: str = "boot-1"
    our_name: str = "decode"
    warms: bool = False
    probes: bool = True
    also_warm: tuple[Place, ...] = ()
    pauses: Pauses = field(default_factory=Pauses)
    max_peers: int = MAX_PEERS
    through: Callable[[str, int], tuple[str, int]] | None = None
    resolve: Resolve = resolve
    network: InProcessNetwork = field(default_factory=InProcessNetwork)
    bound: str = "127.0.0.1"
    advertised: str | None = None

    def __post_init__(self) -> None:
        self.theirs = Cache(self.layout, True, self.their_groups, self.their_block_tokens)
        self.ours = Cache(self.layout, False, self.groups, self.block_tokens)
        self.their_transport = InProcessTransport(self.network, "prefill")
        self.their_transport.register(self.theirs.references.memories())
        self.lender = self.open_lender(port=0)
        transport = InProcessTransport(self.network, "decode")
        transport.register(self.ours.references.memories())
        me = Rank(self.our_name, 0, 1, 0, self.ours.references, dict(TRAITS))
        patience = Patience(self.claim_timeout_s, self.read_s, self.drain_s)
        self.scratch = Scratch.on(HOST)
        transport.register([self.scratch.memory])
        self.puller = Puller(
            me,
            transport,
            patience=patience,
            verify=self.verify,
            security=self.security,
            warm_up=self.warm_up(),
            through=self.through,
            resolve=self.resolve,
            max_peers=self.max_peers,
        )
        self.received: list[str] = []
        self.released: list[str] = []
        self.failed: dict[str, str] = {}
        self.records: list[PullRecord] = []
        self.number = 0

    def warm_up(self) -> WarmUp:
        """Our lender, if the puller is to know it before a ticket names it, and others."""
        ours = (Place("127.0.0.1", self.lender.port),) if self.warms else ()
        scratch = self.scratch.memory if self.probes else None
        return WarmUp((*ours, *self.also_warm), scratch, self.pauses)

    def open_lender(self, port: int) -> Lender:
        summing = self.their_verify is not Verify.OFF
        return Lender(
            self.welcome(),
            self.bound,
            port,
            advertised=self.advertised,
            security=self.security,
            is_summing=summing,
            limits=self.limits,
        )

    def welcome(self) -> Welcome:
        """What the lender says of itself."""
        rank = RankGeometry(0, 0, self.their_transport.address(), self.theirs.references)
        return Welcome.in_our_version("prefill", self.incarnation, self.traits, (rank,))

    def lend(self, request: str, ids: tuple[int, ...] = (3, 4, 5)) -> Ticket:
        """Lend blocks under ``request``; the ticket for them."""
        blocks = (BlockList(0, ids),) * self.their_groups
        self.lend_blocks(request, blocks)
        if self.their_verify is not Verify.OFF:
            self.sum(request, blocks)
        return self.ticket(request, blocks)

    def lend_blocks(self, request: str, blocks: tuple[BlockList, ...]) -> Ticket:
        """Lend ``blocks`` and no checksums of them; the ticket."""
        ticket = self.ticket(request, blocks)
        self.lender.lend(request, ticket.digest(), self.ttl_s)
        return ticket

    def sum(self, request: str, blocks: tuple[BlockList, ...]) -> None:
        """Checksum what is lent, as a worker would."""
        terms = Terms(request, 12, self.their_verify is Verify.SAMPLE)
        sums = lent_sums(HostMemory(), self.theirs.references, blocks, terms)
        self.lender.add_sums(request, 0, sums)

    def ticket(self, request: str, blocks: tuple[BlockList, ...]) -> Ticket:
        return Ticket(
            "prefill", self.incarnation, request, self.advertised or self.bound,
            self.lender.port, 12, "prompt", blocks,
        )  # fmt: skip

    def claim(self, request: str, ticket: Ticket) -> None:
        self.number += 1
        self.puller.post_command(ClaimTicket(request, f"here/{self.number}", ticket))

    def start_read(self, request: str, ids: tuple[int, ...] = (7, 8, 9)) -> None:
        self.puller.post_command(
            ReadBlocks(request, Need.for_range(0, 12, (BlockList(0, ids),) * self.groups))
        )

    def pull(self, request: str, ticket: Ticket, ids: tuple[int, ...] = (7, 8, 9)) -> None:
        self.claim(request, ticket)
        self.start_read(request, ids)

    def cancel(self, request: str) -> None:
        self.puller.post_command(CancelPull(request))

    def collect(self) -> PullResults:
        outcome = self.puller.take_results()
        self.received += outcome.received
        self.failed.update({failed.request: failed.reason for failed in outcome.failed})
        self.released += outcome.released
        self.records += outcome.records
        return outcome

    def wait(self, until: Callable[[], object], seconds: float = 30.0) -> None:
        """Collect until ``until`` is true; an error when it does not become true."""
        give_up = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < give_up, f"waited {seconds} s: {self.failed}"
            self.collect()
            time.sleep(0.002)

    def outcome_of(self, request: str) -> str | None:
        """None when received, or why it failed; waits for either."""
        self.wait(lambda: request in self.received or request in self.failed)
        return self.failed.get(request)

    def freed(self, seconds: float = 30.0) -> str:
        """How the next lease ended; waits for it."""
        found: list[str] = []
        self.wait(lambda: found or found.extend(f.why for f in self.lender.take_freed()), seconds)
        return found[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.puller.close()
        self.lender.close()
        self.their_transport.close()
