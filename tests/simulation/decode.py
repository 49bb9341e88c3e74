"""Simulated decode engines: their scheduling is made up, their pulls and plans are real."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdconn.lifecycle.pull import Patience
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import CancelPull, ClaimTicket, ReadBlocks
from pdconn.puller.peers import Peer, PeerPull, Rank
from pdconn.puller.pulls import Pulls, RequestPull
from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reads import Job, JobResult, Read, ReadSettled, TransportJobs
from pdconn.puller.thread import PullResults
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import Place, WarmUp
from registration.scratch import Scratch
from tests.simulation.log import ReaderLog, TappedConnection
from tests.simulation.memory import BLOCK_TOKENS, HEADS, Memory
from tests.simulation.prefill import POOL, TRAITS, Prefill
from tests.simulation.world import Clockwork, Machine, World
from transport import HOST
from transport.testing.inprocess.transport import InProcessTransport

SLICE_NBYTES = 200
"""So short that long reads are posted in two parts, cut inside of a block."""
PATIENCE = Patience(claim_s=1.0, read_s=4.0, drain_s=0.3)


class DecodeRank:
    """One rank: real pulls over simulated wires and the in-process transport."""

    def __init__(
        self,
        world: World,
        engine: Decode,
        rank: int,
        of: int,
        warms: bool,
        *,
        num_blocks: int = POOL,
        verify: Verify | None = None,
    ) -> None:
        self.world = world
        self._engine = engine
        self.clock = engine.machine.clock
        self.memory = Memory("BLHNC", num_blocks, rank * HEADS // of, HEADS // of)
        self.transport = InProcessTransport(world.network, f"{engine.name}.{rank}")
        self.transport.register(self.memory.references.memories())
        self.log = ReaderLog()
        me = Rank(engine.name, rank, of, rank, self.memory.references, TRAITS)
        self.reading = TransportJobs(
            self.transport, self._answer, self.clock, ChunkSizer(SLICE_NBYTES)
        )
        verify = verify or list(Verify)[engine.number % len(Verify)]
        self.pulls = Pulls(
            me,
            self,
            self._post,
            self.clock,
            patience=PATIENCE,
            verify=verify,
            warm_up=self._warm_up() if warms else None,
        )
        self._alarm = Clockwork(world, self.clock)
        self._when_awake = engine.machine.when_awake
        world.readers[self.transport.peer_id] = self.poll
        if warms:
            world.at(world.lag(), self.turn)

    def _warm_up(self) -> WarmUp:
        """All lenders, before anything is pulled and whenever they were lost."""
        self._scratch = Scratch.on(HOST)
        self.transport.register([self._scratch.memory])
        places = tuple(Place("127.0.0.1", port) for port in self._engine.lenders)
        return WarmUp(places, self._scratch.memory)

    def dial(self, peer: Peer) -> None:
        """As ``pdconn.puller.peers.Dialer.dial``."""
        wire = self._engine.lenders[peer.key.port].open(lambda: self._soon(peer))
        peer.connection = TappedConnection(wire, self.log, self.clock)

    def turn(self) -> None:
        """What the puller's thread does between two waits."""
        self._when_awake(self._turn)

    def _turn(self) -> None:
        self.pulls.tick_due(self.clock())
        self.pulls.finish_turn()
        while self.pulls.unplanned:
            self.pulls.finish_turn()
        self._alarm.set(self.pulls.next_alarm(), self.turn)
        outcome = PullResults.from_reports(self.pulls.reports)
        self.pulls.reports.clear()
        if outcome.records or outcome.failed or outcome.released or outcome.claims:
            for record in outcome.records:
                ticket = self._engine.requests[record.request].ticket
                assert ticket is not None
                freed_at = self._engine.lenders[ticket.port].freed_at
                self.log.received(record.request, _when_freed(ticket, freed_at))
            self._engine.reported(self, outcome)

    def _soon(self, peer: Peer) -> None:
        self._when_awake(lambda: self._serve(peer))

    def _serve(self, peer: Peer) -> None:
        self.pulls.handle_readable(peer)
        self.turn()

    def _post(self, job: Job) -> None:
        if isinstance(job, Read) and isinstance(job.tag, RequestPull):
            self.log.posted(job.tag.pull)
        self.world.at(self.world.lag(), lambda: self._when_awake(lambda: self._carry_out(job)))

    def _carry_out(self, job: Job) -> None:
        self.reading.do_job(job)
        self.poll()

    def poll(self) -> None:
        """Look at the reads: one may have settled."""
        self._when_awake(self._poll)

    def _poll(self) -> None:
        while self.reading.post_chunk() | self.reading.poll_reads():
            pass

    def _answer(self, answer: JobResult) -> None:
        if isinstance(answer, ReadSettled) and isinstance(answer.tag, RequestPull):
            self.log.settled(answer.tag.request, self.clock(), self.world.now)
        self.world.at(self.world.lag(), lambda: self._when_awake(lambda: self._hear(answer)))

    def _hear(self, answer: JobResult) -> None:
        if isinstance(answer, ReadSettled) and answer.settled.error is not None:
            assert isinstance(answer.tag, PeerPull)
            self.log.heard_of_error(answer.tag.pull)
        self.pulls.handle_result(answer)
        self.turn()


