"""The pulls of one rank in virtual time, and lenders that say what the test wants."""

from __future__ import annotations

from collections.abc import Iterable

from pdconn.lifecycle.pull import Patience, PullState
from pdconn.planning.plan import Need
from pdconn.protocol.messages import (
    FromLender,
    FromReader,
    Hello,
    RankGeometry,
    Welcome,
    decode_from_reader,
    encode,
)
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Peer, Rank
from pdconn.puller.pulls import Pulls
from pdconn.puller.reads import Connect, Connected, Disconnect, Job, Read, ReadSettled
from pdconn.puller.warmup import WarmUp
from pdconn.sidechannel.connection import SideChannelLost
from tests.fakes.pair import TRAITS, Cache
from transport import PeerId, ReadStats, Settled, TransportError

BLOCKS = (BlockList(0, (1, 2, 3)),)
CLAIM_S, READ_S, DRAIN_S = 10.0, 120.0, 5.0


class ConnectionEnd:
    """A connection whose other end is the test, as ``pdconn.puller.peers.PeerConnection``.

    Attributes:
        sent: bodies of the frames that were sent.
        arrived: bodies that the next :meth:`receive` returns.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.arrived: list[bytes] = []
        self.closed = False
        self.is_lost = False

    def send_frames(self, bodies: Iterable[bytes]) -> None:
        self.sent += bodies

    def receive_frames(self) -> list[bytes]:
        if self.is_lost:
            raise SideChannelLost("closed by the peer")
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        self.closed = True


class OneRank:
    """The pulls of a rank, and lenders that say what the test wants; ``now`` is the time."""

    def __init__(self, warm_up: WarmUp | None = None) -> None:
        self.now = 100.0
        self.memory = Cache("BHLNC", filled=False)
        self._jobs: list[Job] = []
        me = Rank("d", 0, 1, 0, self.memory.references, TRAITS)
        self.pulls = Pulls(
            me,
            self,
            self._jobs.append,
            lambda: self.now,
            patience=Patience(CLAIM_S, READ_S, DRAIN_S),
            warm_up=warm_up,
        )

    def dial(self, peer: Peer) -> None:
        """As ``pdconn.puller.peers.Dialer.dial``."""
        peer.connection = ConnectionEnd()

    def claim(self, request: str, lender: str, pull: str | None = None) -> None:
        """Claim a ticket of ``lender``; ``request`` names the pull, too, unless one is given."""
        ticket = Ticket(f"p{lender}", f"b{lender}", request, lender, 1, 12, "0" * 32, BLOCKS)
        self.pulls.apply_command(ClaimTicket(request, pull or request, ticket))

    def read(self, request: str) -> None:
        """Have the reader read what is claimed."""
        self.pulls.apply_command(ReadBlocks(request, Need.for_range(0, 12, BLOCKS)))

    def wait_s(self, seconds: float) -> None:
        """Time passes, and the rank looks what is due."""
        self.now += seconds
        self.pulls.tick_due(self.now)
        self.pulls.finish_turn()

    def take_jobs(self) -> list[Job]:
        """What the reader was asked for since the last call, and has not done."""
        jobs, self._jobs[:] = list(self._jobs), []
        return jobs

    def settle(
        self, jobs: Iterable[Job] | None = None, error: TransportError | None = None
    ) -> None:
        """All reads that were posted have ended, or those of ``jobs``; with ``error``."""
        for job in self.take_jobs() if jobs is None else jobs:
            if isinstance(job, Disconnect):
                continue
            assert isinstance(job, Read)
            settled = Settled(ReadStats(1, 1, 0.0, 0.0), error)
            self.pulls.handle_result(ReadSettled(job.tag, settled, self.now))

    def peer(self, lender: str) -> Peer:
        return next(peer for peer in self.pulls.peers if peer.key.host == lender)

    def hear(self, lender: str, *messages: FromLender) -> None:
        """All in one frame."""
        peer = self.peer(lender)
        assert isinstance(peer.connection, ConnectionEnd)
        peer.connection.arrived.append(encode(messages))
        self.pulls.handle_readable(peer)

    def greet(self, lender: str, engine_id: str | None = None) -> None:
        """The lender says what it is, and the transport reaches it."""
        self.welcome(lender, engine_id)
        self.connect(lender)

    def welcome(self, lender: str, engine_id: str | None = None) -> None:
        """The lender says what it is."""
        rank = RankGeometry(0, 0, b"address", self.memory.references)
        engine_id = engine_id or f"p{lender}"
        self.hear(lender, Welcome.in_our_version(engine_id, f"b{lender}", TRAITS, (rank,)))

    def connect(self, lender: str) -> None:
        """The transport reaches the lender."""
        for job in self.take_jobs():
            if isinstance(job, Disconnect):
                continue
            assert isinstance(job, Connect)
            self.pulls.handle_result(Connected(job.tag, PeerId(lender), None))
        self.pulls.finish_turn()

    def lose(self, lender: str) -> None:
        """The connection to the lender has ended."""
        end = self.peer(lender).connection
        assert isinstance(end, ConnectionEnd)
        end.is_lost = True
        self.pulls.handle_readable(self.peer(lender))

    def frames(self, lender: str) -> list[list[FromReader]]:
        """The messages of each frame that the lender was sent since the last call, but Hello."""
        end = self.peer(lender).connection
        assert isinstance(end, ConnectionEnd)
        sent, end.sent = end.sent, []
        frames = [decode_from_reader(body) for body in sent]
        return [frame for frame in frames if not isinstance(frame[0], Hello)]

    def state(self, request: str) -> PullState:
        return self.pulls._entries[request].machine.state
