"""A relay between decode ranks and a lender that injects faults into the frames it passes.

Both ends are real and unaware of the relay: decode dials the relay, the relay dials the
lender, and each frame passes through ``pdconn.faults.frame_faults``::

    decode ──► client socket ──► Pipe "there": FrameFaults ──► target socket ──► lender
           ◄──               ◄── Pipe "back"               ◄──               ◄──

One thread, never blocked by either end: while the queue to one end is full
(``pdconn.faults.pipe``), the other end is not read.  An unreachable lender looks like one that
closes at once, since the relay accepts before it connects.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from pdconn.faults.frame_faults import HOLD_S, FaultDraws, FrameFaults, MessageFaults
from pdconn.faults.pipe import Pipe, PipeLost
from pdconn.sidechannel.connection import connecting_to, resolve
from pdconn.threads import Box, SelectedBox, Worker

log = logging.getLogger(__name__)


class _Link:
    """One connection: two sockets, and one pipe per direction."""

    def __init__(
        self, client: socket.socket, target: socket.socket, there: FrameFaults, back: FrameFaults
    ) -> None:
        for sock in (client, target):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets = (client, target)
        self.pipes = (Pipe(client, target, there), Pipe(target, client, back))

    @property
    def is_over(self) -> bool:
        """Whether both directions have ended."""
        return all(pipe.is_over for pipe in self.pipes)

    def read_from(self, sock: object, now: float) -> None:
        """Read frames from ``sock``."""
        self.pipes[0 if sock is self.sockets[0] else 1].read_source(now)

    def send_due(self, now: float) -> None:
        """Send the frames that are due, in both directions."""
        for pipe in self.pipes:
            pipe.send_due(now)

    def wanted(self) -> list[tuple[socket.socket, int]]:
        """Each socket with the events to select it for."""
        there, back = self.pipes
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        return [
            (self.sockets[0], read * there.wants_to_read | write * back.wants_to_write),
            (self.sockets[1], read * back.wants_to_read | write * there.wants_to_write),
        ]


class Relay:
    """Relays connections to ``target_host:target_port`` with ``faults``, until closed.

    ``counts`` holds the faults by kind, ``frames``, ``connections``, and ``unreachable`` for
    connections that the target refused.

    Args:
        hold_s: seconds that a frame to be reordered waits for the next one.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        faults: MessageFaults,
        seed: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = HOLD_S,
    ) -> None:
        self._target = (target_host, target_port)
        self._draws = FaultDraws(faults, seed, hold_s)
        self._clock = clock
        self._numbers = itertools.count()
        self._links: set[_Link] = set()
        self.counts: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._inbox: SelectedBox[None] = SelectedBox()
        self._worker = Worker("pdconn-relay", self._run, self._inbox, Box())
        self._worker.start_thread()

    def close(self) -> None:
        """Close every connection and end the thread.  Idempotent."""
        self._worker.end_thread()
        self._inbox.free_sockets()

    def _run(self) -> None:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._inbox.socket, selectors.EVENT_READ)
            while not self._inbox.is_closed:
                self._turn()
        finally:
            for link in list(self._links):
                self._drop(link)
            self._listener.close()
            self._selector.close()

    def _turn(self) -> None:
        readable: defaultdict[_Link, list[object]] = defaultdict(list)
        for key, events in self._selector.select(self._timeout_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._inbox.socket:
                self._inbox.drain_socket()
            elif events & selectors.EVENT_READ:
                readable[key.data].append(key.fileobj)
        for link in list(self._links):
            self._serve(link, readable[link])

    def _timeout_s(self) -> float | None:
        dues = [pipe.next_due for link in self._links for pipe in link.pipes]
        soonest = min((due for due in dues if due is not None), default=None)
        return None if soonest is None else max(0.0, soonest - self._clock())

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # the client has closed already
        number = next(self._numbers)
        self.counts["connections"] += 1
        try:
            target = connecting_to(resolve(*self._target))
        except OSError as error:
            log.info("pdconn: relay cannot connect: %s target=%s:%s", error, *self._target)
            self.counts["unreachable"] += 1
            client.close()
            return
        there, back = (self._faults_of(number, direction) for direction in ("there", "back"))
        self._links.add(_Link(client, target, there, back))

    def _faults_of(self, connection: int, direction: str) -> FrameFaults:
        return self._draws.for_direction(connection, direction, self.counts)

    def _serve(self, link: _Link, readable: list[object]) -> None:
        now = self._clock()
        try:
            for sock in readable:
                link.read_from(sock, now)
            link.send_due(now)
        except PipeLost as error:
            log.debug("pdconn: relayed connection ended: %s target=%s:%s", error, *self._target)
            if error.never_connected:
                self.counts["unreachable"] += 1
            self._drop(link)
        else:
            self._select(link)

    def _select(self, link: _Link) -> None:
        """Select the link's sockets for the events it waits for; drop a link that has ended."""
        if link.is_over:
            self._drop(link)
            return
        known = self._selector.get_map()
        for sock, events in link.wanted():
            if sock not in known:
                if events:
                    self._selector.register(sock, events, link)
            elif not events:
                self._selector.unregister(sock)
            elif known[sock].events != events:
                self._selector.modify(sock, events, link)

    def _drop(self, link: _Link) -> None:
        self._links.discard(link)
        for sock in link.sockets:
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            sock.close()


class Relays:
    """One relay per lender, opened on first use.  Not thread-safe."""

    def __init__(self, faults: MessageFaults, seed: int) -> None:
        self._faults = faults
        self._seed = seed
        self._relays: dict[tuple[str, int], Relay] = {}

    def through(self, host: str, port: int) -> tuple[str, int]:
        """The address to dial to reach ``host:port`` through faults.

        Relay n has the seed ``seed + n``, so that two lenders fail differently.
        """
        relay = self._relays.get((host, port))
        if relay is None:
            relay = Relay(host, port, self._faults, self._seed + len(self._relays))
            self._relays[host, port] = relay
        return relay.host, relay.port

    def counts(self) -> Counter[str]:
        """The summed counts of all relays."""
        return sum((relay.counts for relay in self._relays.values()), Counter())

    def close(self) -> None:
        """Close every relay; a later ``through`` opens a new one."""
        while self._relays:
            self._relays.popitem()[1].close()
