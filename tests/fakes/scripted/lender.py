"""The lender of an engine, without its thread and its sockets: it takes a turn when it is told to.

What decides is real (:class:`~pdconn.lender.sessions.LenderSessions`).  As with a thread, what the
engine asks for happens later, and before any message that comes then.
``test_lender.py`` beside it gives it and the real one the same commands and messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdconn.integrity.lent import LentSums
from pdconn.lender.checksums import RankSums
from pdconn.lender.sessions import (
    Abort,
    AbortAll,
    AbortUnclaimed,
    EngineCommand,
    LenderReport,
    LenderSessions,
    RevokeAll,
    Session,
)
from pdconn.lender.streams import StreamCompletion, StreamGrowth, StreamOffer
from pdconn.lifecycle.lease import LeaseOffer
from pdconn.protocol.messages import FromLender, FromReader, GrownBlocks, Welcome
from pdconn.protocol.ticket import Ticket


class InlineLender:
    """One lender; further arguments are those of the real one, and of no effect.

    Args:
        welcome: our geometry.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        welcome: Welcome,
        host: str = "",
        port: int = 0,
        *,
        clock: Callable[[], float],
        is_summing: bool = False,
        **further: Any,
    ) -> None:
        self._clock, self.port, self.is_closed = clock, port, False
        self.sessions = LenderSessions(welcome, is_summing)
        self._inbox: list[EngineCommand] = []
        self._reports: list[LenderReport] = []

    def lend(self, request: str, ticket: bytes, ttl_s: float) -> None:
        self._inbox.append(LeaseOffer(request, ticket, ttl_s, self._clock()))

    def add_sums(self, request: str, rank: int, sums: LentSums | None) -> None:
        self._inbox.append(RankSums(request, rank, sums))

    def abort_lease(self, request: str, *, if_unclaimed: bool = False) -> None:
        self._inbox.append(AbortUnclaimed(request) if if_unclaimed else Abort(request))

    def abort_all(self) -> None:
        self._inbox.append(AbortAll())

    def revoke_all(self) -> None:
        self._inbox.append(RevokeAll())

    def open_stream(
        self, request: str, stream: str, header: tuple[int, str, str], ttl_s: float
    ) -> None:
        self._inbox.append(StreamOffer(request, stream, *header, ttl_s, self._clock()))

    def grow_stream(self, request: str, blocks: tuple[GrownBlocks, ...]) -> None:
        self._inbox.append(StreamGrowth(request, blocks))

    def complete_stream(self, ticket: Ticket, ttl_s: float) -> None:
        offer = LeaseOffer(ticket.request_id, ticket.digest(), ttl_s, self._clock())
        self._inbox.append(StreamCompletion(offer, ticket))

    def take_reports(self) -> list[LenderReport]:
        reports, self._reports = self._reports, []
        return reports

    def take_lease_counts(self) -> dict[str, int]:
        counts = dict(self.sessions.counts)
        self.sessions.counts.clear()
        return counts

    def close(self) -> None:
        """What was asked for is done first."""
        self.turn()
        self.is_closed = True

    # What a test calls

    def turn(self) -> None:
        """Do what the engine has asked for, and report."""
        self._apply()
        self.sessions.turn(self._clock())
        self._reports += self.sessions.reports
        self.sessions.reports.clear()

    def say(self, session: Session, *messages: FromReader) -> list[FromLender]:
        """A reader's messages arrive; what it is answered in the turn in which they do."""
        self._apply()
        self.sessions.handle_messages(session, list(messages), self._clock())
        self.turn()
        replies, session.replies = session.replies, []
        return replies

    def _apply(self) -> None:
        commands, self._inbox = self._inbox, []
        for command in commands:
            self.sessions.apply_command(command, self._clock())
