"""A lender as a decode rank knows it, and who else has to do with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdconn.integrity.reader import Checks
from pdconn.lifecycle.peer import PeerState, after
from pdconn.planning.plan import Pairing
from pdconn.protocol.messages import (
    Checksum,
    ChecksumUnavailable,
    Described,
    FromReader,
    Granted,
    Refused,
    Welcome,
)
from pdconn.protocol.ticket import Ticket
from transport import PeerId

AboutPull = Granted | Refused | Checksum | ChecksumUnavailable
"""What a lender says to one pull."""


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One boot of one engine at one address."""

    host: str
    port: int
    engine_id: str
    incarnation: str

    @classmethod
    def of(cls, ticket: Ticket) -> PeerKey:
        """Who a ticket is from."""
        return cls(ticket.host, ticket.port, ticket.engine_id, ticket.incarnation)

    def __str__(self) -> str:
        return f"{self.engine_id} at {self.host}:{self.port}"


class PeerWire(Protocol):
    """A connection to a lender, as :class:`pdconn.sidechannel.connection.Connection` is one."""

    def send(self, bodies: Iterable[bytes]) -> None:
        """Send frames; raises SideChannelLost."""

    def receive(self) -> Sequence[bytes]:
        """Frames that arrived; raises SideChannelLost."""

    def close(self) -> None:
        """Harmless when closed."""


@dataclass(slots=True, eq=False)
class Peer:
    """A lender.  It has a wire from when it is dialled until it is closed.

    ``welcome`` is what it said, ``pairing`` and, once they are needed, ``checks`` are made of
    it; ``ranks`` are its ranks that the transport reaches, ``pulls`` the requests that
    use it, ``reason`` why it was closed, ``untrusted`` whether that was because it did not
    prove itself.  A ``retired`` peer serves those to their end, and
    nobody new.
    """

    key: PeerKey
    state: PeerState = PeerState.UNKNOWN
    wire: PeerWire | None = None
    welcome: Welcome | None = None
    pairing: Pairing | None = None
    checks: Checks | None = None
    ranks: dict[int, PeerId] = field(default_factory=dict)
    connecting: int = 0
    outgoing: list[FromReader] = field(default_factory=list)
    pulls: dict[str, None] = field(default_factory=dict)
    reason: str = ""
    untrusted: bool = False
    retired: bool = False

    def enter(self, event: str) -> None:
        """Move on; see :mod:`pdconn.lifecycle.peer`."""
        self.state = after(self.state, event)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be said to it any more."""
        return self.state is PeerState.CLOSED


class Dialer(Protocol):
    """Opens wires."""

    def dial(self, peer: Peer) -> None:
        """Give ``peer`` its wire, now or later; or close the peer later.

        Raises:
            OSError: that is impossible, and known at once.
        """


class Listener(Protocol):
    """What the pulls want to hear."""

    def peer_described(self, peer: Peer, said: Described) -> None:
        """The peer was asked who it is, and says so."""

    def peer_welcomed(self, peer: Peer) -> None:
        """The peer has answered our greeting; its ranks are being connected."""

    def peer_ready(self, peer: Peer) -> None:
        """Every rank that we need is connected."""

    def peer_closed(self, peer: Peer) -> None:
        """The peer is of no use any more; ``peer.reason`` says why."""

    def heard(self, peer: Peer, message: AboutPull) -> None:
        """An answer to a claim, a renewal, or an ask for proof."""
