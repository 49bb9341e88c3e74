"""A relay between decode ranks and a lender that disturbs the frames it passes on.

Both ends are real and unaware of it: decode dials the relay, the relay dials the
lender, and each frame meets ``pdconn.faults.frames`` on its way::

    decode ──► client socket ──► Pipe "there": Units, FrameFaults ──► target socket ──► lender
           ◄──               ◄── Pipe "back"                      ◄──               ◄──

One thread, never blocked by either end: while more than ``MAX_WAITING`` bytes wait
to go out, the other end is not read.  A lender that cannot be reached looks like
one that hangs up at once, since the relay had to accept before it could know.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

from pdconn.faults.frames import FrameFaults, MessageFaults
from pdconn.faults.pipe import Pipe, PipeLost
from pdconn.sidechannel.wakeup_queue import WakeupQueue

log = logging.getLogger(__name__)


class _Link:
    """One connection: two sockets, and a pipe each way."""

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
        """Whether both ends have said all they had to say."""
        return all(pipe.is_over for pipe in self.pipes)

    def receive(self, sock: object, now: float) -> None:
        """``sock`` can be read."""
        self.pipes[0 if sock is self.sockets[0] else 1].receive(now)

    def send(self, now: float) -> None:
        """Send what is due, both ways."""
        for pipe in self.pipes:
            pipe.send(now)

    def wanted(self) -> list[tuple[socket.socket, int]]:
        """What to select each socket for."""
        there, back = self.pipes
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        return [
            (self.sockets[0], read * there.wants_to_read | write * back.wants_to_write),
            (self.sockets[1], read * back.wants_to_read | write * there.wants_to_write),
        ]


class Relay:
    """Passes connections to ``target_host:target_port`` on, with ``faults``, until closed.

    Every connection and direction draws from ``Random(f"{seed}/{connection}/{direction}")``:
    ``connection`` counts from 0, ``direction`` is ``there`` or ``back``.

    ``counts`` has what was done: faults by kind, ``frames``, ``connections``, and
    ``unreachable`` for connections that found nobody at the target.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        faults: MessageFaults,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = (target_host, target_port)
        self._faults = faults
        self._seed = seed
        self._clock = clock
        self._numbers = itertools.count()
        self._links: set[_Link] = set()
        self._stopping = False
        self.counts: Counter[str] = Counter()
        self._mailbox: WakeupQueue[None] = WakeupQueue()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="pdconn-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection and end the thread.  A second call does nothing."""
        self._stopping = True
        self._mailbox.wake()
        self._thread.join()
        self._mailbox.close()

    def _run(self) -> None:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._mailbox.socket, selectors.EVENT_READ)
            while not self._stopping:
                self._turn()
        except Exception:
            log.critical("the relay thread stopped", exc_info=True)
        finally:
            for link in list(self._links):
                self._drop(link)
            self._listener.close()
            self._selector.close()

    def _turn(self) -> None:
        readable: defaultdict[_Link, list[object]] = defaultdict(list)
        for key, events in self._selector.select(self._pause_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._mailbox.socket:
                self._mailbox.drain()
            elif events & selectors.EVENT_READ:
                readable[key.data].append(key.fileobj)
        for link in list(self._links):
            self._serve(link, readable[link])

    def _pause_s(self) -> float | None:
        dues = [pipe.next_due for link in self._links for pipe in link.pipes]
        soonest = min((due for due in dues if due is not None), default=None)
        return None if soonest is None else max(0.0, soonest - self._clock())

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # who knocked has left
        number = next(self._numbers)
        self.counts["connections"] += 1
        try:
            target = _dial(*self._target)
        except OSError as error:
            log.info("pdconn: relay to %s:%s: %s", *self._target, error)
            self.counts["unreachable"] += 1
            client.close()
            return
        there, back = (self._faults_of(number, direction) for direction in ("there", "back"))
        self._links.add(_Link(client, target, there, back))

    def _faults_of(self, connection: int, direction: str) -> FrameFaults:
        rng = Random(f"{self._seed}/{connection}/{direction}")
        return FrameFaults(self._faults, rng, self.counts)

    def _serve(self, link: _Link, readable: list[object]) -> None:
        now = self._clock()
        try:
            for sock in readable:
                link.receive(sock, now)
            link.send(now)
        except PipeLost as error:
            log.debug("pdconn: relay to %s:%s: %s", *self._target, error)
            if error.never_connected:
                self.counts["unreachable"] += 1
            self._drop(link)
        else:
            self._select(link)

    def _select(self, link: _Link) -> None:
        """Wait for what the link wants next, which may be nothing but time, or its end."""
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
    """A relay per lender, opened when it is first asked for; for one thread."""

    def __init__(self, faults: MessageFaults, seed: int) -> None:
        self._faults = faults
        self._seed = seed
        self._relays: dict[tuple[str, int], Relay] = {}

    def through(self, host: str, port: int) -> tuple[str, int]:
        """Where to dial to reach ``host:port`` with faults on the way.

        Relay n has the seed ``seed + n``, so that two lenders do not fail alike.
        """
        relay = self._relays.get((host, port))
        if relay is None:
            relay = Relay(host, port, self._faults, self._seed + len(self._relays))
            self._relays[host, port] = relay
        return relay.host, relay.port

    def counts(self) -> Counter[str]:
        """What all relays did."""
        return sum((relay.counts for relay in self._relays.values()), Counter())

    def close(self) -> None:
        """Close every relay; the next ``through`` opens anew."""
        while self._relays:
            self._relays.popitem()[1].close()


def _dial(host: str, port: int) -> socket.socket:
    """A socket that is connecting.

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
