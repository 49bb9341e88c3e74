"""Verification: compares the lender's checksums of what it lent with ours of what arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdconn.integrity.checks import Checks, Corrupted, Expected
from pdconn.integrity.sums import Terms
from pdconn.lifecycle.peer import PeerState
from pdconn.planning.plan import Need
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import ChecksumRequest, Reader
from pdconn.protocol.proof import NOTHING, PieceSum
from pdconn.protocol.ticket import Ticket
from pdconn.puller.peers import Peer, Rank


class Verify(StrEnum):
    """How much of what was read is compared with what was lent."""

    OFF = "off"
    SAMPLE = "sample"
    ALWAYS = "always"


class CannotVerify(Exception):
    """There are no checksums to compare; the text is the reason."""


@dataclass(slots=True)
class Verification:
    """The checksums of one pull, as they become known.

    Requests to the lender are numbered in order of ``expected`` and of their ``asks``.
    """

    expected: tuple[Expected, ...]
    theirs: dict[int, PieceSum] = field(default_factory=dict)
    ours: tuple[PieceSum, ...] | None = None

    def heard(self, number: int, answer: PieceSum) -> None:
        """Add the lender's answer to request ``number``.

        Raises:
            MessageError: there is no such request, or it was answered before.
        """
        if not 0 <= number < self._num_asks or number in self.theirs:
            raise MessageError("checksum.number", f"one of {self._num_asks}, once", number)
        self.theirs[number] = answer

    def requests(self, request: str, reader: Reader) -> list[ChecksumRequest]:
        """The requests to send to the lender."""
        asks = [ask for expected in self.expected for ask in expected.asks]
        return [ChecksumRequest(number, request, reader, ask) for number, ask in enumerate(asks)]

    @property
    def is_answered(self) -> bool:
        """Whether the lender has answered every request."""
        return len(self.theirs) == self._num_asks

    @property
    def is_complete(self) -> bool:
        """Whether both sides' checksums are known."""
        return self.ours is not None and self.is_answered

    def problem(self) -> str | None:
        """How the two sides differ, or None.  Only when complete."""
        assert self.ours is not None
        number = 0
        for expected, ours in zip(self.expected, self.ours, strict=True):
            answers = [self.theirs[number + at] for at in range(len(expected.asks))]
            number += len(answers)
            try:
                expected.compare(sum(answers, NOTHING), ours)
            except (Corrupted, MessageError) as error:
                return f"{type(error).__name__}: {error}"
        return None

    @property
    def _num_asks(self) -> int:
        return sum(len(expected.asks) for expected in self.expected)


class Verifier:
    """Decides what is compared for each pull of one rank.

    Args:
        me: the rank whose memory is summed.
        verify: how much of it.
    """

    def __init__(self, me: Rank, verify: Verify) -> None:
        self._me = me
        self._verify = verify
        self.is_on = verify is not Verify.OFF

    def begin_check(self, peer: Peer, ticket: Ticket, need: Need) -> Verification:
        """What both sides sum of a pull that has been read.

        Raises:
            CannotVerify: the lender's connection is closed.
        """
        if peer.state is PeerState.CLOSED:
            raise CannotVerify(f"{peer.key}: {peer.reason}")
        terms = Terms(ticket.request_id, ticket.num_tokens, self._verify is Verify.SAMPLE)
        return Verification(self._checks_of(peer).expect(need, terms))

    def _checks_of(self, peer: Peer) -> Checks:
        assert peer.welcome is not None
        if peer.checks is None:
            theirs = [rank.references for rank in peer.welcome.ranks]
            peer.checks = Checks.between(self._me.references, theirs, self._me.spread)
        return peer.checks
