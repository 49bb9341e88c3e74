"""Laws of a lender's streams: each reader is sent each block once, and what was lent is freed once.

Messages come in any order, from two ranks of decode, each on a connection of its own that may be
lost; what is sent is decoded as a reader does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from pdconn.lender.sessions import (
    Abort,
    ConnectionLimits,
    EngineCommand,
    LenderSessions,
    Session,
)
from pdconn.lender.streams import (
    MAX_PARKED,
    MAX_PARKED_OF_ONE,
    PARK_S,
    StreamCompletion,
    StreamGrowth,
    StreamOffer,
    StreamTable,
)
from pdconn.lifecycle.lease import FreedLease, LeaseOffer
from pdconn.protocol.limits import MAX_GROUPS
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Done,
    Follow,
    FromLender,
    FromReader,
    Granted,
    Grown,
    GrownBlocks,
    Hello,
    Opened,
    Parked,
    RankGeometry,
    Reader,
    RefusalReason,
    Refused,
    Renew,
    Welcome,
    decode_from_lender,
    encode,
)
from pdconn.protocol.ticket import BlockList, Ticket
from tests.fakes.pair import Cache

TTL_S = 10.0
STREAM = "s" * 16
EARLY = b"e" * 16
"""The digest that a reader has while there is no ticket."""
NUM_BLOCKS = 6
EXAMPLES, STEPS = 200, 30


def lender(**limits: int) -> LenderSessions:
    references = Cache("BHLNC", filled=False).references
    geometry = RankGeometry(0, 0, b"address", references)
    welcome = Welcome.in_our_version("p", "boot", {}, (geometry,))
    return LenderSessions(welcome, limits=ConnectionLimits(**limits))


def greeted(of: LenderSessions) -> Session:
    session = Session("d")
    say(of, session, Hello(PROTOCOL_VERSION, "d", "boot"))
    return session


def say(
    of: LenderSessions, session: Session, *messages: FromReader, now: float = 0.0
) -> list[FromLender]:
    """What the lender answers, as a reader decodes it."""
    of.handle_messages(session, list(messages), now)
    return heard(session)


def heard(session: Session) -> list[FromLender]:
    replies, session.replies = session.replies, []
    assert decode_from_lender(encode(replies)) == replies
    return replies


def offer(request: str = "r", stream: str = STREAM, at: float = 0.0) -> StreamOffer:
    return StreamOffer(request, stream, 4 * NUM_BLOCKS, "prompt", "", TTL_S, at)


def growth(first: int, *ids: int, request: str = "r") -> StreamGrowth:
    return StreamGrowth(request, (GrownBlocks(0, first, ids),) if ids else ())


def completion(
    request: str = "r", stream: str = STREAM, ids: Iterable[int] = (1, 2, 3), at: float = 0.0
) -> StreamCompletion:
    blocks = (BlockList(0, tuple(ids)),)
    ticket = Ticket("p", "boot", request, "h", 1, 4 * NUM_BLOCKS, "prompt", blocks)
    return StreamCompletion(LeaseOffer(request, ticket.digest(), TTL_S, at), stream, ticket)


def apply(of: LenderSessions, *commands: EngineCommand, now: float = 0.0) -> None:
    for command in commands:
        of.apply_command(command, now)


def freed(of: LenderSessions) -> list[FreedLease]:
    found = [report for report in of.reports if isinstance(report, FreedLease)]
    of.reports.clear()
    return found


def follow(seq: int = 1, pull: str = "d/1", rank: int = 0, of: int = 1) -> Follow:
    return Follow(seq, STREAM, Reader(pull, rank, of))


def test_a_late_reader_is_sent_all_that_was_announced_in_however_many_steps() -> None:
    """One list for each step was more than a reader accepts after 256 steps."""
    of = lender()
    apply(of, offer(), *(growth(at, at + 1) for at in range(2 * MAX_GROUPS)))
    opened, granted, grown = say(of, greeted(of), follow())
    assert isinstance(opened, Opened)
    assert isinstance(granted, Granted)
    assert isinstance(grown, Grown)
    assert grown.blocks == (GrownBlocks(0, 0, tuple(range(1, 2 * MAX_GROUPS + 1))),)


@pytest.mark.parametrize("is_complete", [False, True], ids=["growing", "complete"])
@pytest.mark.parametrize("name", ["r", STREAM])
def test_a_claim_that_holds_is_ended_on_its_own_connection_only(
    name: str, is_complete: bool
) -> None:
    of = lender()
    apply(of, offer())
    ours, other = greeted(of), greeted(of)
    say(of, ours, follow())
    if is_complete:
        apply(of, completion())
    digest = completion().ticket.digest()
    say(of, other, Done(name, Reader("d/1", 0, 1), digest), now=1.0)
    assert not freed(of)
    [renewed] = [
        one
        for one in say(of, ours, Renew(2, "r", Reader("d/1", 0, 1)), now=1.0)
        if isinstance(one, Granted | Refused)
    ]
    assert isinstance(renewed, Granted)


def test_blocks_of_an_aborted_request_are_free_once_its_readers_have_left() -> None:
    """They have no ticket, and stayed pinned until their claims expired."""
    of = lender()
    apply(of, offer())
    session = greeted(of)
    say(of, session, follow(pull="d/1"), follow(pull="d/2"))
    apply(of, growth(0, 1), Abort("r"))
    refused = [one for one in heard(session) if isinstance(one, Refused)]
    assert [one.why for one in refused] == [RefusalReason.ABORTED] * 2
    say(of, session, Done("r", Reader("d/1", 0, 1), EARLY), now=1.0)
    assert not freed(of)
    say(of, session, Done("r", Reader("d/2", 0, 1), EARLY), now=1.0)
    assert [str(one.why) for one in freed(of)] == ["aborted"]


def test_a_reader_that_leaves_before_it_has_heard_of_the_ticket_leaves_the_complete_lease() -> None:
    of = lender()
    apply(of, offer())
    session = greeted(of)
    say(of, session, follow())
    apply(of, completion())
    say(of, session, Done("r", Reader("d/1", 0, 1), EARLY), now=1.0)
    assert [str(one.why) for one in freed(of)] == ["read"]


def test_a_request_that_is_lent_already_is_not_followed() -> None:
    """An engine's client chooses names of requests; ``ValueError`` ended the lender's thread."""
    of = lender()
    lent = LeaseOffer("r", b"t" * 16, TTL_S, 0.0)
    apply(of, lent, offer(), growth(0, 1), completion())
    session = greeted(of)
    assert [type(one) for one in say(of, session, follow())] == [Parked]
    [answer] = say(of, session, Claim(2, "r", Reader("d/2", 0, 1), b"t" * 16))
    assert isinstance(answer, Granted)


def test_a_request_that_gives_way_to_readers_is_not_followed_again() -> None:
    of = lender()
    apply(of, offer())
    session = greeted(of)
    say(of, session, follow())
    apply(of, Abort("r"), offer(stream="t" * 16), completion(stream="t" * 16))
    assert of.num_lent == 1
    of.turn(2 * TTL_S)
    assert of.num_lent == of.num_streams == 0


# Readers that wait


def test_readers_wait_within_bounds() -> None:
    table: StreamTable[Session] = StreamTable()
    sessions = [Session(str(n)) for n in range(1 + MAX_PARKED // MAX_PARKED_OF_ONE)]
    parked = 0
    for session in sessions:
        for number in range(MAX_PARKED_OF_ONE + 1):
            of = Reader(f"{session.name}/{number}", 0, 1)
            parked += table.park_reader(session, Follow(1, STREAM, of), 0.0)
    assert parked == MAX_PARKED == len(table)
    assert len(table.take_overdue(PARK_S)) == MAX_PARKED
    assert len(table) == 0


def test_readers_that_wait_no_more_leave_room_for_others() -> None:
    """One that waits kept the times of all that had waited before; the 4097th was refused."""
    table: StreamTable[Session] = StreamTable()
    assert table.park_reader(Session("waits"), Follow(1, "w" * 16, Reader("w", 0, 1)), 0.0)
    for number in range(3 * MAX_PARKED):
        name, session = f"{number:016}", Session("comes")
        assert table.park_reader(session, Follow(1, name, Reader("p", 0, 1)), 1.0)
        if number % 2:
            table.remove_reader(name, Reader("p", 0, 1))
        else:
            table.open_stream(offer(f"r{number}", name))
            table.close_stream(f"r{number}", RefusalReason.ABORTED)
    assert len(table) == 1
    assert len(table._until) <= 2 * MAX_PARKED
    assert set(map(str, table._parked_of.values())) == {"1"}


def test_a_reader_that_asks_again_waits_once() -> None:
    of = lender()
    first, second = greeted(of), greeted(of)
    for session, seq in ((first, 1), (first, 2), (second, 3)):
        assert [type(one) for one in say(of, session, follow(seq))] == [Parked]
    assert of.num_streams == 1
    apply(of, offer())
    assert not heard(first)
    _, granted = heard(second)
    assert isinstance(granted, Granted)
    assert granted.seq == 3


def test_readers_of_a_stream_that_never_comes_are_refused_in_a_moment() -> None:
    """Each look for one of them went through all: it took a second for as many as may wait."""

    def seconds(count: int) -> float:
        table: StreamTable[Session] = StreamTable()
        sessions = [Session(str(number)) for number in range(-(-count // MAX_PARKED_OF_ONE))]
        for number in range(count):
            message = Follow(1, STREAM, Reader(str(number), 0, 1))
            table.park_reader(sessions[number // MAX_PARKED_OF_ONE], message, 0.0)
        began = time.thread_time()
        assert len(table.take_overdue(PARK_S)) == count
        return time.thread_time() - began

    few = min(seconds(MAX_PARKED // 8) for _ in range(5))
    many = min(seconds(MAX_PARKED) for _ in range(5))
    assert many < 30 * few  # the time goes with their number, not with its square


def test_a_connection_that_holds_too_many_claims_follows_nothing_more() -> None:
    of = lender(claims=1)
    session = greeted(of)
    assert [type(one) for one in say(of, session, follow(1), follow(2, "d/2"))] == [Parked] * 2
    apply(of, offer())
    answers = [one for one in heard(session) if isinstance(one, Granted | Refused)]
    assert [type(one) for one in answers] == [Granted, Refused]
    assert isinstance(answers[1], Refused)
    assert answers[1].why is RefusalReason.TOO_MANY
