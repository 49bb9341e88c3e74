"""Proving what was read: the lender says what it lent while our reader sums what we hold."""

from __future__ import annotations

from collections.abc import Callable

from pdconn.integrity.reader import Checks
from pdconn.integrity.sums import Terms
from pdconn.protocol.messages import Checksum, FromReader
from pdconn.puller.entries import Entry
from pdconn.puller.jobs import Job, Sum, Summed
from pdconn.puller.peers import Peer
from pdconn.puller.proving import Verification, Verify
from pdconn.puller.rank import Rank


class CannotVerify(Exception):
    """There will be no proof, and the text says why."""


class Verifier:
    """Proofs of one rank's pulls.

    Args:
        me: whose memory is summed.
        verify: how much of it.
        post: gives a sum to whoever reads.
        say: gives a message to an entry's lender.
    """

    def __init__(
        self,
        me: Rank,
        verify: Verify,
        post: Callable[[Job], None],
        say: Callable[[Entry, FromReader], None],
    ) -> None:
        self._me = me
        self._verify = verify
        self._post = post
        self._say = say

    @property
    def is_on(self) -> bool:
        """Whether anything is to be proven."""
        return self._verify is not Verify.OFF

    def ask(self, entry: Entry) -> None:
        """Have both sides sum what was read for ``entry``.

        Raises:
            Unprovable: its lender is gone.
        """
        need, ticket = entry.need, entry.ticket
        assert need is not None
        if entry.peer.is_closed:
            raise CannotVerify(f"{entry.peer.key}: {entry.peer.reason}")
        terms = Terms(ticket.request_id, ticket.num_tokens, self._verify is Verify.SAMPLE)
        expected = self._checks_of(entry.peer).expect(need, terms)
        entry.proof = Verification(expected)
        for prove in entry.proof.asks(ticket.request_id, entry.reader):
            self._say(entry, prove)
        self._post(Sum(entry, expected))

    def summed(self, entry: Entry, ours: Summed) -> None:
        """Our side is known.

        Raises:
            Unprovable: it could not be summed.
        """
        assert entry.proof is not None
        if ours.error is not None:
            raise CannotVerify(f"no checksum of ours: {ours.error}")
        entry.proof.ours = ours.answers

    def heard(self, entry: Entry, said: Checksum) -> bool:
        """The lender has told something; whether that was all.

        Raises:
            MessageError: nobody asked that.
        """
        if entry.proof is None:
            return False
        entry.proof.heard(said.number, said.answer)
        return entry.proof.is_answered

    def _checks_of(self, peer: Peer) -> Checks:
        assert peer.welcome is not None
        if peer.checks is None:
            theirs = [rank.references for rank in peer.welcome.ranks]
            peer.checks = Checks.of(self._me.references, theirs, self._me.spread)
        return peer.checks
