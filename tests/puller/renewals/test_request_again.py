"""A request's name may be used again while what was read for it before has not settled."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import PullState
from pdconn.protocol.messages import Granted, Renew
from pdconn.puller.commands import CancelPull, FailedPull
from tests.puller.renewals.one_rank import OneRank

TTL_MS = 9000


@pytest.fixture
def rank() -> OneRank:
    """``r`` was claimed, read and cancelled, and is claimed again before that read has settled."""
    made = OneRank()
    made.claim("r", "a", pull="first")
    made.greet("a")
    made.hear("a", Granted(1, "r", "first", TTL_MS))
    made.read("r")
    made.pulls.apply_command(CancelPull("r"))
    made.claim("r", "a", pull="second")
    made.hear("a", Granted(1, "r", "second", TTL_MS))
    made.pulls.finish_turn()
    made.frames("a")
    return made


def test_the_end_of_the_first_leaves_the_second_with_its_lender(rank: OneRank) -> None:
    rank.settle()
    assert rank.state("r") is PullState.HELD
    rank.pulls.peers.close(rank.peer("a"), "gone")
    rank.read("r")
    rank.settle()
    reasons = [one.reason for one in rank.pulls.reports if isinstance(one, FailedPull)]
    assert reasons == ["cancelled", "pa at a:1: gone"]
    assert rank.pulls.num_open == 0


def test_both_are_ended_by_the_loss_of_their_lender(rank: OneRank) -> None:
    rank.pulls.peers.close(rank.peer("a"), "gone")
    rank.read("r")
    rank.settle()
    assert rank.pulls.num_open == 0


def test_the_second_is_renewed_after_the_first_has_ended(rank: OneRank) -> None:
    rank.settle()
    rank.pulls.finish_turn()
    rank.frames("a")
    rank.now = rank.pulls.next_alarm() or 0.0
    rank.pulls.tick_due(rank.now)
    rank.pulls.finish_turn()
    [[renewal]] = rank.frames("a")
    assert isinstance(renewal, Renew)
    assert renewal.reader.pull == "second"
