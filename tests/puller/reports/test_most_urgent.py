"""What a puller says of the pulls that it has not reported."""

from __future__ import annotations

from pdconn.lifecycle.turns import Urgency
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ReadBlocks
from tests.fakes.pair import Pair


def test_a_pull_is_as_urgent_as_its_request_until_it_is_reported() -> None:
    with Pair() as pair:
        assert pair.puller.most_urgent is None
        pair.claim("prefetch", pair.lend("r1"))
        need = Need.for_range(0, 12, (BlockList(0, (4, 5, 6)),) * pair.groups)
        pair.puller.post_command(ReadBlocks("prefetch", need, urgency=Urgency.PREFETCH))
        assert pair.puller.most_urgent is Urgency.PREFETCH
        pair.pull("d", pair.lend("r2"))
        assert pair.puller.most_urgent is Urgency.PULL
        assert pair.outcome_of("d") is None
        assert pair.outcome_of("prefetch") is None
        assert pair.puller.most_urgent is None
