"""A decode rank's connections to lenders: one peer per lender boot.

``Connections`` dials, greets, sends and receives; what a message means for a pull
is the puller's business, which it hears through :class:`Listener`.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdconn.lifecycle.peer import PeerState, after
from pdconn.planning.errors import Incompatible, PlanningError
from pdconn.planning.plan import Pairing
from pdconn.protocol.compat import trait_differences, traits_digest
from pdconn.protocol.errors import PeerMismatch, ProtocolError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    FromLender,
    FromReader,
    Granted,
    Hello,
    Refused,
    Rejected,
    Welcome,
    decode_from_lender,
    encode,
)
from pdconn.protocol.ticket import Ticket
from pdconn.runtime.channel import Channel, ChannelLost
from pdconn.runtime.reader import Connect, Connected, Disconnect, ReaderThread
from transport import PeerId

log = logging.getLogger(__name__)

MAX_WELCOME = 1 << 26


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


@dataclass(slots=True, eq=False)
class Peer:
    """A lender.  It has a channel while GREETING or READY, a pairing once welcomed.

    ``ranks`` are its ranks that the transport reaches, ``pulls`` the requests that
    use it, ``reason`` why it was closed.
    """

    key: PeerKey
    state: PeerState = PeerState.UNKNOWN
    channel: Channel | None = None
    pairing: Pairing | None = None
    ranks: dict[int, PeerId] = field(default_factory=dict)
    connecting: int = 0
    outgoing: list[FromReader] = field(default_factory=list)
    pulls: set[str] = field(default_factory=set)
    reason: str = ""

    def enter(self, event: str) -> None:
        """Move on; see :mod:`pdconn.lifecycle.peer`."""
        self.state = after(self.state, event)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be said to it any more."""
        return self.state is PeerState.CLOSED


class Listener(Protocol):
    """What the puller wants to hear."""

    def peer_ready(self, peer: Peer) -> None:
        """Every rank that we need is connected."""

    def peer_closed(self, peer: Peer) -> None:
        """The peer is of no use any more; ``peer.reason`` says why."""

    def heard(self, peer: Peer, message: Granted | Refused) -> None:
        """An answer to a claim or renewal."""


