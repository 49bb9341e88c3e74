"""Pulls beside which a store loads a part of the same blocks, whatever order things come in.

A block is free once its request is reported, so nothing may be reported while the store or a read
can still write to it; and a request is received only if every block was written, once.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import ENDED, Patience, PullState
from pdconn.planning import cover
from pdconn.planning.plan import Need, Pairing
from pdconn.protocol.messages import Confirmed, Granted, PullReply, Refused
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import (
    AbandonPull,
    CancelPull,
    ClaimTicket,
    EndBeside,
    FailedPull,
    PullRecord,
    ReadBlocks,
    Released,
)
from pdconn.puller.peers import Peer, PeerKey, PeerReplied, Rank
from pdconn.puller.pulls import Pulls
from pdconn.puller.reads import Job, Read, ReadSettled
from pdconn.puller.request_pull import RequestPull
from tests.fakes.pair import BLOCK_TOKENS, NUM_BLOCKS, Cache
from tests.property.scale import LawMachine, holds, notices
from transport import BackendFailure, ReadStats, Settled
from transport.testing.inprocess.faults import ManualClock

BLOCKS = (7, 8, 9)
"""Ours; the store has the first two of them."""
NEED = Need.for_range(0, 3 * BLOCK_TOKENS, (BlockList(0, BLOCKS),))
STORED = Need((range(2 * BLOCK_TOKENS),), NEED.blocks)
TICKET = Ticket("p", "boot", "r", "lender", 1, 12, "0" * 32, (BlockList(0, (3, 4, 5)),))
DRAIN_S, TTL_S = 2.0, 60.0


class World:
    """A rank, a lender that answers when the law says, and what was written to our blocks."""

    def __init__(self, pulls: type[Pulls]) -> None:
        self.clock, self.jobs = ManualClock(100.0), list[Job]()
        self.ours, self.theirs = Cache("BHLNC", filled=False), Cache("BHLNC", filled=True)
        patience = Patience(drain_s=DRAIN_S)
        me = Rank("d", 0, 1, 0, self.ours.references, {})
        self.pulls = pulls(me, self, self.jobs.append, self.clock, patience=patience)
        self.pulls.apply_command(ClaimTicket("d", "pull", TICKET))
        self.reads: list[Read] = []
        self.written: list[int] = []
        self.store_writes = False

    def dial(self, peer: Peer) -> None:
        """As the dialer of a puller: the lender is there at once."""
        peer.pairing = Pairing.between(self.ours.references, [self.theirs.references])
        peer.ranks, peer.state = {0: "lender"}, PeerState.READY

    @property
    def is_written(self) -> bool:
        """Whether the store or a read can write to our blocks."""
        return self.store_writes or bool(self.reads)

    @property
    def entry(self) -> RequestPull | None:
        return self.pulls._entries.get("d")

    @property
    def state(self) -> PullState | None:
        return None if self.entry is None else self.entry.machine.state

    def hear(self, reply: PullReply) -> None:
        peer = self.pulls.peers.to(PeerKey.from_ticket(TICKET))
        self.pulls.peers.events.append(PeerReplied(peer, reply))
        self.pulls._drain()
        self.pulls.finish_turn()
        self.take_reads()

    def take_reads(self) -> None:
        """What was posted since is in flight."""
        self.reads += [job for job in self.jobs if isinstance(job, Read)]
        self.jobs.clear()

    def end_store(self, num_blocks: int) -> None:
        """The store has loaded so many blocks, and writes to none any more."""
        self.written += BLOCKS[:num_blocks]
        tokens = range(num_blocks * BLOCK_TOKENS)
        loaded = Need((tokens,), NEED.blocks) if num_blocks else cover.NOTHING
        self.store_writes = False
        self.pulls.apply_command(EndBeside("d", loaded))
        self.take_reads()

    def settle(self, read: Read, *, fails: bool) -> None:
        """A read has ended."""
        self.reads.remove(read)
        base, size = int(self.ours.bytes.ctypes.data), self.ours.bytes.size // NUM_BLOCKS
        if not fails:
            for at, nbytes in zip(
                read.spans.local.tolist(), read.spans.nbytes.tolist(), strict=True
            ):
                self.written += range((at - base) // size, (at - base + nbytes - 1) // size + 1)
        error = BackendFailure("it broke") if fails else None
        settled = Settled(ReadStats(1, 1, 0.0, 0.0), error)
        self.pulls.handle_result(ReadSettled(read.tag, settled, self.clock()))
        self.take_reads()


class BesideMachine(LawMachine):
    """Grants, settles, loses, cancels and waits in any order."""

    pulls: type[Pulls] = Pulls

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.pulls)
        self.is_wanted = self.is_quarantined = self.is_reported = False

    def look(self) -> None:
        """Take reports, and hold them against the laws."""
        world = self.world
        reports, world.pulls.reports[:] = list(world.pulls.reports), []
        for report in reports:
            if isinstance(report, PullRecord):
                assert not world.is_written, "received while something writes"
                assert sorted(world.written) == list(BLOCKS), "a block is missing, or was twice"
            elif isinstance(report, FailedPull) and not report.quarantined:
                assert not world.is_written, "reported while something writes"
            elif isinstance(report, FailedPull):
                self.is_quarantined = True
            elif isinstance(report, Released):
                assert self.is_quarantined, "released, and was not in quarantine"
                assert not world.is_written, "released while something writes"
                self.is_quarantined = False
            if isinstance(report, PullRecord | FailedPull):
                assert self.is_wanted, "reported unasked"
                assert not self.is_reported, "reported twice"
                self.is_reported = True

    @precondition(lambda self: self.world.state is PullState.CLAIMING)
    @rule(refused=st.sampled_from([False, False, False, True]))
    def answer_claim(self, refused: bool) -> None:
        seq = self.world.entry.machine._seq
        if refused:
            self.world.hear(Refused(seq, "r", "pull", "unknown", "it is gone"))
        else:
            self.world.hear(Granted(seq, "r", "pull", int(TTL_S * 1000)))
        self.look()

    @precondition(lambda self: not self.is_wanted)
    @rule()
    def want(self) -> None:
        self.is_wanted = self.world.store_writes = True
        rest = cover.rest_of(NEED, STORED)
        self.world.pulls.apply_command(ReadBlocks("d", rest, STORED))
        self.world.take_reads()
        self.look()

    @precondition(lambda self: self.world.store_writes)
    @rule(num_blocks=st.integers(0, 2))
    def end_store(self, num_blocks: int) -> None:
        self.world.end_store(num_blocks)
        self.look()

    @precondition(lambda self: self.world.reads)
    @rule(fails=st.sampled_from([False, False, True]), last=st.booleans())
    def settle(self, fails: bool, last: bool) -> None:
        self.world.settle(self.world.reads[-1 if last else 0], fails=fails)
        self.look()

    @precondition(lambda self: self.world.state is PullState.CONFIRMING)
    @rule()
    def confirm(self) -> None:
        self.world.hear(Confirmed(self.world.entry.machine._seq, "r", "pull"))
        self.look()

    @precondition(lambda self: self.is_wanted and not self.is_reported)
    @rule(abandons=st.booleans())
    def leave(self, abandons: bool) -> None:
        command: Any = AbandonPull("d") if abandons else CancelPull("d")
        self.world.pulls.apply_command(command)
        self.world.take_reads()
        self.look()

    @rule(seconds=st.sampled_from([0.1, DRAIN_S, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.world.pulls.tick_due(self.world.clock())
        self.world.pulls.finish_turn()
        self.world.take_reads()
        self.look()

    def check_end(self) -> None:
        """Whatever came: once nothing writes any more, the request is reported, and forgotten."""
        world = self.world
        if not self.is_wanted:
            self.want()
        if world.state is PullState.CLAIMING:
            self.answer_claim(refused=False)
        if world.store_writes:
            self.end_store(1)
        while world.reads:
            self.settle(fails=False, last=False)
        if world.state is PullState.CONFIRMING:
            self.confirm()
        assert self.is_reported
        assert not self.is_quarantined
        assert world.entry is None or world.state not in ENDED
        assert world.pulls.num_open == 0, "a table does not drain"


@pytest.mark.hypothesis
def test_nothing_is_reported_while_something_writes_and_all_is_written_once() -> None:
    holds(BesideMachine, examples=150, steps=12)


class ReportsUnderTheStore(Pulls):
    """Does not know that the store writes when a pull fails before it reads."""

    def _report_failed(self, request: str, reason: str, quarantined: bool = False) -> None:
        self.reports.append(FailedPull(request, reason, quarantined))


class TakesTheStoreForDone(Pulls):
    """Confirms a pull when its own reads have settled."""

    def _start_read(self, command: ReadBlocks) -> None:
        super()._start_read(ReadBlocks(command.request, command.need))


class BelievesTheStore(Pulls):
    """Takes what was to be loaded for loaded."""

    def _end_beside(self, command: EndBeside) -> None:
        super()._end_beside(EndBeside(command.request, STORED))


class ReadsAllAgain(Pulls):
    """Reads all that the store was to load if a part of it is missing."""

    def _end_beside(self, command: EndBeside) -> None:
        whole = command.loaded == STORED
        super()._end_beside(EndBeside(command.request, STORED if whole else cover.NOTHING))


@pytest.mark.parametrize(
    "broken", [ReportsUnderTheStore, TakesTheStoreForDone, BelievesTheStore, ReadsAllAgain]
)
def test_those_laws_notice_a_puller_that_breaks_them(broken: type[Pulls]) -> None:
    class Broken(BesideMachine):
        pulls = broken

    notices(Broken, examples=300, steps=12)
