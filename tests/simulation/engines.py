"""Simulated engines: their scheduling is made up, their leases, pulls and plans are real."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdconn.integrity.lent import lent_sums
from pdconn.integrity.memory import HostMemory
from pdconn.integrity.sums import Terms
from pdconn.lender.checksums import RankSums
from pdconn.lender.sessions import Abort, AbortAll, LenderSessions, RevokeAll, Session
from pdconn.lifecycle.lease import LeaseOffer
from pdconn.lifecycle.pull import Patience
from pdconn.planning.plan import Need
from pdconn.protocol.errors import ProtocolError
from pdconn.protocol.messages import RankGeometry, Welcome, decode_from_reader
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import CancelPull, ClaimTicket, ReadBlocks
from pdconn.puller.peers import Peer
from pdconn.puller.pulls import Pulls
from pdconn.puller.rank import Rank
from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reads import Job, JobResult, ReadSettled, TransportJobs
from pdconn.puller.results import PullResults
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import ProbeRead, WarmUp
from pdconn.puller.warmup_state import Place
from pdconn.sidechannel.connection import SideChannelLost
from registration.scratch import Scratch
from tests.simulation.log import ReaderLog, TappedConnection
from tests.simulation.memory import BLOCK_TOKENS, HEADS, Memory
from tests.simulation.pool import BlockPool
from tests.simulation.world import EngineClock, Machine, Wire, World, connect
from transport import HOST
from transport.inprocess.transport import InProcessTransport

POOL = 24
SLICE_NBYTES = 200
"""So short that long reads are posted in two parts, cut inside of a block."""
PATIENCE = Patience(claim_s=1.0, read_s=4.0, drain_s=0.3)
RESET_S = 0.1
"""How long a reset waits for what is being read."""
TRAITS = {"model": "simulated"}


class Clockwork:
    """Calls back a little after a deadline, once per deadline.

    Clocks ring late, so what was read too late may be seen before the alarm is: by the lag of
    any event here, and by ``late_s`` more.
    """

    late_s = 0.0

    def __init__(self, world: World, clock: EngineClock) -> None:
        self._world = world
        self._clock = clock
        self._set_for: float | None = None

    def set(self, deadline: float | None, act: Callable[[], None]) -> None:
        """Call ``act`` at ``deadline`` unless an earlier call is set already."""
        if deadline is None or (self._set_for is not None and self._set_for <= deadline):
            return
        self._set_for = deadline

        def ring() -> None:
            if self._set_for == deadline:
                self._set_for = None
            act()

        late = self._world.lag() + self.late_s
        self._world.at(self._clock.true_seconds(deadline) + late, ring)


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
        self._wires: dict[Session, Wire] = {}
        self._start()

    def _start(self) -> None:
        self.boots += 1
        self.incarnation = f"{self.name}/{self.boots}"
        self.transport = InProcessTransport(self.world.network, self.name)
        self.transport.register(self.memory.references.memories())
        rank = RankGeometry(0, 0, self.transport.address(), self.memory.references)
        self.sessions = LenderSessions(
            Welcome.of(self.name, self.incarnation, TRAITS, (rank,)), is_summing=True
        )
        self.pool = BlockPool(POOL)
        self.lent: dict[str, Ticket] = {}
        self._alarm = Clockwork(self.world, self.machine.clock)

    def lend(self, number: int, num_blocks: int, ttl_s: float) -> Ticket | None:
        """Compute and lend a request, or None when there is no room."""
        self._turn()
        blocks = self.pool.take(number, num_blocks)
        if blocks is None:
            return None
        self.memory.write(number, blocks)
        return self._offer(f"r{number}", blocks, ttl_s)

    def lend_prefix(
        self, number: int, draw: Callable[[int], int], ttl_s: float
    ) -> tuple[int, Ticket] | None:
        """Lend what is found of a request drawn, to request ``number``; which one it is of."""
        self._turn()
        found = list(self.pool.prefixes().items())
        if not found:
            return None
        of, held = found[draw(len(found))]
        blocks = held[: 1 + draw(len(held))]
        self.pool.share(blocks)
        return of, self._offer(f"p{number}", blocks, ttl_s)

    def _offer(self, request: str, blocks: tuple[int, ...], ttl_s: float) -> Ticket:
        lists = (BlockList(0, blocks),)
        ticket = Ticket(
            self.name, self.incarnation, request, "127.0.0.1", self.port,
            len(blocks) * BLOCK_TOKENS, "prompt", lists,
        )  # fmt: skip
        self.lent[request] = ticket
        now = self.machine.clock()
        self.sessions.apply(LeaseOffer(request, ticket.digest(), ttl_s, now), now)
        self._turn()
        boot = self.incarnation
        self.world.at(self.world.lag() * 5, lambda: self._sum(boot, ticket))
        return ticket

    def _sum(self, boot: str, ticket: Ticket) -> None:
        """What a worker does in the step after."""
        if boot == self.incarnation and ticket.request_id in self.lent:
            terms = Terms(ticket.request_id, ticket.num_tokens, sampled=False)
            sums = lent_sums(HostMemory(), self.memory.references, ticket.blocks, terms)
            self.sessions.apply(RankSums(ticket.request_id, 0, sums), self.machine.clock())
            self.turn()

    def abort(self, request: str) -> None:
        self.sessions.apply(Abort(request), self.machine.clock())
        self.turn()

    def reset(self) -> None:
        """Clear the cache, as after new weights: nothing lent before may be read after it."""
        self.world.counts["resets"] += 1
        boot, before = self.incarnation, list(self.lent)
        self.pool.forget()
        self.sessions.apply(AbortAll(), self.machine.clock())
        self.turn()

        def revoke() -> None:
            if boot == self.incarnation:
                self.sessions.apply(RevokeAll(), self.machine.clock())
                self._turn()
                self.lent_before_reset += [request for request in before if request in self.lent]

        self.world.at(RESET_S, lambda: self.machine.when_awake(revoke))

    def crash(self) -> None:
        """End as SIGKILL does, and start anew at once, with other content in memory."""
        self.world.counts["crashes"] += 1
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.cut()
        self.world.network.kill(self.transport.peer_id)
        for poll in self.world.readers.values():
            self.world.at(self.world.lag(), poll)
        self.memory.raw[:] = 1
        self.freed_at.update((ticket, self.world.now) for ticket in self.lent.values())
        self._start()

    def open(self, arrived: Callable[[], None]) -> Wire:
        """A reader dials; return its end of the wire."""
        session = Session("reader")
        serve = lambda: self.machine.when_awake(lambda: self._serve(session))  # noqa: E731
        theirs, ours = connect(self.world, arrived, serve)
        self._wires[session] = ours
        return theirs

    def turn(self) -> None:
        """Free what is over, and set the clock for what will be."""
        self.machine.when_awake(self._turn)

    def _turn(self) -> None:
        now = self.machine.clock()
        turn = self.sessions.turn(now)
        pending = turn.pending
        while turn.wake_at <= now:
            turn = self.sessions.turn(now)
            pending += turn.pending
        for ended in self.sessions.freed:
            if ended.request not in self.lent:
                self.freed_twice.append(ended.request)
            ticket = self.lent.pop(ended.request)
            self.pool.give_back(ticket.blocks[0].ids)
            self.freed_at[ticket] = self.world.now
            self.world.counts[f"freed {ended.why}"] += 1
        self.sessions.freed.clear()
        for session in pending:
            self._say(session)
        self._alarm.set(None if turn.wake_at == math.inf else turn.wake_at, self.turn)

    def _serve(self, session: Session) -> None:
        wire = self._wires.get(session)
        if wire is None:
            return
        try:
            for body in wire.receive():
                self.sessions.handle(session, decode_from_reader(body), self.machine.clock())
        except ProtocolError as error:
            self.sessions.reject(session, error)
        except SideChannelLost:
            del self._wires[session]
            return
        self._turn()
        self._say(session)

    def _say(self, session: Session) -> None:
        wire = self._wires.get(session)
        if wire is None:
            return
        try:
            wire.send(self.sessions.take_frames(session))
        except SideChannelLost:
            del self._wires[session]
            return
        if session.leaving:
            self._wires.pop(session).finish()


class DecodeRank:
    """One rank: real pulls over simulated wires and the in-process transport."""

    def __init__(self, world: World, engine: Decode, rank: int, of: int, warms: bool) -> None:
        self.world = world
        self._engine = engine
        self.clock = engine.machine.clock
        self.memory = Memory("BLHNC", POOL, rank * HEADS // of, HEADS // of)
        self.transport = InProcessTransport(world.network, f"{engine.name}.{rank}")
        self.transport.register(self.memory.references.memories())
        self.log = ReaderLog()
        me = Rank(engine.name, rank, of, rank, self.memory.references, TRAITS)
        self.reading = TransportJobs(
            self.transport, self._answer, self.clock, ChunkSizer(SLICE_NBYTES)
        )
        verify = list(Verify)[engine.number % len(Verify)]
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
        self.pulls.tick(self.clock())
        self.pulls.finish_turn()
        while self.pulls.unplanned:
            self.pulls.finish_turn()
        self._alarm.set(self.pulls.next_deadline(), self.turn)
        outcome = PullResults.of(self.pulls.reports)
        self.pulls.reports.clear()
        if outcome.records or outcome.failed or outcome.released or outcome.claims:
            for record in outcome.records:
                ticket = self._engine.requests[record.request].ticket
                lender = self._engine.lenders[ticket.port]
                self.log.received(record.request, lender.freed_at.get(ticket, math.inf))
            self._engine.reported(self, outcome)

    def _soon(self, peer: Peer) -> None:
        self._when_awake(lambda: self._serve(peer))

    def _serve(self, peer: Peer) -> None:
        self.pulls.serve(peer)
        self.turn()

    def _post(self, job: Job) -> None:
        self.world.at(self.world.lag(), lambda: self._when_awake(lambda: self._carry_out(job)))

    def _carry_out(self, job: Job) -> None:
        self.reading.do(job)
        self.poll()

    def poll(self) -> None:
        """Look at the reads: one may have settled."""
        self._when_awake(self._poll)

    def _poll(self) -> None:
        while self.reading.post() | self.reading.poll():
            pass

    def _answer(self, answer: JobResult) -> None:
        if isinstance(answer, ReadSettled) and not isinstance(answer.tag, ProbeRead):
            self.log.settled(answer.tag.request, self.clock(), self.world.now)  # type: ignore[attr-defined]
        self.world.at(self.world.lag(), lambda: self._when_awake(lambda: self._hear(answer)))

    def _hear(self, answer: JobResult) -> None:
        self.pulls.handle(answer)
        self.turn()


@dataclass
class Request:
    """A request in a decode engine; ``waiting`` are the ranks that have not reported."""

    number: int
    ticket: Ticket
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
            rank.pulls.apply(ClaimTicket(name, name, ticket))
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
        count = len(request.ticket.blocks[0].ids)
        if len(self.free) < count:
            self.world.at(0.05, lambda: self._schedule(name))
            return
        request.blocks = tuple(self.free.pop() for _ in range(count))
        request.waiting = set(range(len(self.ranks)))
        need = Need.of(0, request.ticket.num_tokens, (BlockList(0, request.blocks),))
        for rank in self.ranks:
            rank.pulls.apply(ReadBlocks(name, need))
            rank.turn()

    def _cancel(self, name: str) -> None:
        request = self.requests.get(name)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        self.world.counts["cancelled"] += 1
        for rank in self.ranks:
            rank.pulls.apply(CancelPull(name))
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


def altered(ticket: Ticket) -> Ticket:
    """The ticket, as a client that changes it sends it on."""
    first, *rest = ticket.blocks[0].ids
    return replace(ticket, blocks=(BlockList(0, (first % (POOL - 1) + 1, *rest)),))
