"""What is learned of a lender's link from the reads of a pull that overlap."""

from __future__ import annotations

import pytest

from pdconn.puller.peers import PeerKey
from tests.puller.following.test_failed_increments import Following
from tests.puller.following.test_lying_streams import early

NBYTES, READ_S = 1 << 20, 0.5


def test_reads_that_share_the_link_are_learned_from_together() -> None:
    """Each of them is as slow as half of a link; together they are as fast as it is."""
    following = Following()
    following.clock.advance(READ_S)
    following.settle(0, nbytes=NBYTES)
    assert learned(following) is None, "another read is in flight"
    following.clock.advance(READ_S)
    following.settle(1, nbytes=NBYTES)
    assert learned(following) == pytest.approx(2 * NBYTES / (2 * READ_S))


def test_the_time_between_reads_is_no_part_of_the_links_pace() -> None:
    following = Following()
    following.settle(0)
    following.settle(1)
    following.clock.advance(60.0)
    following.grow(2)
    following.clock.advance(READ_S)
    following.settle(2, nbytes=NBYTES)
    assert learned(following) == pytest.approx(NBYTES / READ_S)


def test_nothing_is_learned_from_reads_that_failed() -> None:
    following = Following()
    following.clock.advance(READ_S)
    following.settle(0, nbytes=NBYTES)
    following.settle(1, fails=True, nbytes=NBYTES)
    assert learned(following) is None


def learned(following: Following) -> float | None:
    """Bytes per second of the lender that is followed."""
    return following.pulls.peers.to(PeerKey.from_ticket(early())).rates.bytes_per_s
