"""Until when nothing comes of a pull whose request its lender still computes."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import Patience
from pdconn.planning.plan import Need
from pdconn.protocol.messages import Completed, Grown, Opened
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ClaimTicket, ExpectedPull
from pdconn.puller.peers import Peer, PeerKey, Rank
from pdconn.puller.request_pull import RequestPull
from registration.references import KVCacheReferences
from tests.fakes.pair import Cache
from tests.puller.following.test_lying_streams import STREAM, early, pairing

NUM_TOKENS = 100
PULL = "here/1"
TAKES_S = 2.0
"""What prompts as long took there."""


def followed(ours: KVCacheReferences, *, knows_rates: bool = True) -> RequestPull:
    """A pull whose claim is granted at 0, of a request that is open."""
    peer = Peer(PeerKey.from_ticket(early()), pairing=pairing())
    if knows_rates:
        peer.rates.learn_prefill(0, NUM_TOKENS, TAKES_S)
        peer.rates.learn_read(1 << 20, 0.001)
    command = ClaimTicket("d", PULL, early(), is_awaited=True)
    me = Rank("d", 3, 4, 0, ours, {})
    pull = RequestPull.claiming(command, peer, me, Patience(), verify=False, at=0.0)
    pull.machine.greeted(0.0)
    pull.machine.granted(1, 60.0, 0.0)
    pull.heard_of_stream(Opened(STREAM, PULL, "r", NUM_TOKENS, "digest", ""), 0.0)
    return pull


@pytest.fixture
def ours() -> KVCacheReferences:
    return Cache("BHLNC", filled=False).references


def test_a_request_that_waits_is_expected_when_it_could_be_computed(
    ours: KVCacheReferences,
) -> None:
    assert followed(ours).expected(5.0) == ExpectedPull("d", PULL, 3, TAKES_S)


def test_one_that_is_computed_is_expected_when_blocks_are_asked_for(
    ours: KVCacheReferences,
) -> None:
    pull = followed(ours)
    pull.heard_of_stream(Grown("r", PULL, ()), 1.0)
    assert pull.claim_outcome(1.0) is None, "it is too early for blocks"
    asks_at = pull.machine.asks_at
    assert asks_at is not None
    assert 1.0 < asks_at < 1.0 + TAKES_S
    assert pull.expected(1.5) == ExpectedPull("d", PULL, 3, asks_at - 1.5)


def test_one_that_has_blocks_is_expected_when_it_is_computed(ours: KVCacheReferences) -> None:
    pull = followed(ours)
    pull.heard_of_stream(Grown("r", PULL, ()), 1.0)
    pull.need = Need.for_range(0, 12, (BlockList(0, (7, 8, 9)),))
    pull.machine.want(1.0)
    assert pull.expected(2.0) == ExpectedPull("d", PULL, 3, TAKES_S - 1.0)


def test_anything_may_come_where_nothing_was_learned_or_all_is_computed(
    ours: KVCacheReferences,
) -> None:
    assert followed(ours, knows_rates=False).expected(0.0) is None
    pull = followed(ours)
    pull.heard_of_stream(Completed("r", PULL, ((0, (1, 2, 3)),)), 1.0)
    assert pull.expected(1.0) is None
