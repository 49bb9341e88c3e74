"""The laws of the design over leases and pulls, as code that can fail.

::

    law 3   at every event    what a reader may still believe is lent; nothing is freed twice
    law 4   at every event    what was received settled before its claim was over, before its
                              lease was freed, and is right
    law 5   at every event    every entry of every table has an owner
            at the end        every table is empty, every block is back
    and     at every event    no block that is free can be written

Deadlines are those of :mod:`tests.simulation.log`, not of the machines that are tested.  A claim
can outlive its lease where clocks disagree, so there the first part of law 3 is not asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import PullState
from pdconn.puller.warmup import PagePull
from tests.simulation.decode import Decode, DecodeRank
from tests.simulation.prefill import Prefill
from tests.simulation.world import World
from transport.testing.inprocess.faults import ReadRequest

BELIEVING = (PullState.HELD, PullState.FOLLOWING, PullState.READING)


class LawBroken(AssertionError):
    """A law does not hold."""


class Laws:
    """See the module: :meth:`hold` is checked after each event, the rest at the end."""

    def __init__(self, world: World, prefills: list[Prefill], decodes: list[Decode]) -> None:
        self._world = world
        self._prefills = prefills
        self._decodes = decodes
        self._targets: dict[int, tuple[Decode, set[int]]] = {}

    def hold(self) -> None:
        """Check what must hold at every moment.

        Raises:
            LawBroken: naming the law, the request and the time.
        """
        self._nothing_lent_is_free_while_believed()
        self._nothing_free_can_be_written()
        self._everything_received_settled_in_time()
        for prefill in self._prefills:
            self._require(not prefill.freed_twice, f"law 3: freed twice: {prefill.freed_twice}")
            stale = prefill.lent_before_reset
            self._require(not stale, f"law 4: {stale} are lent after the reset of {prefill.name}")
            self._everything_lent_has_an_owner(prefill)
            self._nothing_lent_is_free(prefill)
        for decode in self._decodes:
            self._require(not decode.wrong, f"law 4: {decode.wrong} holds another request's KV")
        for decode, rank in self._ranks():
            self._everything_pulled_has_an_owner(decode, rank)

    def hold_at_the_end(self) -> None:
        """Check that every table is empty and every block is back.

        Raises:
            LawBroken: naming what is left, and where.
        """
        for prefill in self._prefills:
            self._require(prefill.sessions.num_lent == 0, f"law 5: {prefill.name} still lends")
            self._require(
                prefill.sessions.num_summed == 0, f"law 5: {prefill.name} keeps checksums"
            )
            self._require(prefill.sessions.num_streams == 0, f"law 5: {prefill.name} has streams")
            self._require(
                prefill.sessions.turn(prefill.machine.clock()).wake_at == math.inf,
                f"law 5: {prefill.name} has alarms",
            )
            self._all_free(prefill.name, prefill.pool.free)
        for decode in self._decodes:
            self._require(not decode.requests, f"law 5: {decode.name} has {decode.requests}")
            self._all_free(decode.name, decode.free)
            for rank in decode.ranks:
                self._require(rank.pulls.num_open == 0, f"law 5: {decode.name} has open pulls")
                self._require(len(rank.reading) == 0, f"law 5: {decode.name} has open reads")
                alarm = rank.pulls.next_alarm()
                self._require(alarm is None, f"law 5: {decode.name} has alarms")
                warmup = rank.pulls.warmup
                is_warm = len(warmup.warm) == len(warmup._places)
                self._require(is_warm, f"law 5: {decode.name} is cold")
                idle = all(not peer.pulls and not peer.retired for peer in rank.pulls.peers)
                self._require(idle, f"law 5: {decode.name} keeps unused peers")
                known = {at for peer in rank.pulls.peers for at in peer.ranks.values()}
                self._subset(rank.transport._peers, known, f"{decode.name} reaches unknown peers")
        self._require(not self._world.network.in_flight(), "law 5: a read is in flight")

    def _nothing_lent_is_free_while_believed(self) -> None:
        """Law 3: what may be believed is lent, whatever the reader takes its deadline to be."""
        chances = self._world.chances
        if chances.drift or chances.freeze or chances.reset:
            return
        alive = {prefill.incarnation: prefill for prefill in self._prefills}
        for _, rank in self._ranks():
            for entry in rank.pulls._entries.values():
                machine = entry.machine
                if entry.ticket is None:
                    continue
                lender = alive.get(entry.ticket.incarnation)
                if lender is None or machine.state not in BELIEVING:
                    continue
                if rank.clock() >= rank.log.deadlines[entry.request]:
                    continue
                self._require(
                    entry.ticket.request_id in lender.lent,
                    f"law 3: {entry.ticket.request_id} is free, and {entry.request} reads it",
                )

    def _nothing_lent_is_free(self, prefill: Prefill) -> None:
        """Law 3: blocks that several tickets lend are free when the last of them is over."""
        lent = {block for ticket in prefill.lent.values() for block in ticket.blocks[0].ids}
        both = sorted(lent.intersection(prefill.pool.free))
        self._require(not both, f"law 3: {both} of {prefill.name} are lent and free")

    def _everything_received_settled_in_time(self) -> None:
        """Law 4, by time.  By content it is broken only if the blocks had a new owner by then."""
        for _, rank in self._ranks():
            self._require(not rank.log.too_late, f"law 4: received: {rank.log.too_late}")
            self._require(not rank.log.not_lent, f"law 4: received: {rank.log.not_lent}")
            self._require(not rank.log.read_on, f"law 4: read after an error: {rank.log.read_on}")

    def _everything_lent_has_an_owner(self, prefill: Prefill) -> None:
        """Law 5: a lender's tables speak of what the engine lends, and of nothing else."""
        sessions, lent = prefill.sessions, prefill.lent
        self._subset(sessions._leases._leases, lent, f"{prefill.name} has leases of nothing")
        self._subset(
            sessions._checksums._leases, lent, f"{prefill.name} has checksums of nothing lent"
        )
        self._subset(
            sessions._streams._of_request, lent, f"{prefill.name} has streams of nothing lent"
        )
        self._subset(sessions._claimants, lent, f"{prefill.name} has claimants of nothing lent")

    def _everything_pulled_has_an_owner(self, decode: Decode, rank: DecodeRank) -> None:
        """Law 5: a rank's pulls are requests', its peers and its reads are pulls'."""
        pulls, name = rank.pulls, decode.name
        entries, peers = set(pulls._entries.values()), list(pulls.peers)
        pages = {pull for pull in pulls._by_pull.values() if isinstance(pull, PagePull)}
        uses = {(pull.peer, pull) for pull in (*entries, *pages)}
        needed = {entry.peer for entry in entries}
        over = [peer for peer in peers if peer.state is PeerState.CLOSED or peer.retired]
        listed = [(peer, pull) for peer in peers for pull in peer.pulls.values()]
        self._subset(pulls._entries, decode.requests, f"{name} has pulls of no request")
        self._subset(pulls._by_pull.values(), entries | pages, f"{name} has alarms of no pull")
        self._subset(rank.reading.tags, entries | pages, f"{name} has reads of no pull")
        self._subset(listed, uses, f"{name} has peers with pulls that are none")
        self._subset(over, needed, f"{name} has peers that are over")
        begun = [page for page in pages if page.machine.state is not PullState.QUARANTINED]
        tried = {place for place in pulls.warmup._places if place.timer.due_at is None}
        self._subset([page.place for page in begun], tried, f"{name} warms what is not tried")
        self._require(len({page.place for page in begun}) == len(begun), f"{name} warms twice")
        unsent = {peer for peer in peers if peer.outgoing}
        self._subset(unsent, pulls.peers.unsent, f"{name} has messages that nothing sends")
        self._subset(pulls.peers.unsent, unsent, f"{name} has peers with no message to send")

    def _nothing_free_can_be_written(self) -> None:
        """A block that the engine may give away is not the target of any read."""
        reads = self._world.network.in_flight()
        for read in reads:
            if read.number not in self._targets:
                self._targets[read.number] = self._target(read)
            decode, blocks = self._targets[read.number]
            written = blocks.intersection(decode.free)
            self._require(not written, f"{written} of {decode.name} are free and written")
        if len(self._targets) > 2 * len(reads) + 100:
            self._targets = {r.number: self._targets[r.number] for r in reads}

    def _target(self, read: ReadRequest) -> tuple[Decode, set[int]]:
        for decode, rank in self._ranks():
            if rank.transport.peer_id == read.reader:
                raw = rank.memory.raw
                row = raw.nbytes // len(raw)
                return decode, {(at - raw.ctypes.data) // row for at in read.spans.local.tolist()}
        raise AssertionError(f"no rank is {read.reader}")

    def _ranks(self) -> list[tuple[Decode, DecodeRank]]:
        return [(decode, rank) for decode in self._decodes for rank in decode.ranks]

    def _all_free(self, name: str, free: list[int]) -> None:
        expected = list(range(1, len(self._decodes[0].ranks[0].memory.cells)))
        self._require(sorted(free) == expected, f"law 5: {name} has free blocks {sorted(free)}")

    def _subset(self, some: Collection[object], of: Collection[object], what: str) -> None:
        left = [each for each in some if each not in of]
        self._require(not left, f"law 5: {what}: {left}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise LawBroken(f"seed {self._world.seed}, {self._world.now:.4f} s: {what}")
