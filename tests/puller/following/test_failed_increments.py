"""A followed pull of which a read has failed posts no further one, and ends with those in flight.

Announcements go on, since the lender does not know.  Each used to be read, and what was complete
was read whole, for a pull that could only fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import Effect, Patience, Pull, PullState
from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.protocol.messages import Completed, Granted, Grown, GrownBlocks, Opened, PullReply
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ClaimTicket, FailedPull, ReadBlocks
from pdconn.puller.peers import Peer, PeerKey, PeerReplied, Rank
from pdconn.puller.pulls import Pulls
from pdconn.puller.reads import Job, Read, ReadSettled
from tests.fakes.pair import Cache
from tests.puller.following.test_lying_streams import STREAM, early, pairing
from transport import BackendFailure, ReadStats, Settled
from transport.testing.inprocess.faults import ManualClock

PULL = "here/1"
DRAIN_S = 2.0


class Following:
    """A pull of three blocks; of the first two increments reads are in flight.

    Args:
        beside: what a store loads of the same blocks.
    """

    def __init__(self, beside: Need | None = None) -> None:
        self.clock, self.jobs = ManualClock(100.0), list[Job]()
        me = Rank("d", 0, 1, 0, Cache("BHLNC", filled=False).references, {})
        patience = Patience(drain_s=DRAIN_S)
        self.pulls = Pulls(me, self, self.jobs.append, self.clock, patience=patience)
        self.pulls.apply_command(ClaimTicket("d", PULL, early()))
        self.hear(
            Opened(STREAM, PULL, "r", 12, "digest", ""),
            Granted(1, "r", PULL, 60_000),
            Grown("r", PULL, ()),
        )
        need = Need.for_range(0, 12, (BlockList(0, (7, 8, 9)),))
        rest = need if beside is None else cover.rest_of(need, beside)
        self.pulls.apply_command(ReadBlocks("d", rest, beside))
        self.grow(0)
        self.grow(1)

    def dial(self, peer: Peer) -> None:
        """As the dialer of a puller: the lender is there at once."""
        peer.pairing, peer.ranks = pairing(), {0: "lender"}
        peer.state = PeerState.READY

    @property
    def reads(self) -> list[Read]:
        return [job for job in self.jobs if isinstance(job, Read)]

    @property
    def failed(self) -> list[FailedPull]:
        return [one for one in self.pulls.reports if isinstance(one, FailedPull)]

    @property
    def machine(self) -> Pull:
        return self.pulls._entries["d"].machine

    def hear(self, *replies: PullReply) -> None:
        peer = self.pulls.peers.to(PeerKey.from_ticket(early()))
        self.pulls.peers.events.extend(PeerReplied(peer, reply) for reply in replies)
        self.pulls._drain()

    def grow(self, first: int) -> None:
        self.hear(Grown("r", PULL, (GrownBlocks(0, first, (3 + first,)),)))

    def complete(self) -> None:
        self.hear(Completed("r", PULL, ((0, (3, 4, 5)),)))

    def settle(self, number: int, *, fails: bool = False, nbytes: int = 1) -> None:
        error = BackendFailure("it broke") if fails else None
        settled = Settled(ReadStats(nbytes, 1, 0.0, 0.0), error)
        self.pulls.handle_result(ReadSettled(self.reads[number].tag, settled, self.clock()))


def posts_nothing_and_drains(further: str, *, drains_in_time: bool) -> None:
    following = Following()
    assert len(following.reads) == 2
    following.settle(1, fails=True)
    for what in further:
        following.complete() if what == "c" else following.grow(2)
    assert len(following.reads) == 2, "read on after an error"
    assert following.machine.state is PullState.DRAINING
    assert not following.failed, "reported under a read"
    if not drains_in_time:
        following.clock.advance(DRAIN_S)
        following.pulls.tick_due(following.clock())
        assert [one.quarantined for one in following.failed] == [True]
    following.settle(0)
    [report] = following.failed
    assert "it broke" in report.reason
    assert following.pulls.num_open == 0


@pytest.mark.parametrize("drains_in_time", [True, False], ids=["settles", "hangs"])
@pytest.mark.parametrize("further", ["", "g", "c", "gc"])
def test_nothing_is_read_for_a_pull_of_which_a_read_has_failed(
    further: str, drains_in_time: bool
) -> None:
    posts_nothing_and_drains(further, drains_in_time=drains_in_time)


def test_that_law_notices_a_pull_that_hears_of_errors_with_its_last_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real: Callable[..., list[Effect]] = Pull.fail

    def later(self: Pull, reason: str, now: float, notify: bool = True) -> list[Effect]:
        return [] if "it broke" in reason else real(self, reason, now, notify)

    monkeypatch.setattr(Pull, "fail", later)
    with pytest.raises(AssertionError, match="read on after an error"):
        posts_nothing_and_drains("g", drains_in_time=True)
