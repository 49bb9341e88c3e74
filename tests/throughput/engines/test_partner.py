"""The partners of the benchmarks lend and pull over real NIXL, one with the other."""

from __future__ import annotations

import pytest

from tests.throughput.engines.partner import LendingPartner, PullingPartner
from tests.throughput.pull_cost.__main__ import shape

PROMPT = list(range(2, 302))


def test_one_partner_pulls_what_the_other_lends() -> None:
    like = shape("LBHNC", num_blocks=64)
    with LendingPartner(like) as lending, PullingPartner(like) as pulling:
        pulling.pull(pulling.hold(lending.lend(PROMPT)))


def test_a_ticket_whose_lease_never_was_is_not_pulled() -> None:
    like = shape("LBHNC", num_blocks=64)
    with LendingPartner(like) as lending, PullingPartner(like) as pulling:
        ticket = lending.lend(PROMPT)
        with pytest.raises(RuntimeError, match="was not pulled"):
            pulling.pull(pulling.hold(ticket | {"remote_request_id": "never lent"}))
