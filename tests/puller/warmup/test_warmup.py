"""Laws of warming in virtual time, without a clock, a socket or a thread."""

from __future__ import annotations

from random import Random

import pytest

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import PullState
from pdconn.protocol.messages import Granted
from pdconn.puller.commands import FailedPull
from pdconn.puller.reads import Read
from pdconn.puller.warmup import Pauses, Place, RetryTimer, WarmUp
from tests.puller.renewals.one_rank import CLAIM_S, DRAIN_S, READ_S, OneRank
from transport import Memory, PeerLost

PAUSES = Pauses()


class WarmingRank(OneRank):
    """A rank that warms the lender ``a``, which is greeted already."""

    def __init__(self) -> None:
        super().__init__(WarmUp((Place("a", 1),), Memory(1 << 20, 4096)))
        self.wait_s(0.0)

    @property
    def is_warm(self) -> bool:
        return len(self.pulls.warmup.warm) == 1

    @property
    def due_at(self) -> float | None:
        """When the place is tried again."""
        return self.pulls.warmup.alarm

    def hears_nothing(self) -> bool:
        """Whether the lender was told nothing but Hello, and the engine nothing at all."""
        return not (self.frames("a") or self.pulls.reports or self.pulls.counts)

    def try_again(self) -> None:
        assert self.due_at is not None
        self.wait_s(self.due_at - self.now)


@pytest.fixture
def rank() -> WarmingRank:
    return WarmingRank()


def test_it_greets_at_once_then_connects_then_reads_and_asks_for_nothing(
    rank: WarmingRank,
) -> None:
    rank.greet("a")
    assert not rank.is_warm
    rank.settle()
    assert rank.is_warm
    assert rank.hears_nothing()
    assert rank.pulls.num_open == 0


def test_a_warm_lender_is_left_alone_until_it_is_lost(rank: WarmingRank) -> None:
    rank.greet("a")
    rank.settle()
    assert rank.pulls.next_alarm() is None
    rank.wait_s(1e9)
    rank.lose("a")
    assert not rank.is_warm
    assert rank.due_at is not None
    assert 0 < rank.due_at - rank.now <= PAUSES.first_s
    rank.try_again()
    rank.greet("a")
    rank.settle()
    assert rank.is_warm


@pytest.mark.parametrize("stage", ["greeting", "connecting", "reading"])
def test_what_is_under_way_can_be_lost_and_is_tried_again(rank: WarmingRank, stage: str) -> None:
    if stage == "connecting":
        rank.welcome("a")
    elif stage == "reading":
        rank.greet("a")
    rank.lose("a")
    if stage == "reading":
        rank.settle()
    rank.try_again()
    rank.greet("a")
    rank.settle()
    assert rank.is_warm
    assert rank.hears_nothing()


@pytest.mark.parametrize("stage", ["greeting", "connecting"])
def test_each_answer_has_its_time_and_then_what_was_begun_is_left(
    rank: WarmingRank, stage: str
) -> None:
    peer, allowed_s = rank.peer("a"), CLAIM_S
    if stage == "connecting":
        rank.wait_s(CLAIM_S / 2)
        rank.welcome("a")
        allowed_s = READ_S
    rank.wait_s(allowed_s - 0.001)
    assert peer.state is PeerState.GREETING
    assert rank.due_at is None
    rank.wait_s(0.001)
    assert peer.state is PeerState.CLOSED
    assert rank.due_at is not None
    assert not list(rank.pulls.peers)


def test_a_read_that_hangs_is_given_up_and_none_follows_before_it_has_ended(
    rank: WarmingRank,
) -> None:
    rank.greet("a")
    hanging = rank.take_jobs()
    rank.wait_s(READ_S)
    rank.wait_s(DRAIN_S)
    for _ in range(3):  # connected, and not read from
        rank.try_again()
        if rank.due_at is None:
            rank.greet("a")
        assert not rank.is_warm
        assert not [job for job in rank.take_jobs() if isinstance(job, Read)]
    rank.settle(hanging)
    rank.try_again()
    rank.settle()
    assert rank.is_warm


