"""A decode rank's connections to lenders: one peer per lender boot.

``PeerTable`` greets and sorts what lenders say; wires come from a
:class:`~pdconn.puller.peers.Dialer`, and what a message means for a pull is the business of
the :class:`~pdconn.puller.peers.Listener`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator

from pdconn.lifecycle.peer import PeerState
from pdconn.planning.errors import PlanningError
from pdconn.planning.plan import Pairing
from pdconn.protocol.compat import traits_digest
from pdconn.protocol.errors import PeerMismatch, ProtocolError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Describe,
    Described,
    FromLender,
    FromReader,
    Hello,
    Rejected,
    Welcome,
    decode_from_lender,
    encode_frames,
)
from pdconn.puller.jobs import Connect, Connected, Disconnect, Job
from pdconn.puller.peers import AboutPull, Dialer, Listener, Peer, PeerKey
from pdconn.sidechannel.connection import SideChannelLost, Unauthenticated

log = logging.getLogger(__name__)

MAX_PEERS = 1024
"""Lenders that are known at once; the one that was idle for longest makes room."""


class PeerTable:
    """Every peer of one decode rank.

    Args:
        engine_id: what we call ourselves.
        pair: makes a pairing of a checked greeting, or raises PlanningError.
        post: has the transport connect to a peer's ranks.
    """

    def __init__(
        self,
        engine_id: str,
        pair: Callable[[Welcome], Pairing],
        post: Callable[[Job], None],
        dialer: Dialer,
        listener: Listener,
    ) -> None:
        self._engine_id = engine_id
        self._pair = pair
        self._post = post
        self._dialer = dialer
        self._listener = listener
        self._peers: OrderedDict[PeerKey, Peer] = OrderedDict()
        self._retired: dict[Peer, None] = {}
        self._asked: dict[Peer, None] = {}

    def __len__(self) -> int:
        return len(self._peers) + len(self._retired) + len(self._asked)

    def __iter__(self) -> Iterator[Peer]:
        yield from list(self._peers.values())
        yield from list(self._retired)
        yield from list(self._asked)

    def ask(self, host: str, port: int) -> Peer:
        """Dial whoever lends there to ask who that is; CLOSED when that fails at once.

        The listener hears the answer, and the peer is closed: it is good for nothing else.
        """
        peer = Peer(PeerKey(host, port, "whoever lends", ""))
        peer.enter("dialled")
        self._asked[peer] = None
        self._dial(peer, Describe(PROTOCOL_VERSION))
        return peer

    def to(self, key: PeerKey, may_evict: bool = True) -> Peer:
        """The open peer at ``key``, dialled if need be; CLOSED when that fails at once.

        Where there is no room, an idle peer goes, unless ``may_evict`` is false.
        """
        peer = self._peers.get(key)
        if peer is not None and not peer.is_closed:
            self._peers.move_to_end(key)
            return peer
        peer = Peer(key)
        peer.enter("dialled")
        if not self._has_room(may_evict):
            self.close(peer, f"{MAX_PEERS} lenders are {'in use' if may_evict else 'known'}")
            return peer
        self._peers[key] = peer
        self._dial(peer, Hello(PROTOCOL_VERSION, self._engine_id, key.incarnation))
        return peer

    def _dial(self, peer: Peer, greeting: FromReader) -> None:
        try:
            self._dialer.dial(peer)
        except OSError as error:
            self.close(peer, f"side channel: {error}")
        else:
            peer.outgoing.append(greeting)

    def serve(self, peer: Peer) -> None:
        """The peer's wire has something for us."""
        try:
            for body in () if peer.wire is None else peer.wire.receive():
                for message in decode_from_lender(body):
                    if not peer.is_closed:
                        self._hear(peer, message)
        except SideChannelLost as error:
            self._lost(peer, error)
        except (ProtocolError, PlanningError) as error:
            self.close(peer, str(error))

    def flush(self, peer: Peer) -> None:
        """Send what is due in one frame.

        Before it is READY a peer hears our greeting only.
        """
        if peer.wire is None:
            return
        bodies = []
        if peer.outgoing and (peer.state is PeerState.READY or _is_greeting(peer.outgoing)):
            outgoing, peer.outgoing = peer.outgoing, []
            bodies = encode_frames(outgoing)
        try:
            peer.wire.send(bodies)
        except SideChannelLost as error:
            self._lost(peer, error)

    def flush_all(self) -> None:
        """Send to every peer what is due to it."""
        for peer in self:
            if peer.outgoing:
                self.flush(peer)

    def connected(self, answer: Connected) -> None:
        """The transport reached a peer's rank, or did not."""
        tag = answer.tag
        assert isinstance(tag, tuple)
        peer, rank = tag
        if peer.is_closed:
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
        """Nothing can be said to the peer any more.  Reads in flight go on to their end."""
        if peer.is_closed:
            return
        log.log(_level(peer), "pdconn: no longer reading from %s: %s", peer.key, reason)
        peer.enter("closed")
        peer.reason = reason
        peer.outgoing.clear()
        if peer.wire is not None:
            peer.wire.close()
            peer.wire = None
        self._listener.peer_closed(peer)

    def _lost(self, peer: Peer, error: SideChannelLost) -> None:
        peer.untrusted = isinstance(error, Unauthenticated)
        self.close(peer, f"side channel: {error}")

    def retire(self, peer: Peer, reason: str) -> None:
        """Let the next pull dial anew: this connection may swallow what it is told."""
        if peer.is_closed or peer.retired:
            return
        log.warning("pdconn: dialling %s anew: %s", peer.key, reason)
        peer.retired = True
        del self._peers[peer.key]
        self._retired[peer] = None

    def forget(self, peer: Peer) -> None:
        """Drop a closed peer; call it when no read from it is in flight."""
        for connected in peer.ranks.values():
            self._post(Disconnect(connected))
        peer.ranks.clear()
        self._retired.pop(peer, None)
        self._asked.pop(peer, None)
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]

    def close_all(self) -> None:
        """Close every wire, at the end of the thread."""
        for peer in self:
            if peer.wire is not None:
                peer.wire.close()

    def _has_room(self, may_evict: bool) -> bool:
        if len(self._peers) < MAX_PEERS or not may_evict:
            return len(self._peers) < MAX_PEERS
        idle = next((peer for peer in self._peers.values() if not peer.pulls), None)
        if idle is None:
            return False
        self.flush(idle)
        self.close(idle, "idle, and another lender needs the room")
        return True

    def _ready(self, peer: Peer) -> None:
        peer.enter("welcomed")
        log.info("pdconn: ready to read from %s", peer.key)
        self._listener.peer_ready(peer)

    def _hear(self, peer: Peer, message: FromLender) -> None:
        if isinstance(message, Rejected):
            self.close(peer, f"{message.field}: theirs {message.expected}, ours {message.seen}")
        elif peer in self._asked:
            if isinstance(message, Described):
                self._listener.peer_described(peer, message)
            self.close(peer, f"it was asked who it is, and {message.__class__.__name__} came")
        elif isinstance(message, AboutPull):
            self._listener.heard(peer, message)
        elif isinstance(message, Welcome) and peer.pairing is None:
            check_welcome(message, peer.key)
            peer.pairing = self._pair(message)
            peer.welcome = message
            peer.connecting = len(peer.pairing.ranks)
            self._listener.peer_welcomed(peer)
            for rank in peer.pairing.ranks:
                self._post(Connect((peer, rank), message.ranks[rank].address))
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


def _level(closing: Peer) -> int:
    """Whoever wanted more of a peer that nobody reads from yet tells so himself."""
    if closing.pulls:
        return logging.WARNING
    return logging.INFO if closing.state is PeerState.READY else logging.DEBUG


def _is_greeting(outgoing: list[FromReader]) -> bool:
    return isinstance(outgoing[0], Hello | Describe)
