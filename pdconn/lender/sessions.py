"""The lender without its sockets: sessions, their messages, and the leases they claim.

::

    engine ── LeaseOffer, Abort, … ──► ┌────────────────┐ ◄── handle(session, messages)
           ◄── FreedLease, counts ──── │ LenderSessions │ ──► session.replies
                                       └────────────────┘

It neither waits nor reads a clock, so a simulation serves a thousand sessions in virtual time with
the code that serves real ones.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdconn.lender.checksums import ChecksumResponder, RankSums
from pdconn.lifecycle import lease
from pdconn.lifecycle.admission import AdmissionLimits
from pdconn.lifecycle.lease import Denied, FreedLease, LeaseOffer, LeaseTable
from pdconn.protocol.errors import MessageError, ProtocolError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    ChecksumRequest,
    ChecksumUnavailable,
    Claim,
    Confirm,
    Confirmed,
    Describe,
    Described,
    Done,
    FromLender,
    FromReader,
    Granted,
    Hello,
    Reader,
    RefusalReason,
    Refused,
    Rejected,
    Renew,
    Welcome,
    encode,
    encode_frames,
)

log = logging.getLogger(__name__)

_MAX_SHOWN = 256
_NO_CLAIM = "this connection holds no such claim"


@dataclass(frozen=True, slots=True)
class ConnectionLimits(AdmissionLimits):
    """Bounds of each connection of a lender, besides those of every listener.

    A connection stalls while its peer has not sent a valid Hello, has sent part of a frame, or
    does not read its replies.

    Attributes:
        claims: claims that one connection may hold.
        checksum_requests: that may wait, of all connections; some 20 kB each at most.
        frame_nbytes: longest frame that a reader may send.
        unsent_nbytes: replies that may wait for one reader.
    """

    claims: int = 1 << 14
    checksum_requests: int = 1024
    frame_nbytes: int = 1 << 20
    unsent_nbytes: int = 1 << 26


@dataclass(frozen=True, slots=True)
class Abort:
    """Free the blocks of ``request`` as soon as no claim on them holds."""

    request: str


@dataclass(frozen=True, slots=True)
class AbortUnclaimed:
    """Free the blocks of ``request`` unless a rank has claimed them."""

    request: str


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Free all lent blocks, each lease's as soon as no claim on it holds."""


@dataclass(frozen=True, slots=True)
class RevokeAll:
    """Free all lent blocks now; reads of them are not confirmed."""


EngineCommand = LeaseOffer | Abort | AbortUnclaimed | AbortAll | RevokeAll | RankSums


