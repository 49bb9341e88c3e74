"""Every reader of a stream is answered, is sent each block once, and all is freed once.

Two ranks of a decode engine follow, each on a connection of its own that may be lost; the engine
opens streams before or after them, announces, completes, aborts, revokes, and uses names again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pdconn.lender.sessions import (
    Abort,
    AbortAll,
    AbortUnclaimed,
    LenderSessions,
    RevokeAll,
    Session,
    StreamCommand,
)
from pdconn.lender.streams import (
    PARK_S,
    StreamCompletion,
    StreamGrowth,
    StreamOffer,
    StreamTable,
)
from pdconn.lifecycle.lease import FreedLease, Lease, LeaseTable
from pdconn.protocol.messages import (
    Completed,
    Confirm,
    Confirmed,
    Done,
    Follow,
    FromLender,
    Granted,
    Grown,
    Opened,
    Parked,
    Reader,
    RefusalReason,
    Refused,
    Renew,
    StreamReply,
)
from tests.lender.followed_lender import (
    EARLY,
    TTL_S,
    apply,
    completion,
    greeted,
    growth,
    heard,
    lender,
    offer,
    say,
)
from tests.property.scale import LawMachine, holds, notices

RANKS = 2
STREAMS = tuple(f"{number:016}" for number in range(2))
WHICH = st.integers(0, 99)
EXAMPLES, STEPS = 300, 40


@dataclass(slots=True)
class Followed:
    """A request of the engine's: its blocks so far, and what has become of it."""

    request: str
    stream: str
    is_lent: bool = False
    blocks: list[int] = field(default_factory=list)
    done: StreamCompletion | None = None
    is_over: bool = False


@dataclass(slots=True)
class Reading:
    """A rank that follows a stream, and what it was sent."""

    session: Session
    rank: int
    message: Follow
    asked_at: float
    request: str | None = None
    until: float | None = None
    blocks: list[int] = field(default_factory=list)
    is_complete: bool = False
    refused: RefusalReason | None = None
    has_left: bool = False

    @property
    def is_answered(self) -> bool:
        return self.until is not None or self.refused is not None

    @property
    def may_speak(self) -> bool:
        return not self.has_left and not self.session.leaving

    def believes(self, now: float) -> bool:
        """Whether it may read: its connection may be lost, and its reads go on."""
        return not self.has_left and self.until is not None and now < self.until


