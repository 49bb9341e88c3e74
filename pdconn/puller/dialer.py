"""Sockets to lenders, and the names that lead to them.

A name server may take seconds to answer, and the thread that renews claims must not wait
for it, so every host that is not an address is looked up by a thread of its own.
"""

from __future__ import annotations

import errno
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdconn.lifecycle.peer import PeerState
from pdconn.puller.peers import Peer, PeerTable
from pdconn.sidechannel.connection import Connection
from pdconn.sidechannel.dial import (
    MAX_REPLIES,
    MAX_WELCOME,
    Address,
    connecting_to,
    literal_address,
    resolve,
)
from pdconn.sidechannel.security import Security, Unprotected

MAX_LOOKUPS = 32
"""Names that are looked up at once; others wait for their turn."""

Resolve = Callable[[str, int], Address]
"""As :func:`pdconn.sidechannel.dial.resolve`; may take as long as a name server does."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The name of ``peer``'s host leads to ``found``, or to an error."""

    peer: Peer
    found: Address | OSError


class SocketDialer:
    """Dials lenders over TCP.

    Args:
        selector: watches the connections, with their peers as data.
        deliver: gets a :class:`LookedUp` from another thread, for :meth:`looked_up`.
        security: how lenders must authenticate.
        through: maps a lender's host and port to those to dial instead, for debugging.
        resolve: looks a name up, on a thread of its own.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        deliver: Callable[[LookedUp], None],
        security: Security,
        through: Callable[[str, int], tuple[str, int]] | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._selector = selector
        self._deliver = deliver
        self._security = security
        self._through = through or (lambda host, port: (host, port))
        self._resolve = resolve
        self._for_pulls: deque[Peer] = deque()
        self._for_warmup: deque[Peer] = deque()
        self._num_looking = 0
        self._num_for_warmup = 0

    def dial(self, peer: Peer) -> None:
        """As :meth:`pdconn.puller.peers.Dialer.dial`."""
        try:
            self._security.require(peer.key.host)
        except Unprotected as error:
            raise PermissionError(errno.EPERM, str(error)) from None
        host, port = self._through(peer.key.host, peer.key.port)
        literal = literal_address(host, port)
        if literal is not None:
            self._open(peer, literal)
            return
        (self._for_pulls if peer.key.names_a_boot else self._for_warmup).append(peer)
        self._look_for_more()

    def looked_up(self, answer: LookedUp, peers: PeerTable) -> None:
        """Go on with a peer whose name is known now."""
        self._num_looking -= 1
        self._num_for_warmup -= not answer.peer.key.names_a_boot
        self._look_for_more()
        peer, found = answer.peer, answer.found
        if peer.state is PeerState.CLOSED:
            return
        try:
            if isinstance(found, OSError):
                raise found
            self._open(peer, found)
        except OSError as error:
            peers.close(peer, f"side channel: {error}")

    def _open(self, peer: Peer, address: Address) -> None:
        host, port = peer.key.host, peer.key.port
        policy = self._security.for_reader(host, f"{host}:{port}")
        sock = connecting_to(address)
        connection = Connection(sock, MAX_WELCOME, policy=policy, max_later=MAX_REPLIES)
        connection.watch(self._selector, peer, connecting=True)
        peer.connection = connection

    def _look_for_more(self) -> None:
        while self._num_looking < MAX_LOOKUPS:
            peer = self._next_to_look_up()
            if peer is None:
                return
            if peer.state is PeerState.CLOSED:
                continue
            self._num_looking += 1
            self._num_for_warmup += not peer.key.names_a_boot
            look = threading.Thread(
                target=self._look_up, args=(peer,), name="pdconn-lookup", daemon=True
            )
            try:
                look.start()
            except RuntimeError as error:  # no thread to spare
                self._deliver(LookedUp(peer, OSError(errno.EAGAIN, str(error))))

    def _next_to_look_up(self) -> Peer | None:
        """A peer of a pull goes first; warm-ups take at most half of the look-ups."""
        if self._for_pulls:
            return self._for_pulls.popleft()
        if self._for_warmup and self._num_for_warmup < MAX_LOOKUPS // 2:
            return self._for_warmup.popleft()
        return None

    def _look_up(self, peer: Peer) -> None:
        found: Address | OSError
        try:
            found = self._resolve(*self._through(peer.key.host, peer.key.port))
        except OSError as error:
            found = error
        self._deliver(LookedUp(peer, found))
