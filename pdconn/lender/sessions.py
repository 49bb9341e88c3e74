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
from pdconn.lender.streams import (
    PARK_S,
    StreamCompletion,
    StreamGrowth,
    StreamOffer,
    StreamTable,
)
from pdconn.lifecycle import lease
from pdconn.lifecycle.admission import AdmissionLimits
from pdconn.lifecycle.lease import Denied, FreedLease, LeaseOffer, LeaseTable, refusal_after
from pdconn.protocol.errors import MessageError, ProtocolError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    ChecksumRequest,
    ChecksumUnavailable,
    Claim,
    Completed,
    Confirm,
    Confirmed,
    Describe,
    Described,
    Done,
    Follow,
    FromLender,
    FromReader,
    Granted,
    Grown,
    Hello,
    Parked,
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
_NBYTES_PER_BLOCK = 5
"""Of a message that announces it, at most: an id is below 2^31."""
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
        unsent_nbytes: replies that may wait for one reader.  A connection with more is closed: a
            short message asks for every block of a long prompt, and a frame has room for many.
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


StreamCommand = StreamOffer | StreamGrowth | StreamCompletion
EngineCommand = (
    LeaseOffer | StreamCommand | Abort | AbortUnclaimed | AbortAll | RevokeAll | RankSums
)


@dataclass(frozen=True, slots=True)
class Followed:
    """A reader follows the stream of ``request``, which the engine is computing."""

    request: str


LenderReport = FreedLease | Followed


