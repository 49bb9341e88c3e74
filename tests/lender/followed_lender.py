"""A lender without sockets, its commands for streams, and readers that follow them."""

from __future__ import annotations

from collections.abc import Iterable

from pdconn.lender.sessions import ConnectionLimits, EngineCommand, LenderSessions, Session
from pdconn.lender.streams import StreamCompletion, StreamGrowth, StreamOffer
from pdconn.lifecycle.lease import FreedLease, LeaseOffer
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Follow,
    FromLender,
    FromReader,
    GrownBlocks,
    Hello,
    RankGeometry,
    Reader,
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
    replies, session.replies, session.num_announced = session.replies, [], 0
    assert decode_from_lender(encode(replies)) == replies
    return replies


def offer(request: str = "r", stream: str = STREAM, at: float = 0.0) -> StreamOffer:
    return StreamOffer(request, stream, 4 * NUM_BLOCKS, "prompt", "", TTL_S, at)


def growth(first: int, *ids: int, request: str = "r") -> StreamGrowth:
    return StreamGrowth(request, (GrownBlocks(0, first, ids),) if ids else ())


def completion(
    request: str = "r", ids: Iterable[int] = (1, 2, 3), at: float = 0.0
) -> StreamCompletion:
    blocks = (BlockList(0, tuple(ids)),)
    ticket = Ticket("p", "boot", request, "h", 1, 4 * NUM_BLOCKS, "prompt", blocks)
    return StreamCompletion(LeaseOffer(request, ticket.digest(), TTL_S, at), ticket)


def apply(of: LenderSessions, *commands: EngineCommand, now: float = 0.0) -> None:
    for command in commands:
        of.apply_command(command, now)


def freed(of: LenderSessions) -> list[FreedLease]:
    found = [report for report in of.reports if isinstance(report, FreedLease)]
    of.reports.clear()
    return found


def follow(seq: int = 1, pull: str = "d/1", rank: int = 0, of: int = 1) -> Follow:
    return Follow(seq, STREAM, Reader(pull, rank, of))
