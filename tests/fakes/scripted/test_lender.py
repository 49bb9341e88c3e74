"""The lender that laws of the scheduler's half take turns with does as the real one does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from pdconn.lender.server import Lender
from pdconn.lender.sessions import Session
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Confirm,
    Confirmed,
    Done,
    FromReader,
    Granted,
    Hello,
    RankGeometry,
    Reader,
    Refused,
    Renew,
    Welcome,
)
from tests.fakes.pair import Cache
from tests.fakes.scripted.lender import InlineLender
from tests.faults.raw_clients import RawReader

TTL_S = 0.4
LONG_S = 60.0
READER = Reader("d/1", 0, 1)
TICKET = b"t" * 16
Answer = type[Granted] | type[Confirmed] | type[Refused]


def welcome() -> Welcome:
    references = Cache("BHLNC", filled=False).references
    return Welcome.in_our_version("p", "boot", {}, (RankGeometry(0, 0, b"address", references),))


@dataclass
class Both:
    """A lender of either kind, and one reader of it."""

    lender: Lender | InlineLender
    reader: RawReader | Session
    freed: list[tuple[str, str]] = field(default_factory=list)

    def say(self, message: FromReader, hears: Answer | None = None) -> None:
        if isinstance(self.reader, RawReader):
            self.reader.say(message)
            if hears is not None:
                self.reader.hear(hears)
            return
        assert isinstance(self.lender, InlineLender)
        answers = self.lender.say(self.reader, message)
        assert [type(one) for one in answers] == ([] if hears is None else [hears])

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
        self.freed += [(one.request, str(one.why)) for one in self.lender.take_freed()]


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


SCRIPTS: list[Script] = [
    expires, is_read, is_given_up, is_aborted_under_a_reader, is_revoked_under_a_reader,
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
