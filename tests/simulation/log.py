"""A log of one rank's messages and reads, kept beside its machines.

::

    rank ── claim, renew ──► TappedConnection ──► lender
         ◄── granted ───────     │
    reads settle ──────────► ReaderLog ──► how long a claim held, what was believed too late

Law 4 is checked against this: a deadline is made of frames and of the clock alone, so that a
machine which counts wrongly cannot hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdconn.protocol.messages import (
    Claim,
    Follow,
    Granted,
    Renew,
    decode_from_lender,
    decode_from_reader,
)
from pdconn.puller.peers import PeerConnection


@dataclass
class ReaderLog:
    """Times in virtual seconds, by pull id, which in the simulation is the request's name.

    Attributes:
        deadlines: time of sending the granted claim or renewal that holds longest + its ttl.
        too_late: what was reported received, though its claim was over by the rank's own clock.
        not_lent: what was reported received, though its lender had given the blocks back.
        read_on: pulls of which a read was posted after another was known to have failed.
    """

    deadlines: dict[str, float] = field(default_factory=dict)
    not_lent: list[str] = field(default_factory=list)
    too_late: list[str] = field(default_factory=list)
    read_on: list[str] = field(default_factory=list)
    _broken: set[str] = field(default_factory=set)
    _sent: dict[tuple[str, int], float] = field(default_factory=dict)
    _settled: dict[str, tuple[float, float]] = field(default_factory=dict)

    def sent(self, body: bytes, now: float) -> None:
        """A frame was sent."""
        for message in decode_from_reader(body):
            if isinstance(message, Claim | Follow | Renew):
                self._sent.setdefault((message.reader.pull, message.seq), now)

    def arrived(self, body: bytes) -> None:
        """A frame arrived, perhaps late."""
        for message in decode_from_lender(body):
            if isinstance(message, Granted):
                until = self._sent[message.pull, message.seq] + message.ttl_ms / 1000
                self.deadlines[message.pull] = max(until, self.deadlines.get(message.pull, until))

    def posted(self, pull: str) -> None:
        """A read is posted."""
        if pull in self._broken:
            self.read_on.append(pull)

    def heard_of_error(self, pull: str) -> None:
        """The rank knows that a read has failed."""
        self._broken.add(pull)

    def settled(self, pull: str, now: float, true: float) -> None:
        """A read has settled, by the rank's clock and in truth; the last one counts."""
        self._settled[pull] = now, true

    def received(self, pull: str, freed: float) -> None:
        """The rank reports that it has everything; it was lent until the true time ``freed``."""
        (settled, true), deadline = self._settled[pull], self.deadlines[pull]
        if not self.is_early(settled, deadline):
            late_s = settled - deadline
            self.too_late.append(f"{pull} settled {late_s:.4f} s after its claim was over")
        if true > freed:
            self.not_lent.append(f"{pull} settled {true - freed:.4f} s after its lease was freed")

    @staticmethod
    def is_early(settled: float, deadline: float) -> bool:
        return settled < deadline


@dataclass
class TappedConnection:
    """The rank's end of a connection, with its log listening."""

    connection: PeerConnection
    log: ReaderLog
    clock: Callable[[], float]

    def send_frames(self, bodies: Sequence[bytes]) -> None:
        """As ``PeerConnection.send_frames``."""
        frames = list(bodies)
        for body in frames:
            self.log.sent(body, self.clock())
        self.connection.send_frames(frames)

    def receive_frames(self) -> Sequence[bytes]:
        """As ``PeerConnection.receive_frames``."""
        frames = self.connection.receive_frames()
        for body in frames:
            self.log.arrived(body)
        return frames

    def close(self) -> None:
        """As ``PeerConnection.close``."""
        self.connection.close()
