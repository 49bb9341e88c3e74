"""Laws of a lender's streams: each reader is sent each block once, and what was lent is freed once.

What is sent is decoded as a reader does.
"""

from __future__ import annotations

import time

import pytest

from pdconn.lender.sessions import (
    Abort,
    Session,
)
from pdconn.lender.streams import (
    MAX_PARKED,
    MAX_PARKED_OF_ONE,
    PARK_S,
    StreamTable,
)
from pdconn.protocol.limits import MAX_GROUPS
from pdconn.protocol.messages import (
    Claim,
    Done,
    Follow,
    Granted,
    Grown,
    GrownBlocks,
    Opened,
    Parked,
    Reader,
    RefusalReason,
    Refused,
    Renew,
)
from tests.lender.followed_lender import (
    EARLY,
    STREAM,
    TTL_S,
    apply,
    completion,
    follow,
    freed,
    greeted,
    growth,
    heard,
    lender,
    offer,
    say,
)


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


def test_a_reader_that_leaves_before_it_has_heard_of_an_abort_leaves_the_lease() -> None:
    of = lender()
    session = greeted(of)
    say(of, session, follow())
    apply(of, offer(), Abort("r"))
    say(of, session, Done(STREAM, Reader("d/1", 0, 1), EARLY), now=1.0)
    assert [str(one.why) for one in freed(of)] == ["aborted"]


def test_a_reader_that_leaves_before_it_has_heard_of_the_ticket_leaves_the_complete_lease() -> None:
    of = lender()
    apply(of, offer())
    session = greeted(of)
    say(of, session, follow())
    apply(of, completion())
    say(of, session, Done("r", Reader("d/1", 0, 1), EARLY), now=1.0)
    assert [str(one.why) for one in freed(of)] == ["read"]


@pytest.mark.parametrize("leaves", ["parked", "growing"])
@pytest.mark.parametrize("is_late", [False, True], ids=["opened", "opened when complete"])
def test_blocks_are_free_at_once_if_their_reader_has_left_before_they_were_computed(
    leaves: str, is_late: bool
) -> None:
    """Decode holds the prompt already; the lease lasted its time."""
    left_early(leaves, is_late)


def left_early(leaves: str, is_late: bool) -> None:
    of = lender()
    session = greeted(of)
    done = Done(STREAM, Reader("d/1", 0, 1), EARLY)
    say(of, session, follow(), *([done] if leaves == "parked" else []))
    if not is_late:
        apply(of, offer(), growth(0, 1))
    if leaves == "growing":
        say(of, session, done, now=1.0)
    assert not freed(of)
    apply(of, *([offer()] if is_late else []), completion())
    assert [str(one.why) for one in freed(of)] == ["read"]
    assert of.num_streams == 0


def test_that_law_notices_a_lender_that_forgets_who_was_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StreamTable, "take_left", lambda self, stream: set())
    with pytest.raises(AssertionError):
        left_early("parked", is_late=False)


@pytest.mark.parametrize("num_streams", [1, 4, 20])
def test_who_was_parked_and_has_left_takes_bounded_room(num_streams: int) -> None:
    """Readers of one stream, or of many: a table for each stream had room for 2 million."""
    table: StreamTable[str] = StreamTable(remember=8)
    streams = [f"{number:016}" for number in range(num_streams)]
    for number in range(20):
        message = Follow(1, streams[number % num_streams], Reader(f"d/{number}", 0, 1))
        table.park_reader("session", message, 0.0)
        table.leave_stream(message.stream, message.reader)
    assert len(table) == 0
    assert sum(len(table.take_left(stream)) for stream in streams) <= 8
    message = Follow(1, "another-stream-0", Reader("d/21", 0, 1))
    table.park_reader("session", message, 0.0)
    table.leave_stream(message.stream, message.reader)
    assert table.take_left(message.stream) == {message.reader}, "what was taken leaves room"


@pytest.mark.parametrize("is_claimed", [False, True], ids=["freed", "closing"])
def test_a_request_whose_lease_was_ended_is_not_lent_by_a_ticket_of_later(is_claimed: bool) -> None:
    """The engine has written it before it took the report; that frees the ticket's blocks, too."""
    of = lender()
    apply(of, offer())
    session = greeted(of)
    if is_claimed:
        say(of, session, follow())
    apply(of, Abort("r"), completion())
    ticket = completion().ticket.digest()
    heard(session)
    [answer] = say(of, session, Claim(2, "r", Reader("d/2", 0, 1), ticket))
    assert isinstance(answer, Refused)
    assert answer.why is RefusalReason.ABORTED
    of.turn(2 * TTL_S)
    assert [str(one.why) for one in freed(of)] == ["aborted"]
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
