"""Replies of lenders to a rank's pulls: whose they may be, and in which order they count."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import PullState
from pdconn.planning.plan import Need
from pdconn.protocol.messages import (
    Confirmed,
    FromLender,
    Granted,
    RefusalReason,
    Refused,
    Rejected,
)
from pdconn.puller.commands import FailedPull, ReadBlocks
from tests.puller.renewals.one_rank import BLOCKS, CLAIM_S, OneRank


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
        rank.pulls.apply_command(ReadBlocks(request, Need.of(0, 12, BLOCKS)))
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
        rank.pulls.tick_due(rank.now)
    assert "a pull was not answered in time while claiming" in caplog.text
    rank.claim("next", "a")
    assert rank.pulls._entries["next"].peer is not silent
    rank.greet("a")
    rank.hear("a", Granted(1, "next", "next", 5000))
    assert rank.state("next") is PullState.HELD