def test_a_lender_that_a_page_has_lost_is_dialled_anew_by_the_next_request(
    rank: WarmingRank,
) -> None:
    """The request that holds a claim there goes on: its own read may fare better."""
    rank.greet("a")
    rank.claim("r", "a")
    used = rank.peer("a")
    rank.settle(error=PeerLost("cut"))
    assert rank.state("r") is PullState.CLAIMING
    assert used.state is PeerState.READY
    rank.claim("next", "a")
    assert [peer for peer in rank.pulls.peers if "next" in peer.pulls] != [used]


def test_what_a_page_waits_for_in_vain_a_request_may_go_on_waiting_for(rank: WarmingRank) -> None:
    rank.welcome("a")
    rank.wait_s(READ_S / 2)
    rank.claim("r", "a")
    rank.wait_s(READ_S / 2)
    assert rank.due_at is not None, "the page was not given up"
    assert rank.state("r") is PullState.GREETING
    rank.connect("a")
    rank.hear("a", Granted(1, "r", "r", 5000))
    assert rank.state("r") is PullState.HELD


def test_a_request_that_joins_while_the_transport_connects_has_as_long_as_the_first() -> None:
    """Its lender has answered: what is slow is our own transport."""
    rank = OneRank()
    rank.claim("first", "a")
    rank.welcome("a")
    rank.wait_s(1.0)
    rank.claim("joined", "a")
    rank.wait_s(CLAIM_S)
    assert not [one for one in rank.pulls.reports if isinstance(one, FailedPull)]
    assert {rank.state(name) for name in ("first", "joined")} == {PullState.GREETING}
    rank.wait_s(READ_S)
    assert {rank.state(name) for name in ("first", "joined")} == {PullState.FAILED}


def test_we_ourselves_are_never_tried_again(rank: WarmingRank) -> None:
    rank.greet("a", engine_id="d")
    assert rank.due_at is None
    assert not rank.is_warm
    assert rank.pulls.num_open == 0
    assert rank.pulls.next_alarm() is None


# The timer


def timer(now: float = 0.0) -> RetryTimer:
    made = RetryTimer(now, Random(7), PAUSES)
    assert made.begin_try(now)
    return made


def pause(made: RetryTimer, now: float) -> float:
    """How long it pauses from now on."""
    until = made.due_at
    assert until is not None
    assert not made.begin_try((now + until) / 2)
    assert made.begin_try(until)
    assert not made.begin_try(until), "a try is under way"
    return until - now


def test_pauses_grow_to_a_bound_while_there_is_no_answer() -> None:
    made, now = timer(), 0.0
    pauses = []
    for _ in range(12):
        made.failed(now)
        pauses.append(pause(made, now))
        now += pauses[-1]
    assert pauses[0] <= PAUSES.first_s
    assert all(later > sooner for sooner, later in zip(pauses[:5], pauses[2:7], strict=True))
    assert all(PAUSES.longest_s / 2 <= each <= PAUSES.longest_s for each in pauses[6:])
    assert len(set(pauses[6:])) > 1, "many engines would come back at once"


def test_a_lender_that_comes_and_goes_is_tried_ever_more_seldom() -> None:
    made, now = timer(), 0.0
    made.succeeded(now)
    for _ in range(8):
        made.failed(now)
        last = pause(made, now)
        now += last
        made.succeeded(now)
    assert last >= PAUSES.longest_s / 2
    now += PAUSES.longest_s
    made.failed(now)
    assert pause(made, now) <= PAUSES.first_s


# Places


@pytest.mark.parametrize(
    "text",
    [
        "", "p1", ":5600", "p1:", "p1:0", "p1:65536", "p1:-1", "p1:5600x", "p1:٥٦",
        "fe80::1:5600", "[]:5600", "p\n1:5600", 5600, None, ["p1:5600"],
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match='"host:port" with a port from 1 to 65535'):
        Place.parse(text)