class FollowersMachine(LawMachine):
    """Requests come and end, ranks follow, renew, confirm, leave, and lose their connections."""

    @initialize()
    def start(self) -> None:
        self.of, self.now = lender(), 0.0
        self.sessions = [greeted(self.of) for _ in range(RANKS)]
        self.requests: list[Followed] = []
        self.readings: list[Reading] = []
        self.freed: list[str] = []
        self.revoked: set[str] = set()

    # The engine

    @rule(stream=st.sampled_from(STREAMS), is_open=st.sampled_from([True, True, False]))
    def arrive(self, stream: str, is_open: bool) -> None:
        """A request comes; its adapter may be known only at its end."""
        one = Followed(f"r{len(self.requests)}", stream)
        self.requests.append(one)
        one.is_lent = is_open
        if is_open:
            apply(self.of, offer(one.request, stream, self.now), now=self.now)
        self.hear()

    @precondition(lambda self: self.running())
    @rule(which=WHICH, count=st.integers(0, 2))
    def announce(self, which: int, count: int) -> None:
        one = self.running()[which % len(self.running())]
        first, ids = len(one.blocks), [100 * (which + 1) + at for at in range(count)]
        one.blocks += ids
        apply(self.of, growth(first, *ids, request=one.request), now=self.now)
        self.hear()

    @precondition(lambda self: self.running())
    @rule(which=WHICH, more=st.integers(0, 2))
    def complete(self, which: int, more: int) -> None:
        one = self.running()[which % len(self.running())]
        one.blocks += [7 + at for at in range(more)]
        if not one.is_lent:
            apply(self.of, offer(one.request, one.stream, self.now), now=self.now)
        one.is_lent = True
        one.done = completion(one.request, one.blocks, at=self.now)
        apply(self.of, one.done, now=self.now)
        self.hear()

    @precondition(lambda self: self.ended())
    @rule(which=WHICH)
    def complete_late(self, which: int) -> None:
        """The engine has not taken the report of the lease's end yet."""
        one = self.ended()[which % len(self.ended())]
        apply(self.of, completion(one.request, [*one.blocks, 7], at=self.now), now=self.now)
        self.hear()

    @precondition(lambda self: self.requests)
    @rule(which=WHICH, if_unclaimed=st.booleans())
    def abort(self, which: int, if_unclaimed: bool) -> None:
        one = self.requests[which % len(self.requests)]
        apply(self.of, (AbortUnclaimed if if_unclaimed else Abort)(one.request), now=self.now)
        self.hear()
        one.is_over = one.is_over or not if_unclaimed or one.request in self.freed

    @rule(how=st.sampled_from([None] * 6 + [AbortAll, RevokeAll]))
    def end_all(self, how: type[AbortAll] | type[RevokeAll] | None) -> None:
        if how is not None:
            if how is RevokeAll:
                self.revoked.update(one.request for one in self.requests)
            for one in self.requests:
                one.is_over = True
            apply(self.of, how(), now=self.now)
            self.hear()

    @rule(seconds=st.sampled_from([0.5, 0.5, TTL_S / 2, TTL_S, PARK_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.of.turn(self.now)
        self.hear()

    # Readers

    @rule(stream=st.sampled_from(STREAMS), ranks=st.sampled_from([(0, 1), (1,), (0,)]))
    def follow(self, stream: str, ranks: tuple[int, ...]) -> None:
        """A pull begins; the other rank comes later, or never."""
        pull = f"d/{len(self.readings)}"
        for rank in ranks:
            self.follow_as(rank, Follow(1, stream, Reader(pull, rank, RANKS)))

    @precondition(lambda self: self.readings)
    @rule(which=WHICH)
    def follow_late(self, which: int) -> None:
        """The other rank of a pull comes."""
        first = self.readings[which % len(self.readings)].message
        reader = Reader(first.reader.pull, 1 - first.reader.rank, RANKS)
        if reader not in [each.message.reader for each in self.readings]:
            self.follow_as(reader.rank, Follow(1, first.stream, reader))

    @precondition(lambda self: self.readings)
    @rule(which=WHICH)
    def follow_again(self, which: int) -> None:
        """A reader asks once more; on a new connection, all is new to it."""
        one = self.readings[which % len(self.readings)]
        if one.has_left:
            return
        if one.session.leaving:
            one.session, one.request, one.refused = self.sessions[one.rank], None, None
            one.blocks, one.is_complete = [], False
        one.asked_at = self.now
        self.take(one.session, say(self.of, one.session, one.message, now=self.now))
        self.hear()

    def follow_as(self, rank: int, message: Follow) -> None:
        session = self.sessions[rank]
        self.readings.append(Reading(session, rank, message, self.now))
        self.take(session, say(self.of, session, message, now=self.now))
        self.hear()

    @precondition(lambda self: self.speaking())
    @rule(which=WHICH, what=st.sampled_from(["renew", "confirm", "leave", "leave as named"]))
    def go_on(self, which: int, what: str) -> None:
        one = self.speaking()[which % len(self.speaking())]
        session, reader, request = one.session, one.message.reader, one.request
        if what.startswith("leave") or request is None:
            named = request if what == "leave" and request is not None else one.message.stream
            one.has_left = True
            say(self.of, session, Done(named, reader, self.digest(one)), now=self.now)
        elif what == "renew":
            self.take(session, say(self.of, session, Renew(2, request, reader), now=self.now))
        else:
            message = Confirm(3, request, reader, self.digest(one))
            [answer] = say(self.of, session, message, now=self.now)
            if isinstance(answer, Confirmed):
                assert one.is_complete, "confirmed before it was complete"
                assert request not in self.revoked, "confirmed after it was revoked"
                assert request not in self.freed, "confirmed after it was freed"
                one.has_left = True
        self.hear()

    @precondition(lambda self: self.speaking())
    @rule(which=WHICH)
    def leave_for_another(self, which: int) -> None:
        """A message of another connection, which knows all names, ends no claim."""
        one = self.speaking()[which % len(self.speaking())]
        if one.request is None or not one.believes(self.now) or one.request in self.freed:
            return
        reader, other = one.message.reader, self.sessions[1 - one.rank]
        for name in (one.request, one.message.stream):
            say(self.of, other, Done(name, reader, self.digest(one)), now=self.now)
        answers = say(self.of, one.session, Renew(2, one.request, reader), now=self.now)
        assert any(isinstance(answer, Granted) for answer in answers), "another has ended a claim"
        self.take(one.session, answers)
        self.hear()

    @rule(rank=st.sampled_from([None, None, *range(RANKS)]))
    def lose_connection(self, rank: int | None) -> None:
        if rank is None:
            return
        self.sessions[rank].leaving = True
        self.sessions[rank] = greeted(self.of)

    # What is sent

    def hear(self) -> None:
        for session in self.sessions:
            self.take(session, heard(session))
        for report in self.of.reports:
            if isinstance(report, FreedLease):
                self.end(report.request)
        self.of.reports.clear()

    def take(self, session: Session, replies: list[FromLender]) -> None:
        for reply in replies:
            assert isinstance(reply, Granted | Refused | Parked | Opened | Grown | Completed)
            [one] = [
                each
                for each in self.readings
                if each.message.reader.pull == reply.pull and each.session is session
            ]
            self.take_one(one, reply)

    def take_one(self, one: Reading, reply: Granted | Refused | StreamReply) -> None:
        assert not one.has_left, "a reader that has left is sent more"
        if isinstance(reply, Granted):
            one.until = self.now + reply.ttl_ms / 1000
        elif isinstance(reply, Refused):
            one.refused = reply.why
        elif isinstance(reply, Opened):
            assert reply.stream == one.message.stream
            one.request = reply.request
        elif isinstance(reply, Grown):
            for more in reply.blocks:
                assert more.first == len(one.blocks), "sent twice, or not in order"
                one.blocks += more.ids
        elif isinstance(reply, Completed):
            [(first, ids)] = reply.blocks
            assert first == 0
            assert list(ids[: len(one.blocks)]) == one.blocks, "not what was announced"
            assert not one.is_complete, "completed twice"
            one.blocks, one.is_complete = list(ids), True

    def end(self, request: str) -> None:
        self.freed.append(request)
        assert self.freed.count(request) == 1, f"{request} is freed twice"
        if request not in self.revoked:
            under = self.believing(request)
            assert not under, f"{request} is freed under {under}"

    # Laws

    @invariant()
    def all_is_sent_to_all(self) -> None:
        known = {one.request: one for one in self.requests if not one.is_over}
        for each in self.readings:
            one = known.get(each.request or "")
            if one is not None and each.refused is None and each.may_speak:
                assert each.blocks == one.blocks, "announced, and not sent"
                assert each.is_complete == (one.done is not None), "completed, and not sent"

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        for each in self.readings:
            is_late = self.now >= each.asked_at + PARK_S
            assert each.is_answered or not each.may_speak or not is_late, f"{each} is forgotten"

    @invariant()
    def what_is_over_is_free_once_its_readers_have_left(self) -> None:
        for one in self.requests:
            if one.is_over and one.is_lent and not self.believing(one.request):
                assert one.request in self.freed, f"{one} is over, and pinned"
            if one.is_over and one.done is None:
                for each in self.readings:
                    is_told = each.refused is not None or not each.may_speak
                    assert is_told or each.request != one.request, f"{each} is not told"

    def check_end(self) -> None:
        self.end_all(AbortAll)
        for _ in range(3):
            self.wait(PARK_S)
        assert (self.of.num_lent, self.of.num_streams) == (0, 0), "entries of nothing"
        assert not self.of._streams._parked_of
        assert [session.num_claims for session in self.sessions] == [0] * RANKS
        lent = {one.request for one in self.requests if one.is_lent}
        assert lent == set(self.freed)

    def running(self) -> list[Followed]:
        return [one for one in self.requests if one.done is None and not one.is_over]

    def ended(self) -> list[Followed]:
        """Requests whose streams were open, and whose leases the engine has ended."""
        return [one for one in self.requests if one.is_lent and one.done is None and one.is_over]

    def speaking(self) -> list[Reading]:
        return [each for each in self.readings if each.may_speak]

    def believing(self, request: str) -> list[Reading]:
        return [
            each for each in self.readings if each.request == request and each.believes(self.now)
        ]

    def digest(self, one: Reading) -> bytes:
        done = [each.done for each in self.requests if each.request == one.request and each.done]
        return done[0].ticket.digest() if one.is_complete else EARLY


@pytest.mark.hypothesis
def test_every_reader_is_answered_and_sent_all_once_and_what_was_lent_is_freed_once() -> None:
    holds(FollowersMachine, examples=100, steps=STEPS)


# What those laws notice


def _first_only(table: StreamTable[Session], growth: StreamGrowth) -> list[tuple[Session, Grown]]:
    """Announces to one reader of a stream."""
    return list(GROW(table, growth))[:1]


def _all_again(table: StreamTable[Session], growth: StreamGrowth) -> list[tuple[Session, Grown]]:
    """Announces what was announced."""
    return [*GROW(table, growth), *GROW(table, growth)]


def _nothing_missed(
    table: StreamTable[Session], session: Session, reader: Reader, stream: str
) -> tuple[Opened, list[StreamReply]]:
    """Takes a late reader for an early one."""
    return ADD_READER(table, session, reader, stream)[0], []


def _all_anew(
    table: StreamTable[Session], session: Session, reader: Reader, stream: str
) -> tuple[Opened, list[StreamReply]]:
    """Sends everything to a reader whenever it asks."""
    table._streams[stream].readers.pop(reader, None)
    return ADD_READER(table, session, reader, stream)


def _one_of_the_parked(table: StreamTable[Session], offer: StreamOffer) -> list[Any]:
    """Forgets all but the first reader that waits."""
    return OPEN(table, offer)[:1]


def _overwritten(table: StreamTable[Session], offer: StreamOffer) -> list[Any]:
    """Gives a name to the last request that brings it."""
    table._streams.pop(offer.stream, None)
    table._ended.pop(offer.stream, None)
    return OPEN(table, offer)


def _one_of_the_overdue(table: StreamTable[Session], now: float) -> list[Any]:
    """Refuses one reader that has waited for too long."""
    return OVERDUE(table, now)[:1]


def lends_again(sessions: LenderSessions, command: StreamCommand, now: float) -> None:
    """Opens another lease for the ticket of a request whose lease has ended."""
    if isinstance(command, StreamCompletion):
        request = command.offer.request
        if not sessions._leases.is_lent(request):
            sessions._leases.add_lease(command.offer)
    APPLY(sessions, command, now)


APPLY = LenderSessions._apply_stream_command
GROW, ADD_READER = StreamTable.grow, StreamTable.add_reader
OPEN, OVERDUE = StreamTable.open_stream, StreamTable.take_overdue

BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "announces to one reader": (StreamTable, "grow", _first_only),
    "announces twice": (StreamTable, "grow", _all_again),
    "announces nothing to a late reader": (StreamTable, "add_reader", _nothing_missed),
    "announces all to a reader that asks again": (StreamTable, "add_reader", _all_anew),
    "opens for one parked reader": (StreamTable, "open_stream", _one_of_the_parked),
    "uses a name again": (StreamTable, "open_stream", _overwritten),
    "refuses one of the overdue": (StreamTable, "take_overdue", _one_of_the_overdue),
    "refuses nobody after an abort": (StreamTable, "close_stream", lambda *_: []),
    "lets anyone end a claim": (LenderSessions, "_is_claimed_elsewhere", lambda *_: False),
    "lets nobody leave": (LeaseTable, "leave_lease", lambda *_: []),
    "frees under readers": (Lease, "_drain", lambda lease, _: lease._enter("drained")),
    "lends again what has ended": (LenderSessions, "_apply_stream_command", lends_again),
    "confirms while it grows": (Lease, "confirm", lambda lease, *_: None),
    "loses replies": (
        LenderSessions,
        "_reply_later",
        lambda sessions, session, reply: sessions._pending.append(session),
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_laws_notice_a_lender_that(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[broken])
    notices(FollowersMachine, examples=EXAMPLES, steps=STEPS)
