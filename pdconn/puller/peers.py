"""The lenders of a decode rank: one peer per lender boot, in one table.

``Rank`` describes our own memory, which is paired with that of a lender whose traits agree.

``PeerPull`` is what every pull from a peer has; its two kinds add what is pulled, and for whom.

``PeerTable`` dials and greets lenders, and sorts their messages.  Connections come from a
:class:`Dialer`; what happens to a peer is an event, and the table's owner takes them from
:attr:`PeerTable.events`::

    to, receive_from, send_to, close ──► PeerTable ──► PeerWelcomed, PeerReady,
    rank_connected                                     PeerReplied, PeerClosed

A ticket names the boot that it needs.  A warm-up has a host and a port only: the key of its peer
has no boot until the lender's Welcome names one, and then equals the key of a ticket.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from pdconn.integrity.checks import Checks
from pdconn.lifecycle.pace import LenderRates
from pdconn.lifecycle.peer import TRANSITIONS, PeerState
from pdconn.lifecycle.pull import Pull
from pdconn.lifecycle.turns import Urgency
from pdconn.planning.plan import NO_GAPS, Gaps, Pairing, Plan
from pdconn.planning.planning_errors import Incompatible, PlanningError
from pdconn.protocol.compat import trait_differences, traits_digest
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.errors import PeerMismatch, ProtocolError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    FromLender,
    FromReader,
    Hello,
    PullReply,
    Rejected,
    Welcome,
    decode_from_lender,
    encode_frames,
)
from pdconn.protocol.ticket import Ticket
from pdconn.puller.reads import Connect, Connected, Disconnect, Job
from pdconn.sidechannel.connection import SideChannelLost, Unauthenticated
from registration.references import KVCacheReferences
from transport import PeerId


@dataclass(frozen=True, slots=True)
class Rank:
    """Which decode rank this is, and what its memory looks like.

    ``rank`` of ``of`` ranks pull every request together; ``spread`` says which of a
    peer's replicas to prefer; ``traits`` must equal the lender's (:mod:`pdconn.protocol.compat`).
    """

    engine_id: str
    rank: int
    of: int
    spread: int
    references: KVCacheReferences
    traits: dict[str, str]

    def pair(self, welcome: Welcome) -> Pairing:
        """Pair our memory with that of a lender that has answered our greeting.

        Raises:
            Incompatible: naming the fields with both values, and our block content.
        """
        check_traits(self.traits, welcome)
        theirs = [rank.references for rank in welcome.ranks]
        try:
            return Pairing.between(self.references, theirs, self.spread)
        except Incompatible as error:
            content = self.traits.get("block_content", "")
            raise Incompatible(*error.differences, content=content) from None


def check_traits(ours: Mapping[str, str], welcome: Welcome) -> None:
    """Check that both sides interpret the bytes of a block alike.

    Nothing is compared if we have no traits.

    Raises:
        Incompatible: naming every trait that differs.
    """
    if ours and (differences := trait_differences(ours, welcome.traits)):
        raise Incompatible(*differences)


def check_welcome(welcome: Welcome, engine_id: str | None, incarnation: str | None) -> None:
    """Check that the lender is the one that a ticket names.

    Raises:
        PeerMismatch: another version, engine or boot, or traits of another digest.
    """
    for name, ours, theirs in (
        ("version", PROTOCOL_VERSION, welcome.version),
        ("engine_id", engine_id, welcome.engine_id),
        ("incarnation", incarnation, welcome.incarnation),
        ("digest", traits_digest(welcome.traits), welcome.digest),
    ):
        if ours != theirs:
            raise PeerMismatch(name, ours, theirs)


log = logging.getLogger(__name__)

MAX_PEERS = 1024
"""Lenders that are known at once; the one that has been idle for longest is closed for another."""


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One boot of one engine at one address; the boot may be unknown until its Welcome."""

    host: str
    port: int
    engine_id: str | None = None
    incarnation: str | None = None

    @classmethod
    def from_ticket(cls, ticket: Ticket | EarlyTicket) -> PeerKey:
        """The key of the lender that has issued ``ticket``, or will."""
        return cls(ticket.host, ticket.port, ticket.engine_id, ticket.incarnation)

    @property
    def names_a_boot(self) -> bool:
        """Whether the boot is known."""
        return self.incarnation is not None

    def __str__(self) -> str:
        return f"{self.engine_id or 'the lender'} at {self.host}:{self.port}"


