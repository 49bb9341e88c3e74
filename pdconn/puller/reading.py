"""Reading without a thread: jobs are carried out on a transport by whoever calls.

Long reads are posted in slices, so that short ones get their turn (``runtime.lanes``).
A simulation reads in virtual time with the very code that the reader's thread runs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from pdconn.integrity.memory import AnyMemory
from pdconn.puller.jobs import (
    Connect,
    Connected,
    Disconnect,
    Job,
    News,
    ReadSettled,
    Sum,
    Summed,
)
from pdconn.puller.read_queue import ChunkSizer, PeerReadQueue, ReadChunk
from pdconn.sidechannel.clock import steady
from transport import PeerId, ReadId, ReadStats, Settled, Transport, TransportError
from transport.address import named_in
from transport.errors import BadAddress

log = logging.getLogger(__name__)

_NOTHING = ReadStats(0, 0, 0.0, 0.0)


class TransportJobs:
    """Carries out jobs on a transport, on whichever thread calls it.

    Args:
        transport: closed by :meth:`close`.
        deliver: gets the answers; must not block.
        pace: how long the parts are that reads are posted in.
    """

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[News], None],
        clock: Callable[[], float] = steady,
        pace: ChunkSizer | None = None,
    ) -> None:
        self._transport = transport
        self._deliver = deliver
        self._clock = clock
        self._pace = pace or ChunkSizer()
        self._lanes: dict[PeerId, PeerReadQueue] = {}
        self._flights: dict[ReadId, ReadChunk] = {}
        self._users: Counter[PeerId] = Counter()
        self._addresses: dict[PeerId, bytes] = {}
        self._memory = AnyMemory()

    def __len__(self) -> int:
        """Reads, or slices of them, that can still write."""
        return len(self._flights)

    @property
    def tags(self) -> set[object]:
        """Whose reads are not over, posted or not."""
        return {whole.tag for lane in self._lanes.values() for whole in lane}

    @property
    def is_ready(self) -> bool:
        """Whether a slice of some read waits to be posted, and may be."""
        return any(lane.is_ready for lane in self._lanes.values())

    def do(self, job: Job) -> None:
        """Carry out a job.  A read is only queued: :meth:`post` begins it."""
        if isinstance(job, Connect):
            self._connect(job)
        elif isinstance(job, Sum):
            self._sum(job)
        elif isinstance(job, Disconnect):
            # A lender that was dialled anew, or under two names, is one peer down here.
            self._users[job.peer] -= 1
            if self._users[job.peer] <= 0:
                del self._users[job.peer]
                self._addresses.pop(job.peer, None)
                self._transport.disconnect(job.peer)
        else:
            lane = self._lanes.setdefault(job.peer, PeerReadQueue(self._pace))
            lane.add(job.tag, job.peer, job.spans)

    def post(self) -> bool:
        """Post one slice, the peers taking turns; False if none may be.  May copy all of it."""
        peer = next((peer for peer, lane in self._lanes.items() if lane.is_ready), None)
        if peer is None:
            return False
        lane = self._lanes[peer] = self._lanes.pop(peer)  # last in line from now on
        part = lane.next()
        try:
            read = self._transport.read(peer, part.spans)
        except TransportError as error:
            self._ended(part, Settled(_NOTHING, error))
        else:
            self._flights[read] = part
        return True

    def poll(self) -> bool:
        """Deliver the reads that have settled; whether anything of any read has."""
        ended = False
        for read in list(self._flights):
            settled = self._transport.poll(read)
            if settled is not None:
                self._ended(self._flights.pop(read), settled)
                ended = True
        return ended

    def _ended(self, part: ReadChunk, settled: Settled) -> None:
        whole = part.whole
        lane = self._lanes[whole.peer]
        now = self._clock()
        lane.settled(part, settled, now)
        if whole.is_over:
            self._deliver(ReadSettled(whole.tag, whole.settled(), now))
        if not len(lane):
            del self._lanes[whole.peer]

    def close(self) -> None:
        """Close the transport, if nothing can write any more."""
        try:
            self._transport.close()
        except TransportError as error:
            log.warning("pdconn: the transport was left open: %s", error)

    def _sum(self, job: Sum) -> None:
        try:
            sums = tuple(expected.ours(self._memory) for expected in job.expected)
        except Exception as error:
            log.warning("pdconn: no checksum of what was read", exc_info=True)
            self._deliver(Summed(job.tag, (), f"{type(error).__name__}: {error}"))
        else:
            self._deliver(Summed(job.tag, sums))

    def _connect(self, job: Connect) -> None:
        try:
            self._refuse_impostor(job.address)
            peer = self._transport.connect(job.address)
        except TransportError as error:
            self._deliver(Connected(job.tag, None, f"{type(error).__name__}: {error}"))
        else:
            self._users[peer] += 1
            self._addresses[peer] = job.address
            self._deliver(Connected(job.tag, peer, None))

    def _refuse_impostor(self, address: bytes) -> None:
        """Nobody may be connected under the name of a peer that is in use.

        Transports take a newer address of a known peer.  Lenders register once and draw
        their names, so here it can only be somebody who wants another's pulls.
        """
        peer = PeerId(named_in(address))
        if self._users[peer] > 0 and self._addresses[peer] != address:
            raise BadAddress(f"{peer} is in use under another address")
