"""Pulls that follow a request while it is computed, over real sockets and threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pdconn.planning.plan import Need
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.messages import GrownBlocks
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import ClaimOutcome, ClaimTicket, ReadBlocks
from tests.fakes.pair import Pair
from tests.threads.inside import num_open

STREAM = "0123456789abcdef"
TTL_S = 5.0


@dataclass
class Following:
    """A pair of which decode follows request ``r`` of prefill, 12 tokens in blocks 3, 4 and 5."""

    pair: Pair

    def __post_init__(self) -> None:
        pair = self.pair
        self.early = EarlyTicket("prefill", pair.incarnation, pair.bound, pair.lender.port, STREAM)
        self.outcomes: list[ClaimOutcome] = []

    def follow(self) -> None:
        self.pair.puller.post_command(ClaimTicket("d", "here/1", self.early, is_awaited=True))

    def open(self) -> None:
        self.pair.lender.open_stream("r", STREAM, (12, "prompt", ""), TTL_S)

    def begin(self) -> None:
        self.pair.lender.grow_stream("r", ())

    def grow(self, first: int, *ids: int) -> None:
        self.pair.lender.grow_stream("r", (GrownBlocks(0, first, ids),))

    def complete(self, *ids: int) -> Ticket:
        ticket = self.pair.ticket("r", (BlockList(0, ids or (3, 4, 5)),))
        self.pair.lender.complete_stream(ticket, TTL_S)
        return ticket

    def read(self) -> None:
        need = Need.for_range(0, 12, (BlockList(0, (7, 8, 9)),))
        self.pair.puller.post_command(ReadBlocks("d", need))

    def await_outcomes(self, count: int) -> list[ClaimOutcome]:
        self.pair.wait(lambda: self._take() >= count)
        return self.outcomes

    def is_read(self, ours: int, theirs: int) -> bool:
        self._take()
        return self.pair.ours.row(ours) == self.pair.theirs.row(theirs)

    def _take(self) -> int:
        self.outcomes += self.pair.collect().claims
        return len(self.outcomes)


@pytest.fixture
def following() -> Iterator[Following]:
    with Pair("BHLNC") as pair:
        yield Following(pair)
        assert num_open(pair.puller) == 0


def test_what_is_announced_is_read_before_the_request_is_computed(following: Following) -> None:
    following.follow()
    following.open()
    following.begin()
    [opened] = following.await_outcomes(1)
    assert opened.ticket == Ticket(
        "prefill", following.pair.incarnation, "r", following.pair.bound,
        following.pair.lender.port, 12, "prompt", (),
    )  # fmt: skip
    following.read()
    for number, (ours, theirs) in enumerate(((7, 3), (8, 4))):
        following.grow(number, theirs)
        following.pair.wait(lambda o=ours, t=theirs: following.is_read(o, t))
    assert not following.is_read(9, 5)
    assert not following.pair.received
    following.complete()
    assert following.pair.outcome_of("d") is None
    assert following.is_read(9, 5)
    assert following.pair.freed() == "read"
    [record] = following.pair.records
    assert record.moved.full == 3 * len(following.pair.ours.row(0))
    assert record.moved.saved_by_hits == 0


def test_a_reader_that_comes_first_waits_for_the_request(following: Following) -> None:
    following.follow()
    following.pair.wait(lambda: following.pair.lender.counts["greeted"])
    following.read()
    following.open()
    following.grow(0, 3)
    following.complete()
    assert following.pair.outcome_of("d") is None
    assert following.pair.freed() == "read"


def test_a_reader_that_comes_late_is_sent_the_ticket(following: Following) -> None:
    following.open()
    ticket = following.complete()
    following.follow()
    [outcome] = following.await_outcomes(1)
    assert outcome.ticket == ticket
    following.read()
    assert following.pair.outcome_of("d") is None
    assert following.pair.freed() == "read"


def test_a_request_that_ends_early_fails_its_readers(following: Following) -> None:
    following.follow()
    following.open()
    following.begin()
    following.await_outcomes(1)
    following.read()
    following.grow(0, 3)
    following.pair.wait(lambda: following.is_read(7, 3))
    following.pair.lender.abort_lease("r")
    assert "refused, aborted" in str(following.pair.outcome_of("d"))
    assert following.pair.freed() == "aborted"


def test_what_its_reader_has_left_early_is_free_once_it_is_complete(following: Following) -> None:
    following.follow()
    following.open()
    following.begin()
    following.await_outcomes(1)
    following.pair.cancel("d")
    following.pair.wait(lambda: num_open(following.pair.puller) == 0)
    assert not following.pair.lender.take_freed()
    following.complete()
    assert following.pair.freed() == "read"


def test_blocks_that_move_after_they_were_announced_are_not_believed(following: Following) -> None:
    following.follow()
    following.open()
    following.begin()
    following.await_outcomes(1)
    following.read()
    following.grow(0, 3)
    following.pair.wait(lambda: following.is_read(7, 3))
    following.complete(6, 4, 5)
    assert "the announced blocks" in str(following.pair.outcome_of("d"))


def test_a_position_that_is_announced_again_must_be_the_same_block(following: Following) -> None:
    following.follow()
    following.open()
    following.begin()
    following.await_outcomes(1)
    following.read()
    following.grow(0, 3)
    following.grow(0, 3)
    following.pair.wait(lambda: following.is_read(7, 3))
    assert not following.pair.failed
    following.grow(0, 6, 4)
    assert "grown.ids of group 0" in str(following.pair.outcome_of("d"))


def test_what_a_lost_announcement_has_announced_is_read_in_the_end(following: Following) -> None:
    following.follow()
    following.open()
    following.begin()
    following.await_outcomes(1)
    following.read()
    following.grow(1, 4)
    following.complete()
    assert following.pair.outcome_of("d") is None
    assert all(following.is_read(ours, theirs) for ours, theirs in ((7, 3), (8, 4), (9, 5)))
