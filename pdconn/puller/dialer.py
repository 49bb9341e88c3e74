"""Sockets to lenders, and the names that lead to them.

A name server may take seconds to answer, and the thread that renews claims must not wait
for it, so every name that is no address is looked up by a thread of its own.
"""

from __future__ import annotations

import errno
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdconn.puller.connections import PeerTable
from pdconn.puller.peers import Peer
from pdconn.sidechannel.connection import Connection
from pdconn.sidechannel.dial import MAX_WELCOME, Address, connecting_to, literal_address, resolve
from pdconn.sidechannel.security import Security, Unprotected

MAX_LOOKUPS = 32
"""Names that are looked up at once; others wait for their turn."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The name of ``peer``'s host leads to ``found``, or to an error."""

    peer: Peer
    found: Address | OSError


class SocketDialer:
    """Dials lenders over TCP.

    Args:
        selector: watches the wires, with their peers as data.
        deliver: gets a :class:`LookedUp` from another thread, for :meth:`looked_up`.
        security: what lenders must prove.
        through: maps a lender's host and port to those to dial instead, for debugging.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        deliver: Callable[[LookedUp], None],
        security: Security,
        through: Callable[[str, int], tuple[str, int]] | None = None,
    ) -> None:
        self._selector = selector
        self._deliver = deliver
        self._security = security
        self._through = through or (lambda host, port: (host, port))
        self._waiting: deque[Peer] = deque()
        self._asks: deque[Peer] = deque()
        self._num_looking = 0
        self._num_asking = 0

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
        (self._asks if _is_ask(peer) else self._waiting).append(peer)
        self._look_for_more()

    def looked_up(self, answer: LookedUp, connections: PeerTable) -> None:
        """Go on with a peer whose name is known now."""
        self._num_looking -= 1
        self._num_asking -= _is_ask(answer.peer)
        self._look_for_more()
        peer, found = answer.peer, answer.found
        if peer.is_closed:
            return
        try:
            if isinstance(found, OSError):
                raise found
            self._open(peer, found)
        except OSError as error:
            connections.close(peer, f"side channel: {error}")

    def _open(self, peer: Peer, address: Address) -> None:
        host, port = peer.key.host, peer.key.port
        policy = self._security.for_reader(host, f"{host}:{port}")
        connection = Connection(connecting_to(address), MAX_WELCOME, policy=policy)
        connection.watch(self._selector, peer, connecting=True)
        peer.wire = connection

    def _look_for_more(self) -> None:
        while self._num_looking < MAX_LOOKUPS:
            peer = self._next_to_look_up()
            if peer is None:
                return
            if peer.is_closed:
                continue
            self._num_looking += 1
            self._num_asking += _is_ask(peer)
            look = threading.Thread(
                target=self._look_up, args=(peer,), name="pdconn-lookup", daemon=True
            )
            try:
                look.start()
            except RuntimeError as error:  # no thread to spare
                self._deliver(LookedUp(peer, OSError(errno.EAGAIN, str(error))))

    def _next_to_look_up(self) -> Peer | None:
        """Whoever a request waits for goes first, and finds half the places free."""
        if self._waiting:
            return self._waiting.popleft()
        if self._asks and self._num_asking < MAX_LOOKUPS // 2:
            return self._asks.popleft()
        return None

    def _look_up(self, peer: Peer) -> None:
        found: Address | OSError
        try:
            found = resolve(*self._through(peer.key.host, peer.key.port))
        except OSError as error:
            found = error
        self._deliver(LookedUp(peer, found))


def _is_ask(peer: Peer) -> bool:
    """Whether it is only to be asked who it is: no ticket names a boot of it yet."""
    return not peer.key.incarnation