class PeerConnection(Protocol):
    """A connection to a lender (:class:`pdconn.sidechannel.connection.Connection`)."""

    def send_frames(self, bodies: Sequence[bytes]) -> None:
        """Send frames; raises SideChannelLost."""

    def receive_frames(self) -> Sequence[bytes]:
        """Frames that have arrived; raises SideChannelLost."""

    def close(self) -> None:
        """Close it.  Idempotent."""


@dataclass(slots=True, eq=False)
class Peer:
    """A lender.  It has a connection from when it is dialled until it is closed.

    Attributes:
        welcome: its description of itself, of which ``pairing`` and, once needed, ``checks`` are
            made.
        ranks: its ranks that the transport is connected to; ``connecting`` more will be.
        pulls: those under way, by name.
        rates: what was learned of it.
        reason: why it was closed; ``untrusted``: it did not authenticate.
        retired: the pulls that use it go on, and no new ones do.
    """

    key: PeerKey
    state: PeerState = PeerState.UNKNOWN
    connection: PeerConnection | None = None
    welcome: Welcome | None = None
    pairing: Pairing | None = None
    checks: Checks | None = None
    ranks: dict[int, PeerId] = field(default_factory=dict)
    connecting: int = 0
    outgoing: list[FromReader] = field(default_factory=list)
    pulls: dict[str, PeerPull] = field(default_factory=dict)
    reason: str = ""
    untrusted: bool = False
    retired: bool = False
    rates: LenderRates = field(default_factory=LenderRates)

    @property
    def is_needed(self) -> bool:
        """Whether a request's pull uses it."""
        return any(pull.is_requested for pull in self.pulls.values())

    def enter(self, event: str) -> None:
        """Change the state by ``event``; ValueError where :mod:`pdconn.lifecycle.peer` has none."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise ValueError(f"a {self.state} peer cannot be {event}") from None


@dataclass(slots=True, eq=False, kw_only=True)
class PeerPull(ABC):
    """A pull from a peer: its machine, and what is in flight for it.

    Attributes:
        pull: its name, which no other pull of this rank has.
        plan: or why there is none.
        gaps: what the plan leaves of our blocks.
        reading: reads that have not settled.
        alarm: when the machine is ticked, at the latest.
        urgency, tenant: of its reads.
        is_requested: whether it is a request's.  Then its failure is counted, and may close
            the peer, which is kept until its reads have settled.
    """

    is_requested: ClassVar[bool]

    pull: str
    machine: Pull
    peer: Peer
    plan: Plan | str | None = None
    gaps: Gaps = NO_GAPS
    reading: int = 0
    alarm: float | None = None
    urgency: Urgency = Urgency.PULL
    tenant: bytes = b""

    @property
    def is_written(self) -> bool:
        """Whether something can write to its blocks."""
        return self.reading > 0

    @abstractmethod
    def make_plan(self, clock: Callable[[], float]) -> None:
        """Plan the reads; what is wrong with them is kept instead."""


class Dialer(Protocol):
    """Opens connections."""

    def dial(self, peer: Peer) -> None:
        """Give ``peer`` its connection, now or later, or close the peer later.

        Raises:
            OSError: it fails at once.
        """


@dataclass(frozen=True, slots=True)
class PeerWelcomed:
    """The peer has answered our greeting; its ranks are being connected."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The transport is connected to every rank that we read from."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerReplied:
    """The peer has answered a claim, a renewal or a checksum request."""

    peer: Peer
    message: PullReply


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The peer's connection is closed, for ``peer.reason``."""

    peer: Peer


PeerEvent = PeerWelcomed | PeerReady | PeerReplied | PeerClosed


