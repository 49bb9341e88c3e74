"""Sockets to lenders, and the names that lead to them.

A name server may take seconds to answer, and the thread that renews claims must not wait
for it, so every host that is not an address is looked up by a thread of its own.
"""

from __future__ import annotations

import errno
import itertools
import selectors
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from pdconn.threads import Box, Worker

MAX_LOOKUPS = 32
"""Names that are looked up at once; others wait for their turn."""

Resolve = Callable[[str, int], Address]
"""As :func:`pdconn.sidechannel.dial.resolve`; may take as long as a name server does."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The look-up ``number`` has ``found`` an address, or an error."""

    number: int
    found: Address | OSError


class SocketDialer:
    """Dials lenders over TCP.

    Args:
        selector: watches the connections, with their peers as data.
        outbox: gets a :class:`LookedUp` from another thread, for :meth:`looked_up`.
        security: how lenders must authenticate.
        through: maps a lender's host and port to those to dial instead, for debugging.
        resolve: looks a name up, on a thread of its own.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        outbox: Box[Any],
        security: Security,
        through: Callable[[str, int], tuple[str, int]] | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._selector = selector
        self._outbox = outbox
        self._security = security
        self._through = through or (lambda host, port: (host, port))
        self._resolve = resolve
        self._for_pulls: deque[Peer] = deque()
        self._for_warmup: deque[Peer] = deque()
        self._looking: dict[int, Peer] = {}
        self._numbers = itertools.count()
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
        peer, found = self._looking.pop(answer.number), answer.found
        self._num_for_warmup -= not peer.key.names_a_boot
        self._look_for_more()
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
        while len(self._looking) < MAX_LOOKUPS:
            peer = self._next_to_look_up()
            if peer is None:
                return
            if peer.state is PeerState.CLOSED:
                continue
            number = next(self._numbers)
            self._looking[number] = peer
            self._num_for_warmup += not peer.key.names_a_boot
            host, port = self._through(peer.key.host, peer.key.port)
            look = partial(_look_up, self._resolve, host, port, number, self._outbox)
            try:
                Worker("pdconn-lookup", look, Box(), self._outbox).start()
            except RuntimeError as error:  # no thread to spare
                self._outbox.put(LookedUp(number, OSError(errno.EAGAIN, str(error))))

    def _next_to_look_up(self) -> Peer | None:
        """A peer of a pull goes first; warm-ups take at most half of the look-ups."""
        if self._for_pulls:
            return self._for_pulls.popleft()
        if self._for_warmup and self._num_for_warmup < MAX_LOOKUPS // 2:
            return self._for_warmup.popleft()
        return None


def _look_up(resolve: Resolve, host: str, port: int, number: int, outbox: Box[Any]) -> None:
    """One look-up, on a thread of its own."""
    found: Address | OSError
    try:
        found = resolve(host, port)
    except OSError as error:
        found = error
    outbox.put(LookedUp(number, found))