@dataclass(slots=True, eq=False)
class Session:
    """One connection: its peer's name, its unsent replies, and the claims that it holds.

    Attributes:
        leaving: no further message is handled, and the connection closes once ``replies`` are sent.
        stalls: whether it stalls, as last recorded; a new one does.
        claimed: its readers by request, until the lease ends.
    """

    name: str
    greeted: bool = False
    leaving: bool = False
    stalls: bool = True
    replies: list[FromLender] = field(default_factory=list)
    claimed: dict[str, set[Reader]] = field(default_factory=dict)
    num_claims: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What is left to do after a turn.

    Attributes:
        pending: sessions with replies to earlier messages.
        wake_at: when the next turn is due: now if there is work left, or infinity.
    """

    pending: list[Session] = field(default_factory=list)
    wake_at: float = math.inf


class LenderSessions:
    """Leases of one lender, and the sessions that claim them.

    Args:
        welcome: our geometry; a Hello must name its incarnation.
        is_summing: whether checksums of what is lent will be added.
        warn: logs errors of peers, as ``Logger.warning``.
        limits: bounds of what sessions may request.

    Attributes:
        freed: leases that ended, in order; the owner empties it.
        counts: event counts; the owner adds to them and empties them.

    Used by one thread.
    """

    def __init__(
        self,
        welcome: Welcome,
        is_summing: bool = False,
        warn: Callable[..., None] = log.warning,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._warn = warn
        self._limits = limits or ConnectionLimits()
        self._welcome = welcome
        self._described = Described.from_welcome(welcome)
        # Encoded once: every session is sent one of the two.
        self._frames = {id(reply): encode([reply]) for reply in (welcome, self._described)}
        self._leases = LeaseTable()
        self._is_summing = is_summing
        self._checksums: ChecksumResponder[Session] = ChecksumResponder(
            len(welcome.ranks), is_summing, self._limits.checksum_requests
        )
        self._claimants: dict[str, set[Session]] = {}
        self._pending: list[Session] = []
        self.freed: list[FreedLease] = []
        self.counts: Counter[str] = Counter()

    @property
    def num_lent(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def num_summed(self) -> int:
        """Leases whose checksums are stored, or for which a reader waits."""
        return len(self._checksums)

    def apply_command(self, command: EngineCommand, now: float) -> None:
        """Carry out a command of the engine."""
        if isinstance(command, LeaseOffer):
            self.counts["lent"] += 1
            self._leases.add_lease(command)
        elif isinstance(command, Abort):
            self._free(self._leases.abort_lease(command.request, now))
        elif isinstance(command, AbortUnclaimed):
            self._free(self._leases.abort_unclaimed(command.request, now))
        elif isinstance(command, AbortAll):
            self._free(self._leases.abort_all(now))
        elif isinstance(command, RevokeAll):
            self._free(self._leases.revoke_all())
        elif self._is_summing and self._leases.is_lent(command.request):
            self._checksums.add_rank_sums(command)

    def turn(self, now: float) -> Turn:
        """Free the leases that have expired, and make at most one checksum answer."""
        freed, wake_at = self._leases.free_expired(now), self._leases.next_expiry()
        if freed:
            self._free(freed)
        if self._is_summing:
            answer = self._checksums.make_answer()
            if answer is not None:
                self._reply_later(*answer)
            if self._checksums.has_work:
                wake_at = now
        pending, self._pending = self._pending, []
        return Turn(pending, math.inf if wake_at is None else wake_at)

    def handle_messages(self, session: Session, messages: list[FromReader], now: float) -> None:
        """Handle a session's messages.  The first invalid one is rejected and ends the session."""
        try:
            for message in messages:
                if not session.leaving:
                    self._handle(session, message, now)
        except ProtocolError as error:
            self.reject(session, error)

    def reject(self, session: Session, error: ProtocolError) -> None:
        """Reply to an invalid message, and end the session."""
        self.counts["bad_messages"] += 1
        self._warn("pdconn: side-channel message rejected: %s peer=%r", error, session.name)
        self._end(session, error.field, str(error.expected), str(error.seen))

    def take_frames(self, session: Session) -> list[bytes]:
        """Bodies of the frames with the session's replies."""
        replies, session.replies = session.replies, []
        for reply in replies:
            if id(reply) in self._frames:
                break
        else:
            return encode_frames(replies)
        return [self._frames.get(id(reply)) or encode([reply]) for reply in replies]

    def _handle(self, session: Session, message: FromReader, now: float) -> None:
        if isinstance(message, Hello):
            self._greet(session, message)
        elif isinstance(message, Describe):
            self.counts["described"] += 1
            session.replies.append(self._described)
            session.leaving = True
        elif not session.greeted:
            raise MessageError("first message", "hello", type(message).__name__.lower())
        elif isinstance(message, Renew):
            self.counts["renewals"] += 1
            session.replies.append(_reply(message, self._renew(session, message, now)))
        elif isinstance(message, Claim):
            self._claim(session, message, now)
        elif isinstance(message, Confirm):
            self._confirm(session, message, now)
        elif isinstance(message, Done):
            self._done(session, message, now)
        else:
            self._ask_checksum(session, message)

    def _greet(self, session: Session, hello: Hello) -> None:
        if session.greeted:
            self._end(session, "hello", "one on a connection", "another")
        elif hello.version != PROTOCOL_VERSION:
            self._end(session, "version", str(PROTOCOL_VERSION), str(hello.version))
        elif hello.wants not in (None, self._welcome.incarnation):
            self._end(session, "incarnation", self._welcome.incarnation, str(hello.wants))
        else:
            self.counts["greeted"] += 1
            session.greeted = True
            session.name = f"{hello.engine_id} at {session.name}"
            session.replies.append(self._welcome)

    def _claim(self, session: Session, message: Claim, now: float) -> None:
        self.counts["claims"] += 1
        answer: lease.Grant | Denied
        if session.num_claims >= self._limits.claims:
            detail = f"this connection holds {self._limits.claims} claims"
            answer = Denied(RefusalReason.TOO_MANY, detail)
        else:
            answer = self._leases.claim_lease(message.request, message.reader, message.ticket, now)
        if isinstance(answer, Denied):
            self.counts[f"refused_{answer.why}"] += 1
        else:
            readers = session.claimed.setdefault(message.request, set())
            session.num_claims += message.reader not in readers
            readers.add(message.reader)
            self._claimants.setdefault(message.request, set()).add(session)
        session.replies.append(_reply(message, answer))

    def _renew(self, session: Session, message: Renew, now: float) -> lease.Grant | Denied:
        """Renew a claim; only the session that holds it may."""
        if self._is_claimed_elsewhere(session, message.request, message.reader, now):
            return Denied(RefusalReason.BAD_READER, "another connection holds this claim")
        return self._leases.renew_lease(message.request, message.reader, now)

    def _confirm(self, session: Session, message: Confirm, now: float) -> None:
        """Confirm that a claim held until now; only the session that holds it may ask."""
        request, reader = message.request, message.reader
        denied: Denied | None = Denied(RefusalReason.BAD_READER, _NO_CLAIM)
        freed: list[FreedLease] = []
        if reader in session.claimed.get(request, ()) or not self._leases.is_lent(request):
            denied, freed = self._leases.confirm_lease(request, reader, message.ticket, now)
        if denied is None:
            self.counts["confirmed"] += 1
            self._drop_claim(session, request, reader)
            session.replies.append(Confirmed(message.seq, request, reader.pull))
        else:
            self.counts[f"unconfirmed_{denied.why}"] += 1
            session.replies.append(_reply(message, denied))
        self._free(freed)

    def _done(self, session: Session, message: Done, now: float) -> None:
        """End a claim; one that holds ends by a message of its own session only."""
        if self._is_claimed_elsewhere(session, message.request, message.reader, now):
            self.counts["done_rejected"] += 1
            return
        self._drop_claim(session, message.request, message.reader)
        self._free(self._leases.end_claim(message.request, message.reader, message.ticket, now))

    def _drop_claim(self, session: Session, request: str, reader: Reader) -> None:
        ours = session.claimed.get(request, set())
        session.num_claims -= reader in ours
        ours.discard(reader)

    def _ask_checksum(self, session: Session, message: ChecksumRequest) -> None:
        """Answer a checksum request; only a session that holds the claim is given checksums."""
        self.counts["checksum_requests"] += 1
        answer: ChecksumUnavailable | None
        if message.reader in session.claimed.get(message.request, ()):
            answer = self._checksums.ask_checksum(session, message)
        else:
            answer = ChecksumUnavailable(message.number, message.reader.pull, _NO_CLAIM)
        if answer is not None:
            session.replies.append(answer)

    def _is_claimed_elsewhere(
        self, session: Session, request: str, reader: Reader, now: float
    ) -> bool:
        """Whether ``reader`` holds a claim that it made on another connection."""
        if reader in session.claimed.get(request, ()):
            return False
        return self._leases.is_claimed(request, reader, now)

    def _end(self, session: Session, field: str, expected: str, seen: str) -> None:
        self.counts["connections_rejected"] += 1
        session.replies.append(Rejected(field, expected[:_MAX_SHOWN], seen[:_MAX_SHOWN]))
        session.leaving = True

    def _free(self, freed: list[FreedLease]) -> None:
        for ended in freed:
            self.counts[f"freed_{ended.why}"] += 1
            self.freed.append(ended)
            if self._is_summing:
                for answer in self._checksums.forget_lease(ended.request):
                    self._reply_later(*answer)
            for session in self._claimants.pop(ended.request, ()):
                session.num_claims -= len(session.claimed.pop(ended.request, ()))

    def _reply_later(self, session: Session, reply: FromLender) -> None:
        session.replies.append(reply)
        self._pending.append(session)


def _reply(message: Claim | Renew | Confirm, answer: lease.Grant | Denied) -> Granted | Refused:
    pull = message.reader.pull
    if isinstance(answer, Denied):
        return Refused(message.seq, message.request, pull, answer.why, answer.detail)
    return Granted(message.seq, message.request, pull, max(1, int(answer.ttl_s * 1000)))