class PeerTable:
    """Every peer of one decode rank.

    Args:
        engine_id: ours.
        pair: makes a pairing from a checked Welcome, or raises PlanningError.
        post: passes a job to the transport.
        dialer: opens connections.
        max_peers: lenders that are known at once.

    Attributes:
        events: of peers, oldest first, for the owner to take; any call may add some.
        unsent: peers with outgoing messages.
    """

    def __init__(
        self,
        engine_id: str,
        pair: Callable[[Welcome], Pairing],
        post: Callable[[Job], None],
        dialer: Dialer,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self._engine_id = engine_id
        self._pair = pair
        self._post = post
        self._dialer = dialer
        self._max_peers = max_peers
        self._peers: OrderedDict[PeerKey, Peer] = OrderedDict()
        self._retired: dict[Peer, None] = {}
        self.events: deque[PeerEvent] = deque()
        self.unsent: dict[Peer, None] = {}

    def __len__(self) -> int:
        return len(self._peers) + len(self._retired)

    def __iter__(self) -> Iterator[Peer]:
        yield from list(self._peers.values())
        yield from list(self._retired)

    def find_peer(self, key: PeerKey) -> Peer | None:
        """The open peer at ``key``; None if there is none."""
        peer = self._peers.get(key)
        return None if peer is None or peer.state is PeerState.CLOSED else peer

    def to(self, key: PeerKey, may_evict: bool = True) -> Peer:
        """The open peer at ``key``, dialled if there is none; CLOSED if that fails at once.

        When the table is full, an idle peer is closed for it, unless ``may_evict`` is false.
        """
        peer = self._peers.get(key)
        if peer is not None and peer.state is not PeerState.CLOSED:
            self._peers.move_to_end(key)
            return peer
        peer = Peer(key)
        peer.enter("dialled")
        if not self._has_room(may_evict):
            used = "in use" if may_evict else "known"
            self.close(peer, f"{self._max_peers} lenders are {used}")
            return peer
        self._peers[key] = peer
        try:
            self._dialer.dial(peer)
        except OSError as error:
            self.close(peer, f"side channel: {error}")
        else:
            hello = Hello(PROTOCOL_VERSION, self._engine_id, key.incarnation)
            self.queue_messages(peer, [hello])
        return peer

    def to_place(self, host: str, port: int) -> Peer:
        """The peer that has answered at ``host:port``, or a new one that greets any boot there.

        No other peer is closed for it.
        """
        for peer in reversed(self._peers.values()):
            is_there = (peer.key.host, peer.key.port) == (host, port)
            if is_there and peer.welcome is not None and peer.state is not PeerState.CLOSED:
                return peer
        return self.to(PeerKey(host, port), may_evict=False)

    def receive_from(self, peer: Peer) -> None:
        """Handle the messages that have arrived from the peer."""
        try:
            for body in () if peer.connection is None else peer.connection.receive_frames():
                for message in decode_from_lender(body):
                    if peer.state is not PeerState.CLOSED:
                        self._hear(peer, message)
        except SideChannelLost as error:
            self._lost(peer, error)
        except (ProtocolError, PlanningError) as error:
            self.close(peer, str(error))

    def queue_messages(self, peer: Peer, messages: Iterable[FromReader]) -> None:
        """Have ``messages`` sent by the next flush; nothing is said to a closed peer."""
        if peer.state is not PeerState.CLOSED:
            peer.outgoing += messages
            self.unsent[peer] = None

    def send_to(self, peer: Peer) -> None:
        """Send the peer's outgoing messages; before it is READY, only our Hello."""
        if peer.connection is None:
            return
        bodies = []
        outgoing = peer.outgoing
        if outgoing and (peer.state is PeerState.READY or isinstance(outgoing[0], Hello)):
            peer.outgoing = []
            self.unsent.pop(peer, None)
            bodies = encode_frames(outgoing)
        try:
            peer.connection.send_frames(bodies)
        except SideChannelLost as error:
            self._lost(peer, error)

    def send_to_all(self) -> None:
        """Send the outgoing messages of every peer."""
        for peer in list(self.unsent):
            self.send_to(peer)

    def rank_connected(self, answer: Connected) -> None:
        """The transport has connected to a peer's rank, or has failed to."""
        tag = answer.tag
        assert isinstance(tag, tuple)
        peer, rank = tag
        if peer.state is PeerState.CLOSED:
            if answer.peer is not None:
                self._post(Disconnect(answer.peer))
            return
        if answer.peer is None:
            self.close(peer, f"rank {rank} cannot be reached: {answer.error}")
            return
        peer.ranks[rank] = answer.peer
        peer.connecting -= 1
        if peer.connecting == 0:
            self._ready(peer)

    def close(self, peer: Peer, reason: str) -> None:
        """Close the peer's connection.  Reads in flight go on to their end."""
        if peer.state is PeerState.CLOSED:
            return
        log.log(_level(peer), "pdconn: no longer reading from %s: %s", peer.key, reason)
        peer.enter("closed")
        peer.reason = reason
        peer.outgoing.clear()
        self.unsent.pop(peer, None)
        if peer.connection is not None:
            peer.connection.close()
            peer.connection = None
        self.events.append(PeerClosed(peer))

    def retire(self, peer: Peer, reason: str) -> None:
        """Let the next pull dial again: this connection may lose messages."""
        if peer.state is PeerState.CLOSED or peer.retired:
            return
        log.warning("pdconn: connecting again to %s: %s", peer.key, reason)
        peer.retired = True
        del self._peers[peer.key]
        self._retired[peer] = None

    def compare_anew(self, pair: Callable[[Welcome], Pairing]) -> None:
        """Let the next pulls greet every lender again, and pair them by ``pair``."""
        self._pair = pair
        for peer in list(self._peers.values()):
            self.retire(peer, "our weights have changed")

    def forget_peer(self, peer: Peer) -> None:
        """Drop a closed peer.  No read from it may be in flight."""
        for connected in peer.ranks.values():
            self._post(Disconnect(connected))
        peer.ranks.clear()
        self._retired.pop(peer, None)
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]

    def close_all(self) -> None:
        """Close every connection."""
        for peer in self:
            if peer.connection is not None:
                peer.connection.close()

    def _lost(self, peer: Peer, error: SideChannelLost) -> None:
        peer.untrusted = isinstance(error, Unauthenticated)
        self.close(peer, f"side channel: {error}")

    def _has_room(self, may_evict: bool) -> bool:
        if len(self._peers) < self._max_peers:
            return True
        idle = next((peer for peer in self._peers.values() if not peer.is_needed), None)
        if idle is None or not may_evict:
            return False
        self.send_to(idle)
        self.close(idle, "idle, and another lender needs the room")
        del self._peers[idle.key]
        return True

    def _hear(self, peer: Peer, message: FromLender) -> None:
        if isinstance(message, PullReply):
            self.events.append(PeerReplied(peer, message))
        elif isinstance(message, Rejected):
            self.close(peer, f"{message.field}: theirs {message.expected}, ours {message.seen}")
        elif isinstance(message, Welcome) and peer.pairing is None:
            self._welcomed(peer, message)

    def _welcomed(self, peer: Peer, welcome: Welcome) -> None:
        if not peer.key.names_a_boot and not self._name(peer, welcome):
            return
        check_welcome(welcome, peer.key.engine_id, peer.key.incarnation)
        peer.pairing = self._pair(welcome)
        peer.welcome = welcome
        peer.connecting = len(peer.pairing.ranks)
        self.events.append(PeerWelcomed(peer))
        for rank in peer.pairing.ranks:
            self._post(Connect((peer, rank), welcome.ranks[rank].address))
        if not peer.pairing.ranks:  # a stage of ours without layers reads from no rank
            self._ready(peer)

    def _name(self, peer: Peer, welcome: Welcome) -> bool:
        """Give the peer the key that tickets of this boot have; whether it stays open."""
        del self._peers[peer.key]
        peer.key = replace(peer.key, engine_id=welcome.engine_id, incarnation=welcome.incarnation)
        if welcome.engine_id == self._engine_id:
            self.close(peer, "it is this engine")
            return False
        other = self.find_peer(peer.key)
        if other is not None and (other.welcome is not None or other.pulls):
            self.close(peer, "a pull is connected to it already")
            return False
        self._peers[peer.key] = peer
        if other is not None:
            # Its pulls were cancelled while it greeted, and only pulls give up a lost greeting.
            left = [message for message in other.outgoing if not isinstance(message, Hello)]
            self.close(other, "another connection was greeted first")
            self.queue_messages(peer, left)
        return True

    def _ready(self, peer: Peer) -> None:
        peer.enter("welcomed")
        log.info("pdconn: ready to read from %s", peer.key)
        self.events.append(PeerReady(peer))


def _level(closing: Peer) -> int:
    """WARNING if requests depend on the peer, INFO if it was ready, else DEBUG."""
    if closing.is_needed:
        return logging.WARNING
    return logging.INFO if closing.state is PeerState.READY else logging.DEBUG
