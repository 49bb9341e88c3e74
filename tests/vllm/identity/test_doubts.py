"""Decode whose own weights nothing proves, or have changed, goes on without tickets."""

from __future__ import annotations

import pytest

from pdconn.puller.commands import CancelPull, ClaimTicket
from tests.fakes.simulated.hooks import allocated, finished, matched
from tests.vllm.pulls.test_pulling import BLOCKS, consumer, kinds, request


def test_an_engine_whose_weights_nothing_proves_computes_and_claims_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the policy is; what came before the doubt is given up."""
    side, before, after = consumer(), request("b"), request("a")
    side.on_new_request(before)
    side.take_commands()
    side.weights_changed()
    side.doubt = "weights unproven: for a reason"
    assert matched(side, before, 0) == (0, False)
    assert side.take_commands() == [CancelPull("b")]
    side.on_new_request(after)
    assert matched(side, after, 0) == (0, False)
    assert ClaimTicket not in kinds(side.take_commands())
    assert side.take_counts() == {"tickets_gone": 2}
    assert "for a reason" in caplog.text
    for asked in (before, after):
        finished(side, asked)
    assert len(side) == 0


def test_a_pull_under_way_is_left_to_its_end_when_weights_change() -> None:
    """Its blocks are promised; the engine's own cache has KV of before as well."""
    side, asked = consumer(), request()
    side.on_new_request(asked)
    matched(side, asked, 0)
    allocated(side, asked, BLOCKS, 39)
    side.take_commands()
    side.weights_changed()
    assert side.take_commands() == []
    side.end_pull("d")
    assert len(side) == 0
