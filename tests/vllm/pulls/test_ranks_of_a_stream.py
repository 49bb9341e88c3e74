"""All ranks of an engine follow one request, or it is computed here.

Each rank hears of a stream's request on a connection of its own, and confirms what it has read with
the digest that it was sent there.  The scheduler compares the prompt: with what every rank was
sent, or a rank may read another prompt's KV.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.ticket import BlockList, Ticket, parse_ticket
from pdconn.puller.commands import CancelPull, ClaimOutcome
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from pdconn.vllm.pulls.tracked import Tracked
from tests.fakes.simulated.hooks import allocated, matched
from tests.vllm.pulls.test_pulling import BLOCKS, MAX_MODEL_LEN, kinds, request

RANKS = 2
ASKS = EarlyTicket("p", "boot", "localhost", 5600, "s" * 16).to_params()
COMPLETE = parse_ticket(request().kv_transfer_params)
OURS = replace(COMPLETE, blocks=())
OTHERS = [
    replace(OURS, prompt="0" * 16),
    replace(OURS, num_tokens=41),
    replace(OURS, request_id="another"),
    replace(OURS, adapter="another"),
]
"""What another rank may be sent."""


def hears(outcomes: list[tuple[int, Ticket]], asks_after: int) -> tuple[Pulling, Any, list[Any]]:
    """What the engine answers when it has heard of so many outcomes, and of all."""
    side = Pulling(PullRules("here", False, False, MAX_MODEL_LEN, num_ranks=RANKS))
    asked = request()
    asked.kv_transfer_params = dict(ASKS)
    side.on_new_request(asked)
    [claim] = side.take_commands()
    answers = []
    for number, (rank, ticket) in enumerate(outcomes):
        if number == asks_after:
            answers.append(matched(side, asked, 0))
        side.note_claims([ClaimOutcome("d", claim.pull, rank, None, ticket)])
    return side, asked, [*answers, matched(side, asked, 0)]


def computes_what_differs(other: Ticket, *, first: int, asks_after: int) -> None:
    outcomes = [(0, OURS), (1, other)] if first == 0 else [(1, other), (0, OURS)]
    side, asked, answers = hears(outcomes, asks_after)
    assert answers[-1] == (0, False), "another request's KV is promised"
    allocated(side, asked, BLOCKS, 0)
    assert kinds(side.take_commands()) == [CancelPull]
    assert len(side) == 0


@pytest.mark.parametrize("other", OTHERS, ids=["prompt", "tokens", "request", "adapter"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("asks_after", [0, 1, 9])
def test_a_request_whose_ranks_follow_different_requests_is_computed(
    other: Ticket, first: int, asks_after: int
) -> None:
    computes_what_differs(other, first=first, asks_after=asks_after)


@pytest.mark.parametrize("first", [OURS, COMPLETE], ids=["growing", "complete"])
@pytest.mark.parametrize("second", [OURS, COMPLETE], ids=["growing", "complete"])
def test_a_rank_that_hears_later_that_all_is_computed_follows_the_same_request(
    first: Ticket, second: Ticket
) -> None:
    _, _, answers = hears([(0, first), (1, second)], asks_after=1)
    assert answers == [(None, False), (39, True)]


def test_those_laws_notice_an_engine_that_compares_what_one_rank_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tracked, "is_followed_as", lambda self, ticket: True)
    with pytest.raises(AssertionError, match="another request's KV"):
        computes_what_differs(OTHERS[0], first=0, asks_after=1)


def test_the_same_blocks_are_named_to_all() -> None:
    """Blocks may differ in when they are named, and in nothing else."""
    moved = replace(COMPLETE, blocks=(BlockList(0, (9, 8, 7)), BlockList(1, (3, 4))))
    assert Tracked(COMPLETE, None, None).is_followed_as(OURS)
    assert not Tracked(COMPLETE, None, None).is_followed_as(moved)