def _when_freed(ticket: Ticket, freed_at: Mapping[Ticket, float]) -> float:
    """When what a ticket names was given back; an early one had no blocks yet."""
    if ticket in freed_at:
        return freed_at[ticket]
    key = ticket.incarnation, ticket.request_id
    found = (at for of, at in freed_at.items() if (of.incarnation, of.request_id) == key)
    return next(found, math.inf) if not ticket.blocks else math.inf


@dataclass
class Request:
    """A request in a decode engine; ``waiting`` are the ranks that have not reported."""

    number: int
    ticket: Ticket | None
    blocks: tuple[int, ...] = ()
    waiting: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)
    failed: str | None = None
    cancelled: bool = False


class Decode:
    """A decode engine: gives blocks to requests, and takes them back as vLLM would."""

    def __init__(
        self,
        world: World,
        number: int,
        ranks: int,
        lenders: dict[int, Prefill],
        warms: bool = False,
    ) -> None:
        self.world = world
        self.machine = Machine(world)
        self.number = number
        self.name = f"decode{number}"
        self.lenders = lenders
        self.free = list(range(1, POOL))
        self.requests: dict[str, Request] = {}
        self.ranks = [DecodeRank(world, self, rank, ranks, warms) for rank in range(ranks)]
        self.wrong: list[str] = []
        self._pulls = 0

    def arrive(self, number: int, ticket: Ticket) -> None:
        """A request comes with a ticket; it gets its blocks a little later."""
        name = f"{self.name}/{number}/{self._pulls}"
        self._pulls += 1
        self.requests[name] = Request(number, ticket)
        for rank in self.ranks:
            rank.pulls.apply_command(ClaimTicket(name, name, ticket))
            rank.turn()
        self.world.at(self.world.lag() * 10, lambda: self._schedule(name))
        if self.world.chance(self.world.chances.cancel):
            self.world.at(self.world.rng.expovariate(5.0), lambda: self._cancel(name))

    def reported(self, rank: DecodeRank, outcome: PullResults) -> None:
        """A rank's pulls ended, or came out of quarantine."""
        me = self.ranks.index(rank)
        for record in outcome.records:
            self._rank_done(me, record.request, None, False)
        for failed in outcome.failed:
            self._rank_done(me, failed.request, failed.reason, failed.quarantined)
        for name in outcome.released:
            request = self.requests[name]
            request.quarantined.discard(me)
            self._give_back(name, request)

    def _schedule(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None:
            return
        assert request.ticket is not None
        count = request.ticket.num_tokens // BLOCK_TOKENS
        if len(self.free) < count:
            self.world.at(0.05, lambda: self._schedule(name))
            return
        request.blocks = tuple(self.free.pop() for _ in range(count))
        request.waiting = set(range(len(self.ranks)))
        need = Need.for_range(0, request.ticket.num_tokens, (BlockList(0, request.blocks),))
        for rank in self.ranks:
            rank.pulls.apply_command(ReadBlocks(name, need))
            rank.turn()

    def _cancel(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        self.world.counts["cancelled"] += 1
        for rank in self.ranks:
            rank.pulls.apply_command(CancelPull(name))
            rank.turn()
        if not request.blocks:  # it was queueing, and will not be reported
            del self.requests[name]

    def _rank_done(self, me: int, name: str, reason: str | None, quarantined: bool) -> None:
        request = self.requests[name]
        assert me in request.waiting, f"{name} was reported twice by rank {me}"
        request.waiting.discard(me)
        request.failed = request.failed or reason
        if quarantined:
            request.quarantined.add(me)
            self.world.counts["quarantined"] += 1
        if request.waiting:
            return
        self.world.counts["received" if request.failed is None else "failed"] += 1
        if request.failed is None:
            self._decode(name, request)
        self._give_back(name, request)

    def _decode(self, name: str, request: Request) -> None:
        """Use what was received: it must be this request's, in every rank."""
        for rank in self.ranks:
            if not rank.memory.holds(request.number, request.blocks):
                self.wrong.append(name)

    def _give_back(self, name: str, request: Request) -> None:
        if not request.waiting and not request.quarantined:
            # The next request computes into these blocks: they are as good as overwritten.
            for rank in self.ranks:
                for block in request.blocks:
                    rank.memory.cells[block] = 0
            self.free += request.blocks
            del self.requests[name]
