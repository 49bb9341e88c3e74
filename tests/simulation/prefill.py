"""Simulated prefill engines: what they compute is made up, their leases are real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pdconn.integrity.lent import lent_sums
from pdconn.integrity.memory import HostMemory
from pdconn.integrity.sums import Terms
from pdconn.lender.checksums import RankSums
from pdconn.lender.sessions import Abort, AbortAll, LenderSessions, RevokeAll
from pdconn.lender.streams import StreamCompletion, StreamGrowth, StreamOffer
from pdconn.lifecycle.lease import FreedLease, LeaseOffer
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.messages import GrownBlocks, RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList, Ticket
from tests.simulation.memory import BLOCK_TOKENS, HEADS, Memory
from tests.simulation.pool import BlockPool
from tests.simulation.serving import Serving
from tests.simulation.world import Machine, Wire, World
from transport.testing.inprocess.transport import InProcessTransport

POOL = 24
RESET_S = 0.1
"""How long a reset waits for what is being read."""
TRAITS = {"model": "simulated"}


@dataclass
class Growing:
    """A request that is being computed, block by block: so many are written, and announced."""

    number: int
    blocks: tuple[int, ...]
    ttl_s: float
    stream: str
    written: int = 0
    announced: int = 0
    is_followed: bool = False


class Prefill:
    """A lender that can crash and come back at the same place under another incarnation."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.machine = Machine(world)
        self.name = f"prefill{number}"
        self.port = 7000 + number
        self.memory = Memory("BHLNC", POOL, 0, HEADS)
        self.boots = 0
        self.freed_twice: list[str] = []
        self.lent_before_reset: list[str] = []
        self.freed_at: dict[Ticket, float] = {}
        """True time at which what a ticket names was given back, or lost."""
        self._start()

    def _start(self) -> None:
        self.boots += 1
        self.incarnation = f"{self.name}/{self.boots}"
        self.transport = InProcessTransport(self.world.network, self.name)
        self.transport.register(self.memory.references.memories())
        rank = RankGeometry(0, 0, self.transport.address(), self.memory.references)
        self.sessions = LenderSessions(
            Welcome.in_our_version(self.name, self.incarnation, TRAITS, (rank,)), is_summing=True
        )
        self.pool = BlockPool(POOL)
        self.lent: dict[str, Ticket] = {}
        self.growing: dict[str, Growing] = {}
        self._serving = Serving(
            self.world, self.machine, self.sessions, self._freed, self._followed
        )

    def lend(self, number: int, num_blocks: int, ttl_s: float) -> Ticket | None:
        """Compute and lend a request, or None when there is no room."""
        self._serving.turn_now()
        blocks = self.pool.take(number, num_blocks)
        if blocks is None:
            return None
        self.memory.write(number, blocks)
        return self._offer(f"r{number}", blocks, ttl_s)

    def stream(self, number: int, num_blocks: int, ttl_s: float) -> EarlyTicket | None:
        """Compute a request that may be followed meanwhile, or None when there is no room."""
        self._serving.turn_now()
        blocks = self.pool.take(number, num_blocks)
        if blocks is None:
            return None
        growing = Growing(number, blocks, ttl_s, f"stream of {number:08}")
        request = f"r{number}"
        self.lent[request], self.growing[request] = self._ticket(request, blocks), growing
        header = num_blocks * BLOCK_TOKENS, "prompt", ""
        now = self.machine.clock()
        offer = StreamOffer(request, growing.stream, *header, ttl_s, now)
        self.sessions.apply_command(offer, now)
        self._grow(request, ())
        self._compute_later(self.incarnation, request)
        return EarlyTicket(self.name, self.incarnation, "127.0.0.1", self.port, growing.stream)

    def _compute_later(self, boot: str, request: str) -> None:
        lag_s = self.world.rng.expovariate(1 / self.world.chances.chunk_s)
        compute = lambda: self.machine.when_awake(lambda: self._compute(boot, request))  # noqa: E731
        self.world.at(lag_s, compute)

    def _compute(self, boot: str, request: str) -> None:
        """Compute one block more, and announce it; with the last one the request is lent."""
        growing = self.growing.get(request)
        if boot != self.incarnation or growing is None:
            return
        if self.world.chance(self.world.chances.preempt):
            self._preempt(request, growing)
        position = growing.written
        self.memory.write_block(growing.number, position, growing.blocks[position])
        growing.written += 1
        if growing.written == len(growing.blocks):
            del self.growing[request]
            ticket = self.lent[request] = self._ticket(request, growing.blocks)
            now = self.machine.clock()
            offer = LeaseOffer(request, ticket.digest(), growing.ttl_s, now)
            self.sessions.apply_command(StreamCompletion(offer, ticket), now)
            self.turn()
            self.world.at(self.world.lag() * 5, lambda: self._sum(boot, ticket))
            return
        if growing.is_followed:
            self._announce(request, growing)
        self._compute_later(boot, request)

    def _announce(self, request: str, growing: Growing) -> None:
        """Announce what is written and was not announced."""
        first, growing.announced = growing.announced, growing.written
        fresh = growing.blocks[first : growing.announced]
        self._grow(request, (GrownBlocks(0, first, fresh),))
        self.world.counts["announced"] += len(fresh)

    def _preempt(self, request: str, growing: Growing) -> None:
        """Go on in other blocks from what was announced on; those before are pinned."""
        kept, rest = growing.blocks[: growing.announced], growing.blocks[growing.announced :]
        others = self.pool.take(growing.number, len(rest))
        if others is None:
            return
        self.world.counts["preempted"] += 1
        self.pool.give_back(rest)
        growing.blocks, growing.written = (*kept, *others), len(kept)
        self.lent[request] = self._ticket(request, growing.blocks)

    def _grow(self, request: str, blocks: tuple[GrownBlocks, ...]) -> None:
        self.sessions.apply_command(StreamGrowth(request, blocks), self.machine.clock())
        self.turn()

    def _followed(self, request: str) -> None:
        if (growing := self.growing.get(request)) is not None:
            growing.is_followed = True

    def lend_prefix(
        self, number: int, draw: Callable[[int], int], ttl_s: float
    ) -> tuple[int, Ticket] | None:
        """Lend what is found of a request drawn, to request ``number``; which one it is of."""
        self._serving.turn_now()
        found = list(self.pool.prefixes().items())
        if not found:
            return None
        of, held = found[draw(len(found))]
        blocks = held[: 1 + draw(len(held))]
        self.pool.share(blocks)
        return of, self._offer(f"p{number}", blocks, ttl_s)

    def _offer(self, request: str, blocks: tuple[int, ...], ttl_s: float) -> Ticket:
        ticket = self.lent[request] = self._ticket(request, blocks)
        now = self.machine.clock()
        self.sessions.apply_command(LeaseOffer(request, ticket.digest(), ttl_s, now), now)
        self._serving.turn_now()
        boot = self.incarnation
        self.world.at(self.world.lag() * 5, lambda: self._sum(boot, ticket))
        return ticket

    def _ticket(self, request: str, blocks: tuple[int, ...]) -> Ticket:
        return Ticket(
            self.name, self.incarnation, request, "127.0.0.1", self.port,
            len(blocks) * BLOCK_TOKENS, "prompt", (BlockList(0, blocks),),
        )  # fmt: skip

    def _sum(self, boot: str, ticket: Ticket) -> None:
        """What a worker does in the step after."""
        if boot == self.incarnation and ticket.request_id in self.lent:
            terms = Terms(ticket.request_id, ticket.num_tokens, sampled=False)
            sums = lent_sums(HostMemory(), self.memory.references, ticket.blocks, terms)
            self.sessions.apply_command(RankSums(ticket.request_id, 0, sums), self.machine.clock())
            self.turn()

    def abort(self, request: str) -> None:
        self.sessions.apply_command(Abort(request), self.machine.clock())
        self.turn()

    def reset(self) -> None:
        """Clear the cache, as after new weights: nothing lent before may be read after it."""
        self.world.counts["resets"] += 1
        boot, before = self.incarnation, list(self.lent)
        self.pool.forget()
        self.sessions.apply_command(AbortAll(), self.machine.clock())
        self.turn()

        def revoke() -> None:
            if boot == self.incarnation:
                self.sessions.apply_command(RevokeAll(), self.machine.clock())
                self._serving.turn_now()
                self.lent_before_reset += [request for request in before if request in self.lent]

        self.world.at(RESET_S, lambda: self.machine.when_awake(revoke))

    def crash(self) -> None:
        """End as SIGKILL does, and start anew at once, with other content in memory."""
        self.world.counts["crashes"] += 1
        self._serving.end()
        self.world.network.kill_peer(self.transport.peer_id)
        for poll in self.world.readers.values():
            self.world.at(self.world.lag(), poll)
        self.memory.raw[:] = 1
        self.freed_at.update((ticket, self.world.now) for ticket in self.lent.values())
        self._start()

    def open(self, arrived: Callable[[], None]) -> Wire:
        """A reader dials; return its end of the wire."""
        return self._serving.open(arrived)

    def turn(self) -> None:
        """Free what is over, and set the clock for what will be."""
        self._serving.turn()

    def _freed(self, ended: FreedLease) -> None:
        if ended.request not in self.lent:
            self.freed_twice.append(ended.request)
        ticket = self.lent.pop(ended.request)
        self.growing.pop(ended.request, None)
        self.pool.give_back(ticket.blocks[0].ids)
        self.freed_at[ticket] = self.world.now
        self.world.counts[f"freed {ended.why}"] += 1


def altered(ticket: Ticket) -> Ticket:
    """The ticket, as a client that changes it sends it on."""
    first, *rest = ticket.blocks[0].ids
    return replace(ticket, blocks=(BlockList(0, (first % (POOL - 1) + 1, *rest)),))
