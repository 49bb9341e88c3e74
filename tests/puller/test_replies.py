"""Replies of lenders to a rank's pulls: whose they may be, and in which order they count."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import Patience, PullState
from pdconn.planning.plan import Need
from pdconn.protocol.messages import (
    Confirmed,
    FromLender,
    Granted,
    RankGeometry,
    RefusalReason,
    Refused,
    Rejected,
    Welcome,
    encode,
)
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Peer
from pdconn.puller.pulls import Pulls
from pdconn.puller.rank import Rank
from pdconn.puller.reads import Connect, Connected, Job
from pdconn.puller.results import FailedPull
from tests.fakes.connection_end import ConnectionEnd
from tests.fakes.pair import TRAITS, Cache
from transport import PeerId

BLOCKS = (BlockList(0, (1, 2, 3)),)
CLAIM_S = 10.0


class OneRank:
    """The pulls of a rank, and lenders that say what the test wants."""

    def __init__(self) -> None:
        self.now = 100.0
        self.memory = Cache("BHLNC", filled=False)
        self._jobs: list[Job] = []
        me = Rank("d", 0, 1, 0, self.memory.references, TRAITS)
        self.pulls = Pulls(
            me, self, self._jobs.append, lambda: self.now, patience=Patience(claim_s=CLAIM_S)
        )

    def dial(self, peer: Peer) -> None:
        """As ``pdconn.puller.peers.Dialer.dial``."""
        peer.connection = ConnectionEnd()

    def claim(self, request: str, lender: str) -> None:
        """Claim a ticket of ``lender``; ``request`` names the pull, too."""
        ticket = Ticket(f"p{lender}", f"b{lender}", request, lender, 1, 12, "0" * 32, BLOCKS)
        self.pulls.apply(ClaimTicket(request, request, ticket))

    def peer(self, lender: str) -> Peer:
        return next(peer for peer in self.pulls.peers if peer.key.host == lender)

    def hear(self, lender: str, *messages: FromLender) -> None:
        """All in one frame."""
        peer = self.peer(lender)
        assert isinstance(peer.connection, ConnectionEnd)
        peer.connection.arrived.append(encode(messages))
        self.pulls.serve(peer)

    def greet(self, lender: str) -> None:
        """The lender says what it is, and the transport reaches it."""
        rank = RankGeometry(0, 0, b"address", self.memory.references)
        self.hear(lender, Welcome.of(f"p{lender}", f"b{lender}", TRAITS, (rank,)))
        jobs, self._jobs[:] = list(self._jobs), []
        for job in jobs:
            assert isinstance(job, Connect)
            self.pulls.handle(Connected(job.tag, PeerId(lender), None))
        self.pulls.finish_turn()

    def state(self, request: str) -> PullState:
        return self.pulls._entries[request].machine.state


@pytest.fixture
def rank() -> OneRank:
    made = OneRank()
    for lender in "ab":
        made.claim(f"of {lender}", lender)
        made.greet(lender)
    return made


@pytest.mark.parametrize(
    "forged",
    [
        Granted(1, "of a", "of a", 3_600_000),
        Confirmed(1, "of a", "of a"),
        Refused(1, "of a", "of a", RefusalReason.EXPIRED, "over"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_lender_has_no_say_in_pulls_of_another(rank: OneRank, forged: FromLender) -> None:
    """Names of pulls are counted up, so every lender that decode knows can guess them all."""
    rank.hear("b", forged)
    assert rank.state("of a") is PullState.CLAIMING
    rank.hear("a", Granted(1, "of a", "of a", 5000))
    assert rank.state("of a") is PullState.HELD


def test_replies_before_the_message_that_closes_a_peer_count(rank: OneRank) -> None:
    """They came first, in the same frame or read."""
    for request in ("of a", "too"):
        if request == "too":
            rank.claim(request, "a")
        rank.pulls.apply(ReadBlocks(request, Need.of(0, 12, BLOCKS)))
    rank.hear(
        "a",
        Refused(1, "of a", "of a", RefusalReason.EXPIRED, "the lease has expired"),
        Rejected("field", "one", "another"),
    )
    failed = {
        each.request: each.reason for each in rank.pulls.reports if isinstance(each, FailedPull)
    }
    assert failed["of a"] == "refused, expired: the lease has expired"
    assert "field: theirs one, ours another" in failed["too"]
    assert rank.pulls.counts["pulls_refused_expired"] == 1
    assert rank.pulls.counts["pulls_unreachable"] == 1


def test_a_connection_that_does_not_answer_a_claim_is_replaced(
    rank: OneRank, caplog: pytest.LogCaptureFixture
) -> None:
    """The host may have gone without a word: the next pull must not wait on the same connection."""
    silent = rank.peer("a")
    rank.now += CLAIM_S
    with caplog.at_level("INFO"):
        rank.pulls.tick(rank.now)
    assert "a pull was not answered in time while claiming" in caplog.text
    rank.claim("next", "a")
    assert rank.pulls._entries["next"].peer is not silent
    rank.greet("a")
    rank.hear("a", Granted(1, "next", "next", 5000))
    assert rank.state("next") is PullState.HELD