class Connections:
    """Every peer of one decode rank, and their sockets.

    Args:
        engine_id: what we call ourselves.
        pair: makes a pairing of a checked greeting, or raises PlanningError.
        reader: connects the transport to a peer's ranks.
    """

    def __init__(
        self,
        engine_id: str,
        pair: Callable[[Welcome], Pairing],
        reader: ReaderThread,
        selector: selectors.BaseSelector,
        listener: Listener,
    ) -> None:
        self._engine_id = engine_id
        self._pair = pair
        self._reader = reader
        self._selector = selector
        self._listener = listener
        self._peers: dict[PeerKey, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def to(self, key: PeerKey) -> Peer:
        """The open peer at ``key``, dialled if need be; CLOSED when that fails at once."""
        peer = self._peers.get(key)
        if peer is not None and not peer.is_closed:
            return peer
        peer = self._peers[key] = Peer(key)
        peer.enter("dialled")
        try:
            peer.channel = Channel(dial(key.host, key.port), MAX_WELCOME)
        except OSError as error:
            self.close(peer, f"side channel: {error}")
            return peer
        peer.outgoing.append(Hello(PROTOCOL_VERSION, self._engine_id, key.incarnation))
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(peer.channel.socket, both, peer)
        return peer

    def serve(self, peer: Peer, events: int) -> None:
        """The peer's socket is ready."""
        try:
            if events & selectors.EVENT_READ and peer.channel is not None:
                for body in peer.channel.receive():
                    for message in decode_from_lender(body):
                        self._hear(peer, message)
        except ChannelLost as error:
            self.close(peer, f"side channel: {error}")
        except (ProtocolError, PlanningError) as error:
            self.close(peer, str(error))

    def flush(self, peer: Peer) -> None:
        """Send what is due in one frame, and watch for writing if it must wait.

        Before it is READY a peer hears our greeting only.
        """
        channel = peer.channel
        if channel is None:
            return
        try:
            if peer.outgoing and (peer.state is PeerState.READY or _is_greeting(peer.outgoing)):
                outgoing, peer.outgoing = peer.outgoing, []
                channel.send(encode(outgoing))
            else:
                channel.flush()
        except ChannelLost as error:
            self.close(peer, f"side channel: {error}")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if wanted != self._selector.get_key(channel.socket).events:
            self._selector.modify(channel.socket, wanted, peer)

    def flush_all(self) -> None:
        """Flush every peer."""
        for peer in list(self._peers.values()):
            self.flush(peer)

    def connected(self, answer: Connected) -> None:
        """The reader thread reached a peer's rank, or did not."""
        tag = answer.tag
        assert isinstance(tag, tuple)
        peer, rank = tag
        if peer.is_closed:
            if answer.peer is not None:
                self._reader.post(Disconnect(answer.peer))
            return
        if answer.peer is None:
            self.close(peer, f"rank {rank} cannot be reached: {answer.error}")
            return
        peer.ranks[rank] = answer.peer
        peer.connecting -= 1
        if peer.connecting == 0:
            self._ready(peer)

    def _ready(self, peer: Peer) -> None:
        peer.enter("welcomed")
        log.info("pdconn: ready to read from %s", peer.key)
        self._listener.peer_ready(peer)

    def close(self, peer: Peer, reason: str) -> None:
        """Nothing can be said to the peer any more.  Reads in flight go on to their end."""
        if peer.is_closed:
            return
        log.warning("pdconn: no longer reading from %s: %s", peer.key, reason)
        peer.enter("closed")
        peer.reason = reason
        peer.outgoing.clear()
        if peer.channel is not None:
            if peer.channel.socket in self._selector.get_map():
                self._selector.unregister(peer.channel.socket)
            peer.channel.close()
            peer.channel = None
        self._listener.peer_closed(peer)

    def forget(self, peer: Peer) -> None:
        """Drop a closed peer; call it when no read from it is in flight."""
        for connected in peer.ranks.values():
            self._reader.post(Disconnect(connected))
        peer.ranks.clear()
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]

    def close_all(self) -> None:
        """Close every socket, at the end of the thread."""
        for peer in self._peers.values():
            if peer.channel is not None:
                peer.channel.close()

    def _hear(self, peer: Peer, message: FromLender) -> None:
        if isinstance(message, (Granted, Refused)):
            self._listener.heard(peer, message)
        elif isinstance(message, Rejected):
            self.close(peer, f"{message.field}: theirs {message.expected}, ours {message.seen}")
        elif isinstance(message, Welcome) and peer.pairing is None:
            check_welcome(message, peer.key)
            peer.pairing = self._pair(message)
            peer.connecting = len(peer.pairing.ranks)
            for rank in peer.pairing.ranks:
                self._reader.post(Connect((peer, rank), message.ranks[rank].address))
            if not peer.pairing.ranks:  # a stage of ours without layers reads from nobody
                self._ready(peer)


def check_welcome(welcome: Welcome, key: PeerKey) -> None:
    """Whether the lender is the one that the ticket named.

    Raises:
        PeerMismatch: another version, engine or boot, or traits of another digest.
    """
    for name, ours, theirs in (
        ("version", PROTOCOL_VERSION, welcome.version),
        ("engine_id", key.engine_id, welcome.engine_id),
        ("incarnation", key.incarnation, welcome.incarnation),
        ("digest", traits_digest(welcome.traits), welcome.digest),
    ):
        if ours != theirs:
            raise PeerMismatch(name, ours, theirs)


def check_traits(ours: Mapping[str, str], welcome: Welcome) -> None:
    """Whether both sides mean the same by the bytes of a block.

    Equal digests say so at once; without traits of our own we do not ask.

    Raises:
        Incompatible: every trait that differs, by name.
    """
    if ours and traits_digest(ours) != welcome.digest:
        raise Incompatible(*trait_differences(ours, welcome.traits))


def dial(host: str, port: int) -> socket.socket:
    """A socket that is connecting; it turns writable when that is decided.

    Raises:
        OSError: the name does not resolve, or the network refuses at once.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} is no host name: {error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    failed = sock.connect_ex(address)
    if failed not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(failed, errno.errorcode.get(failed, str(failed)))
    return sock


def _is_greeting(outgoing: list[FromReader]) -> bool:
    return isinstance(outgoing[0], Hello)