@dataclass(slots=True, eq=False)
class Session:
    """One connection: its peer's name, its unsent replies, and the claims that it holds.

    Attributes:
        leaving: no further message is handled, and the connection closes once ``replies`` are sent.
        stalls: whether it stalls, as last recorded; a new one does.
        num_announced: blocks that ``replies`` announce.
        claimed: its readers by request, until the lease ends.
    """

    name: str
    greeted: bool = False
    leaving: bool = False
    stalls: bool = True
    replies: list[FromLender] = field(default_factory=list)
    num_announced: int = 0
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
        reports: leases that ended, and requests that are followed, in order; the owner empties it.
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
        self._streams: StreamTable[Session] = StreamTable()
        self.reports: list[LenderReport] = []
        self.counts: Counter[str] = Counter()

    @property
    def num_lent(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def num_streams(self) -> int:
        """Streams that have not ended, and readers that wait for others."""
        return len(self._streams)

    @property
    def num_summed(self) -> int:
        """Leases whose checksums are stored, or for which a reader waits."""
        return len(self._checksums)

    def apply_command(self, command: EngineCommand, now: float) -> None:
        """Carry out a command of the engine."""
        if isinstance(command, LeaseOffer):
            self.counts["lent"] += 1
            self._leases.add_lease(command)
        elif isinstance(command, StreamCommand):
            self._apply_stream_command(command, now)
        elif isinstance(command, Abort):
            self._close_stream(command.request, RefusalReason.ABORTED)
            self._free(self._leases.abort_lease(command.request, now))
        elif isinstance(command, AbortUnclaimed):
            self._free(self._leases.abort_unclaimed(command.request, now))
        elif isinstance(command, AbortAll):
            for request in self._streams.growing():
                self._close_stream(request, RefusalReason.ABORTED)
            self._free(self._leases.abort_all(now))
        elif isinstance(command, RevokeAll):
            self._free(self._leases.revoke_all())
        elif self._is_summing and self._leases.is_lent(command.request):
            self._checksums.add_rank_sums(command)

    def _apply_stream_command(self, command: StreamCommand, now: float) -> None:
        """Open, grow or complete a stream, and have its readers hear of it."""
        if isinstance(command, StreamOffer):
            self._leases.add_lease(command.lease)
            self._open_stream(command, now)
        elif isinstance(command, StreamGrowth):
            for session, reply in self._streams.grow(command):
                self._reply_later(session, reply)
        elif self._leases.is_growing(command.offer.request):
            self.counts["lent"] += 1
            freed = self._leases.complete_lease(command.offer)
            for session, reply in self._streams.complete(command):
                self._reply_later(session, reply)
            self._free(freed)
        # A lease that has ended meanwhile is not lent again: the report of its end, which the
        # engine has not taken yet, frees all that it has pinned under this name.

    def _open_stream(self, offer: StreamOffer, now: float) -> None:
        """Open a stream, and let the readers that wait for it follow it."""
        self.counts["streams"] += 1
        for session, follow in self._streams.open_stream(offer):
            if not session.leaving:
                self._follow(session, follow, now)
                self._pending.append(session)
        for reader in self._streams.take_left(offer.stream):
            self._free(self._leases.leave_lease(offer.request, reader, now))

    def turn(self, now: float) -> Turn:
        """Free the leases that have expired, and make at most one checksum answer."""
        freed, wake_at = self._leases.free_expired(now), self._leases.next_expiry()
        if freed:
            self._free(freed)
        for session, follow in self._streams.take_overdue(now):
            detail = f"no request with this stream has arrived within {PARK_S:g} s"
            self._reply_later(session, self._refuse(follow, RefusalReason.UNKNOWN, detail))
        due = self._streams.next_deadline()
        wake_at = due if wake_at is None else min(wake_at, due)
        if self._is_summing:
            answer = self._checksums.make_answer()
            if answer is not None:
                self._reply_later(*answer)
            if self._checksums.has_work:
                wake_at = now
        pending, self._pending = self._pending, []
        return Turn(pending, wake_at)

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
        replies, session.replies, session.num_announced = session.replies, [], 0
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
            answer = self._renew(session, message, now)
            session.replies.append(_reply(message.seq, message.request, message.reader, answer))
        elif isinstance(message, Claim):
            self._claim(session, message, now)
        elif isinstance(message, Follow):
            self._follow(session, message, now)
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
        answer: lease.Grant | Denied | None = self._too_many_claims(session)
        if answer is None:
            answer = self._leases.claim_lease(message.request, message.reader, message.ticket, now)
        self._claimed(session, message.request, message.reader, answer)
        session.replies.append(_reply(message.seq, message.request, message.reader, answer))

    def _follow(self, session: Session, message: Follow, now: float) -> None:
        """Grant a claim on the lease that grows with a stream, or let the reader wait for it."""
        streams, reader = self._streams, message.reader
        # 1. The stream has ended, or the connection holds too many claims.
        why, denied = streams.why_ended(message.stream), self._too_many_claims(session)
        if why is not None:
            session.replies.append(self._refuse(message, why, "the stream has ended"))
            return
        if denied is not None:
            session.replies.append(self._refuse(message, denied.why, denied.detail))
            return
        # 2. Its request has not arrived.
        request = streams.request_of(message.stream)
        if request is None:
            if streams.park_reader(session, message, now):
                parked = Parked(message.seq, message.stream, reader.pull, int(PARK_S * 1000))
                session.replies.append(parked)
            else:
                detail = "too many readers wait for streams"
                session.replies.append(self._refuse(message, RefusalReason.TOO_MANY, detail))
            return
        # 3. Its request is being computed, or is lent.
        self.counts["follows"] += 1
        answer = self._leases.follow_lease(request, reader, now)
        self._claimed(session, request, reader, answer)
        reply = _reply(message.seq, request, reader, answer)
        if isinstance(answer, Denied):
            session.replies.append(reply)
            return
        opened, missed = streams.add_reader(session, reader, message.stream)
        session.replies += (opened, reply)
        for announced in missed:
            self._add_reply(session, announced)
        if streams.is_growing(request):
            self.reports.append(Followed(request))

    def _too_many_claims(self, session: Session) -> Denied | None:
        if session.num_claims < self._limits.claims:
            return None
        detail = f"this connection holds {self._limits.claims} claims"
        return Denied(RefusalReason.TOO_MANY, detail)

    def _refuse(self, message: Follow, why: RefusalReason, detail: str) -> Refused:
        self.counts[f"refused_{why}"] += 1
        return Refused(message.seq, message.stream, message.reader.pull, why, detail)

    def _claimed(
        self, session: Session, request: str, reader: Reader, answer: lease.Grant | Denied
    ) -> None:
        """Record a claim that was granted or denied."""
        if isinstance(answer, Denied):
            self.counts[f"refused_{answer.why}"] += 1
            return
        readers = session.claimed.setdefault(request, set())
        session.num_claims += reader not in readers
        readers.add(reader)
        self._claimants.setdefault(request, set()).add(session)

    def _close_stream(self, request: str, why: RefusalReason) -> None:
        """End a stream, and refuse the readers that follow it: its blocks will not be lent."""
        for session, reader in self._streams.close_stream(request, why):
            detail = "prefill has ended the request before it was computed"
            self._reply_later(session, Refused(0, request, reader.pull, why, detail))

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
            session.replies.append(_reply(message.seq, request, reader, denied))
        self._free(freed)

    def _done(self, session: Session, message: Done, now: float) -> None:
        """End a claim; one that holds ends by a message of its own session only."""
        # A reader that has not heard what request its stream is of names the stream; meanwhile it
        # may have been granted the request, and that aborted.
        reader, ended = message.reader, self._streams.request_of_ended(message.request)
        request = self._streams.request_of(message.request) or message.request
        if ended is not None and reader in session.claimed.get(ended, ()):
            request = ended
        if self._is_claimed_elsewhere(session, request, reader, now):
            self.counts["done_rejected"] += 1
            return
        self._streams.leave_stream(request, reader)
        is_ours = reader in session.claimed.get(request, ())
        self._drop_claim(session, request, reader)
        # A reader of a stream may not have heard of the ticket, or there will be none; it knows the
        # stream, or was granted the claim.
        if request != message.request or is_ours:
            self._free(self._leases.leave_lease(request, reader, now))
        else:
            self._free(self._leases.end_claim(request, reader, message.ticket, now))

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
            self.reports.append(ended)
            self._close_stream(ended.request, refusal_after(ended.why))
            if self._is_summing:
                for answer in self._checksums.forget_lease(ended.request):
                    self._reply_later(*answer)
            for session in self._claimants.pop(ended.request, ()):
                session.num_claims -= len(session.claimed.pop(ended.request, ()))

    def _reply_later(self, session: Session, reply: FromLender) -> None:
        if not session.leaving:
            self._add_reply(session, reply)
            self._pending.append(session)

    def _add_reply(self, session: Session, reply: FromLender) -> None:
        """Add a reply that may announce blocks; a session to which too many would be sent ends."""
        # Encoding is what takes memory, so the bound of what may wait is kept before it.
        session.replies.append(reply)
        session.num_announced += _num_announced(reply)
        most = self._limits.unsent_nbytes // _NBYTES_PER_BLOCK
        if session.num_announced > most:
            session.replies.clear()
            self._end(session, "blocks to announce", f"at most {most}", str(session.num_announced))


def _num_announced(reply: FromLender) -> int:
    if isinstance(reply, Grown):
        return sum(len(each.ids) for each in reply.blocks)
    return sum(len(ids) for _, ids in reply.blocks) if isinstance(reply, Completed) else 0


def _reply(
    seq: int, request: str, reader: Reader, answer: lease.Grant | Denied
) -> Granted | Refused:
    if isinstance(answer, Denied):
        return Refused(seq, request, reader.pull, answer.why, answer.detail)
    return Granted(seq, request, reader.pull, max(1, int(answer.ttl_s * 1000)))
