"""The lender that laws of the scheduler's half take turns with does as the real one does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from pdconn.lender.server import Lender
from pdconn.lender.sessions import Session
from pdconn.lifecycle.lease import FreedLease
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Completed,
    Confirm,
    Confirmed,
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
    PullReply,
    RankGeometry,
    Reader,
    Refused,
    Renew,
    Welcome,
)
from pdconn.protocol.ticket import BlockList, Ticket
from tests.fakes.pair import Cache
from tests.fakes.scripted.lender import InlineLender
from tests.faults.raw_clients import RawReader

TTL_S = 0.4
LONG_S = 60.0
READER = Reader("d/1", 0, 1)
TICKET = b"t" * 16
STREAM = "s" * 16
Answer = type[PullReply]


def welcome() -> Welcome:
    references = Cache("BHLNC", filled=False).references
    return Welcome.in_our_version("p", "boot", {}, (RankGeometry(0, 0, b"address", references),))


@dataclass
class Both:
    """A lender of either kind, and one reader of it."""

    lender: Lender | InlineLender
    reader: RawReader | Session
    freed: list[tuple[str, str]] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)

    def say(self, message: FromReader, *hears: Answer) -> None:
        if isinstance(self.reader, RawReader):
            self.reader.say(message)
            self.hear(*hears)
            return
        assert isinstance(self.lender, InlineLender)
        self.check(self.lender.say(self.reader, message), hears)

    def hear(self, *hears: Answer) -> None:
        """What the reader is sent of what the engine has done."""
        if isinstance(self.reader, RawReader):
            for kind in hears:
                self.reader.hear(kind)
            return
        assert isinstance(self.lender, InlineLender)
        self.check(self.lender.say(self.reader), hears)

    def check(self, answers: Sequence[FromLender], hears: Sequence[Answer]) -> None:
        assert [type(one) for one in answers] == list(hears)

    def ends(self, expected: Sequence[tuple[str, str]]) -> None:
        """Leases end so, and no others."""
        give_up = time.monotonic() + 20
        while len(self.freed) < len(expected) and time.monotonic() < give_up:
            self.collect()
            time.sleep(0.005)
        time.sleep(0.05)
        self.collect()
        assert self.freed == expected

    def collect(self) -> None:
        if isinstance(self.lender, InlineLender):
            self.lender.turn()
        for report in self.lender.take_reports():
            if isinstance(report, FreedLease):
                self.freed.append((report.request, str(report.why)))
            else:
                self.followed.append(report.request)


Script = Callable[[Both], None]


def claim(seq: int, request: str = "r", ticket: bytes = TICKET) -> Claim:
    return Claim(seq, request, READER, ticket)


def expires(both: Both) -> None:
    both.lender.lend("r", TICKET, TTL_S)
    both.say(claim(1, ticket=b"x" * 16), Refused)
    both.ends([])
    both.ends([("r", "expired")])
    both.say(claim(2), Refused)


def is_read(both: Both) -> None:
    both.lender.lend("r", TICKET, LONG_S)
    both.say(claim(1), Granted)
    both.say(Renew(2, "r", READER), Granted)
    both.say(Confirm(3, "r", READER, TICKET), Confirmed)
    both.ends([("r", "read")])


def is_given_up(both: Both) -> None:
    both.lender.lend("r", TICKET, LONG_S)
    both.say(Done("r", READER, TICKET))
    both.ends([("r", "read")])


def is_aborted_under_a_reader(both: Both) -> None:
    both.lender.lend("r", TICKET, LONG_S)
    both.lender.lend("other", TICKET, LONG_S)
    both.say(claim(1), Granted)
    both.lender.abort_lease("r", if_unclaimed=True)
    both.lender.abort_lease("other", if_unclaimed=True)
    both.ends([("other", "aborted")])
    both.lender.abort_all()
    both.say(Renew(2, "r", READER), Granted)
    both.say(Confirm(3, "r", READER, TICKET), Confirmed)
    both.ends([("other", "aborted"), ("r", "aborted")])


def is_revoked_under_a_reader(both: Both) -> None:
    both.lender.lend("r", TICKET, LONG_S)
    both.say(claim(1), Granted)
    both.lender.revoke_all()
    both.ends([("r", "aborted")])
    both.say(Confirm(2, "r", READER, TICKET), Refused)


def open_stream(both: Both) -> None:
    both.lender.open_stream("r", STREAM, (12, "prompt", ""), LONG_S)


def complete_stream(both: Both) -> bytes:
    """The digest of the ticket."""
    made = Ticket("p", "boot", "r", "h", 1, 12, "prompt", (BlockList(0, (3, 4, 5)),))
    both.lender.complete_stream(made, LONG_S)
    return made.digest()


def is_followed(both: Both) -> None:
    open_stream(both)
    both.say(Follow(1, STREAM, READER), Opened, Granted)
    both.lender.grow_stream("r", ())
    both.hear(Grown)
    both.lender.grow_stream("r", (GrownBlocks(0, 0, (3,)),))
    both.hear(Grown)
    both.say(Confirm(2, "r", READER, TICKET), Refused)
    digest = complete_stream(both)
    both.hear(Completed)
    both.ends([])
    assert both.followed == ["r"]
    both.say(Confirm(3, "r", READER, digest), Confirmed)
    both.ends([("r", "read")])
    both.say(Follow(4, STREAM, READER), Refused)


def is_followed_before_it_comes(both: Both) -> None:
    both.say(Follow(1, STREAM, READER), Parked)
    open_stream(both)
    both.hear(Opened, Granted)
    both.lender.abort_lease("r")
    both.hear(Refused)
    both.ends([])
    both.say(Done("r", READER, TICKET))
    both.ends([("r", "aborted")])


def is_followed_late(both: Both) -> None:
    open_stream(both)
    digest = complete_stream(both)
    both.say(Follow(1, STREAM, READER), Opened, Granted, Completed)
    both.ends([])
    assert not both.followed
    both.say(Done("r", READER, digest))
    both.ends([("r", "read")])


def is_complete_after_its_end(both: Both) -> None:
    open_stream(both)
    both.lender.revoke_all()
    digest = complete_stream(both)
    both.say(Claim(1, "r", READER, digest), Refused)
    both.ends([("r", "aborted")])


def is_given_up_while_it_waits(both: Both) -> None:
    both.say(Follow(1, STREAM, READER), Parked)
    both.say(Done(STREAM, READER, TICKET))
    both.say(claim(2, "nothing"), Refused)  # the lender has taken in what came before
    open_stream(both)
    complete_stream(both)
    both.ends([("r", "read")])
    assert not both.followed


SCRIPTS: list[Script] = [
    expires, is_read, is_given_up, is_aborted_under_a_reader, is_revoked_under_a_reader,
    is_followed, is_followed_before_it_comes, is_followed_late,
    is_complete_after_its_end, is_given_up_while_it_waits,
]  # fmt: skip


@contextmanager
def either(kind: str) -> Iterator[Both]:
    hello = Hello(PROTOCOL_VERSION, "d", "boot")
    if kind == "inline":
        inline, session = InlineLender(welcome(), clock=time.monotonic), Session("d")
        inline.say(session, hello)
        yield Both(inline, session)
        return
    lender = Lender(welcome(), "127.0.0.1", 0)
    try:
        with RawReader(lender.port, wants="boot") as reader:
            yield Both(lender, reader)
    finally:
        lender.close()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("kind", ["real", "inline"])
def test_both_do_the_same(kind: str, script: Script) -> None:
    with either(kind) as both:
        script(both)
