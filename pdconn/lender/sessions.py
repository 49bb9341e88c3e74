"""The lender without its sockets: who has come, what they may hear, what is lent.

::

    engine ── lend, abort ──►  ┌──────┐ ◄── hear(visitor, message)
           ◄── freed ────────  │ Desk │ ──► visitor.answers
                               └──────┘

Nothing here waits or looks at a clock, so that a simulation can serve a thousand
visitors in virtual time with the very code that serves real ones.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdconn.integrity.lent import LentSums
from pdconn.lender.checksums import ChecksumResponder
from pdconn.lifecycle import lease
from pdconn.lifecycle.lease import Denied
from pdconn.lifecycle.lease_table import FreedLease, LeaseTable
from pdconn.protocol.errors import MessageError, ProtocolError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    ChecksumRequest,
    ChecksumUnavailable,
    Claim,
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

MAX_CLAIMS = 1 << 14
"""Claims that one visitor may hold."""

_MAX_SHOWN = 256


@dataclass(slots=True, eq=False)
class Session:
    """A connection: who it is once it has greeted, and what it is still to hear.

    ``claimed`` are its readers by request, until the lease ends.
    ``leaving``: nothing more is heard from it, and it is closed once it heard the rest.
    """

    name: str
    greeted: bool = False
    leaving: bool = False
    answers: list[FromLender] = field(default_factory=list)
    claimed: dict[str, set[Reader]] = field(default_factory=dict)
    num_claims: int = 0


class LenderSessions:
    """Leases of one lender, and the visitors that ask for them.

    Args:
        welcome: our geometry; its incarnation is what visitors must want.
        is_summing: whether checksums of what is lent will be added.
        warn: logs what visitors do wrong, as ``Logger.warning``.
    """

    def __init__(
        self,
        welcome: Welcome,
        is_summing: bool = False,
        warn: Callable[..., None] = log.warning,
    ) -> None:
        self._warn = warn
        self._welcome = welcome
        self._described = Described.of(welcome)
        # What is said to everybody is encoded once.
        self._frames = {id(said): encode([said]) for said in (welcome, self._described)}
        self._book = LeaseTable()
        self._proofs: ChecksumResponder[Session] = ChecksumResponder(len(welcome.ranks), is_summing)
        self._claimants: dict[str, set[Session]] = {}
        self._told: list[Session] = []
        self.freed: deque[FreedLease] = deque()
        self.counts: Counter[str] = Counter()

    @property
    def num_lent(self) -> int:
        """Leases that have not ended."""
        return len(self._book)

    @property
    def num_summed(self) -> int:
        """Leases whose checksums are kept, or waited for."""
        return len(self._proofs)

    def lend(self, request: str, ticket: bytes, ttl_s: float, now: float) -> None:
        """What a ticket with digest ``ticket`` names stays as it is until it is in ``freed``."""
        self.counts["lent"] += 1
        self._book.lend(request, ticket, ttl_s, now)

    def add_sums(self, request: str, rank: int, sums: LentSums | None) -> None:
        """Checksums of what ``request`` lends."""
        if self._book.is_lent(request):
            self._proofs.add(request, rank, sums)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return self._proofs.has_work

    def work(self) -> None:
        """Do one piece of what takes longer, if there is any."""
        made = self._proofs.work()
        if made is not None:
            self._tell(*made)

    def take_told(self) -> list[Session]:
        """Visitors with an answer to hear that they did not ask for just now."""
        told, self._told = self._told, []
        return told

    def abort(self, request: str, now: float) -> None:
        """Take the blocks back as soon as no granted claim can be believed."""
        self._note(self._book.abort(request, now))

    def tick(self, now: float) -> None:
        """Time passed."""
        self._note(self._book.tick(now))

    def next_deadline(self) -> float | None:
        """When ``tick`` should run next, or None when nothing is lent."""
        return self._book.next_deadline()

    def hear(self, visitor: Session, messages: list[FromReader], now: float) -> None:
        """Heed what a visitor said; what is wrong is answered, and ends its visit."""
        try:
            for message in messages:
                if not visitor.leaving:
                    self._heed(visitor, message, now)
        except ProtocolError as error:
            self.reject(visitor, error)

    def reject(self, visitor: Session, error: ProtocolError) -> None:
        """Tell a visitor what was wrong, as its last answer."""
        self.counts["bad_messages"] += 1
        self._warn("side channel: %s said something wrong: %s", visitor.name, error)
        self._send_away(visitor, error.field, str(error.expected), str(error.seen))

    def take_frames(self, visitor: Session) -> list[bytes]:
        """What the visitor is to hear now, as frame bodies."""
        if not visitor.answers:
            return []
        answers, visitor.answers = visitor.answers, []
        if not any(id(answer) in self._frames for answer in answers):
            return encode_frames(answers)
        return [self._frames.get(id(answer)) or encode([answer]) for answer in answers]

    def _heed(self, visitor: Session, message: FromReader, now: float) -> None:
        if isinstance(message, Hello):
            self._greet(visitor, message)
        elif isinstance(message, Describe):
            self.counts["described"] += 1
            visitor.answers.append(self._described)
            visitor.leaving = True
        elif not visitor.greeted:
            raise MessageError("first message", "hello", type(message).__name__.lower())
        elif isinstance(message, Renew):
            self.counts["renewals"] += 1
            visitor.answers.append(_reply(message, self._renewed(visitor, message, now)))
        elif isinstance(message, Claim):
            self._claim(visitor, message, now)
        elif isinstance(message, Done):
            self._done(visitor, message, now)
        else:
            self._prove(visitor, message)

    def _claim(self, visitor: Session, message: Claim, now: float) -> None:
        self.counts["claims"] += 1
        answer: lease.Grant | Denied
        if visitor.num_claims >= MAX_CLAIMS:
            answer = Denied(
                RefusalReason.TOO_MANY, f"{MAX_CLAIMS} claims are held by this connection"
            )
        else:
            answer = self._book.claim(message.request, message.reader, message.ticket, now)
        if isinstance(answer, Denied):
            self.counts[f"refused_{answer.why}"] += 1
        else:
            readers = visitor.claimed.setdefault(message.request, set())
            visitor.num_claims += message.reader not in readers
            readers.add(message.reader)
            self._claimants.setdefault(message.request, set()).add(visitor)
        visitor.answers.append(_reply(message, answer))

    def _renewed(self, visitor: Session, message: Renew, now: float) -> lease.Grant | Denied:
        """Only who claimed may prolong a claim, too."""
        if message.reader in visitor.claimed.get(message.request, ()):
            return self._book.renew(message.request, message.reader, now)
        if self._book.is_claimed(message.request, message.reader, now):
            return Denied(RefusalReason.BAD_READER, "another connection holds this claim")
        return self._book.renew(message.request, message.reader, now)

    def _prove(self, visitor: Session, message: ChecksumRequest) -> None:
        """Only who holds a claim learns anything about the content of what is lent."""
        self.counts["proofs"] += 1
        if message.reader not in visitor.claimed.get(message.request, ()):
            detail = "no claim of this connection holds it"
            visitor.answers.append(ChecksumUnavailable(message.number, message.reader.pull, detail))
            return
        answer = self._proofs.ask(visitor, message)
        if answer is not None:
            visitor.answers.append(answer)

    def _done(self, visitor: Session, message: Done, now: float) -> None:
        """Only who claimed may end a claim that holds; others could be a mistake or a lie."""
        ours = visitor.claimed.get(message.request, set())
        if message.reader not in ours and self._book.is_claimed(
            message.request, message.reader, now
        ):
            self.counts["dones_of_others"] += 1
            return
        visitor.num_claims -= message.reader in ours
        ours.discard(message.reader)
        self._note(self._book.done(message.request, message.reader, message.ticket, now))

    def _greet(self, visitor: Session, hello: Hello) -> None:
        if visitor.greeted:
            self._send_away(visitor, "hello", "one on a connection", "another")
        elif hello.version != PROTOCOL_VERSION:
            self._send_away(visitor, "version", str(PROTOCOL_VERSION), str(hello.version))
        elif hello.wants not in (None, self._welcome.incarnation):
            self._send_away(visitor, "incarnation", self._welcome.incarnation, str(hello.wants))
        else:
            self.counts["greeted"] += 1
            visitor.greeted = True
            visitor.name = f"{hello.engine_id} at {visitor.name}"
            visitor.answers.append(self._welcome)

    def _send_away(self, visitor: Session, field: str, expected: str, seen: str) -> None:
        self.counts["rejected"] += 1
        visitor.answers.append(Rejected(field, expected[:_MAX_SHOWN], seen[:_MAX_SHOWN]))
        visitor.leaving = True

    def _note(self, freed: list[FreedLease]) -> None:
        for ended in freed:
            self.counts[f"freed_{ended.why}"] += 1
            self.freed.append(ended)
            for answer in self._proofs.forget(ended.request):
                self._tell(*answer)
            for visitor in self._claimants.pop(ended.request, ()):
                visitor.num_claims -= len(visitor.claimed.pop(ended.request, ()))

    def _tell(self, visitor: Session, answer: FromLender) -> None:
        visitor.answers.append(answer)
        self._told.append(visitor)


def _reply(message: Claim | Renew, answer: lease.Grant | Denied) -> Granted | Refused:
    pull = message.reader.pull
    if isinstance(answer, Denied):
        return Refused(message.seq, message.request, pull, answer.why, answer.detail)
    return Granted(message.seq, message.request, pull, max(1, int(answer.ttl_s * 1000)))
