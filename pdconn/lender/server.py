"""The lender: a prefill engine's side-channel server, on a thread of its own.

It owns the leases.  The engine posts what it lends and collects what is free
again; decode ranks greet, claim, renew and report over TCP::

    engine thread ── lend, abort ──► mailbox ─┐
                  ◄── collect ── freed        ├── one thread: desk + door + sockets
    decode ranks ◄── frames ──────────────────┘

The mailbox is emptied after a socket was read and before what it said is heeded, so a
lease is in the book before a claim for it can be.  A lease does not wake the thread
unless it would sleep longer than the lease lasts.
"""

from __future__ import annotations

import logging
import math
import resource
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdconn.integrity.lent import LentSums
from pdconn.lender.admission import MAX_VISITORS, AdmissionControl
from pdconn.lender.sessions import LenderSessions, Session
from pdconn.lifecycle.lease_table import FreedLease
from pdconn.protocol.errors import ProtocolError
from pdconn.protocol.messages import Welcome, decode_from_reader
from pdconn.sidechannel.clock import steady
from pdconn.sidechannel.connection import Connection, SideChannelLost, Unauthenticated
from pdconn.sidechannel.security import Security
from pdconn.sidechannel.wakeup_queue import WakeupQueue
from pdconn.sidechannel.wire import PolledConnection

log = logging.getLogger(__name__)

MAX_INBOUND_FRAME = 1 << 20
MAX_UNSENT = 1 << 26
ACCEPT_PAUSE_S = 0.5
"""How long nobody is let in after the system could not open a connection."""


class SideChannelInUse(OSError):
    """The side channel's port is taken."""


class LenderBroken(RuntimeError):
    """The lender's thread died; what is lent would stay lent, so the engine must stop."""


@dataclass(frozen=True, slots=True)
class _Lend:
    request: str
    ticket: bytes
    ttl_s: float
    at: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request: str


@dataclass(frozen=True, slots=True)
class _Sums:
    request: str
    rank: int
    sums: LentSums | None


class Lender:
    """Serves ``welcome`` and leases at ``host:port`` until closed.

    Args:
        welcome: our geometry; its incarnation is what visitors must want.
        host: address to listen at, which tickets name too.
        port: 0 picks a free one; see :attr:`port`.
        security: what visitors must prove; nothing by default.
        is_summing: whether checksums of what is lent will be added.
        clock: seconds that never go back.

    Raises:
        SideChannelInUse: the port is taken.
        OSError: the address cannot be listened at.
        Unprotected: strangers could reach ``host``, and nothing would stop them.
    """

    def __init__(
        self,
        welcome: Welcome,
        host: str,
        port: int,
        *,
        security: Security | None = None,
        is_summing: bool = False,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._security = security or Security()
        self._security.require(host)
        self._clock = clock
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._place = f"{host}:{self.port}"
        self._mailbox: WakeupQueue[_Lend | _Abort | _Sums] = WakeupQueue()
        self._desk = LenderSessions(welcome, is_summing, self._warn)
        self._door: AdmissionControl[Session] = AdmissionControl(_half_of_our_files())
        self._wires: dict[Session, PolledConnection] = {}
        self._accept_from: float | None = None
        self._sleeps_until = 0.0
        self._silent_until = 0.0
        self._unsaid = 0
        self._selector = selectors.DefaultSelector()
        self._broken: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pdconn-lender", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counter[str]:
        """Leases, claims, refusals and visitors counted since :meth:`take_counts`."""
        return self._desk.counts

    def lend(self, request: str, ticket: bytes, ttl_s: float) -> None:
        """What a ticket with digest ``ticket`` names stays as it is until collected as freed."""
        now = self._clock()
        self._mailbox.leave(_Lend(request, ticket, ttl_s, now))
        if self._sleeps_until > now + ttl_s:
            self._mailbox.wake()

    def add_sums(self, request: str, rank: int, sums: LentSums | None) -> None:
        """Rank ``rank`` has summed what ``request`` lends, for readers that want proof."""
        self._mailbox.post(_Sums(request, rank, sums))

    def abort(self, request: str) -> None:
        """Take the blocks back as soon as no granted claim can be believed."""
        self._mailbox.post(_Abort(request))

    def collect(self) -> list[FreedLease]:
        """Leases that ended since the last call; never blocks.

        Raises:
            LenderBroken: our thread died.
        """
        if self._broken is not None:
            raise LenderBroken(self._broken)
        freed = []
        while self._desk.freed:
            freed.append(self._desk.freed.popleft())
        return freed

    def take_counts(self) -> dict[str, int]:
        """Leases, claims and refusals counted since the last call."""
        counts, self._desk.counts = self._desk.counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Stop serving and close every socket.  A second call does nothing."""
        self._stopping = True
        self._mailbox.wake()
        self._thread.join()
        self._mailbox.close()

    def _run(self) -> None:
        self._selector.register(self._mailbox.socket, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            log.critical("the side channel stopped: leases will run out unread", exc_info=True)
            self._broken = f"{type(error).__name__}: {error}"
        finally:
            for visitor in list(self._wires):
                self._drop(visitor, "the engine is shutting down")
            self._listener.close()
            self._selector.close()

    def _turn(self) -> None:
        ready = self._selector.select(self._patience())
        touched = []
        for key, _ in ready:
            if key.data is not None:
                self._serve(key.data)
                touched.append(key.data)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._mailbox.hush()
        self._heed_engine()
        now = self._clock()
        self._desk.tick(now)
        if self._desk.has_work:
            self._desk.work()
        touched += self._desk.take_told()
        for visitor in touched:
            self._answer(visitor, now)
        for visitor in self._door.overdue(now):
            self._show_out(visitor, "silent for too long")
        if self._accept_from is not None and now >= self._accept_from:
            self._accept_from = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _patience(self) -> float | None:
        due = math.inf
        for at in (self._desk.next_deadline(), self._door.next_deadline(), self._accept_from):
            if at is not None and at < due:
                due = at
        self._sleeps_until = due  # before the mailbox is looked at: see ``runtime.mailbox``
        if self._mailbox or self._desk.has_work:
            return 0.0
        return None if due == math.inf else max(0.0, due - self._clock())

    def _heed_engine(self) -> None:
        for item in self._mailbox.take():
            if isinstance(item, _Sums):
                self._desk.add_sums(item.request, item.rank, item.sums)
            elif isinstance(item, _Lend):
                self._desk.lend(item.request, item.ticket, item.ttl_s, item.at)
            else:
                self._desk.abort(item.request, self._clock())

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:  # no file descriptor or memory left: it would fail again at once
            log.warning("side channel: nobody is let in for %g s: %s", ACCEPT_PAUSE_S, error)
            self._desk.counts["accept_failed"] += 1
            self._selector.unregister(self._listener)
            self._accept_from = self._clock() + ACCEPT_PAUSE_S
            return
        refusal = self._door.refusal(address[0])
        if refusal is not None:
            sock.close()
            self._desk.counts["connections_refused"] += 1
            log.debug("side channel: %s:%d is not let in: %s", *address[:2], refusal)
            return
        try:
            self._let_in(sock, address)
        except OSError as error:  # it left already, or the system has no room to watch it
            log.warning("side channel: %s:%d cannot be let in: %s", *address[:2], error)
            self._desk.counts["accept_failed"] += 1
            sock.close()

    def _let_in(self, sock: socket.socket, address: tuple[str, int]) -> None:
        visitor = Session(f"{address[0]}:{address[1]}")
        channel = Connection(
            sock, MAX_INBOUND_FRAME, MAX_UNSENT, self._security.for_lender(self._place)
        )
        self._wires[visitor] = PolledConnection(channel, self._selector, visitor)
        crowded_out = self._door.enter(visitor, address[0], self._clock())
        if crowded_out is not None:
            self._show_out(crowded_out, "too many others wait to greet")

    def _serve(self, visitor: Session) -> None:
        wire = self._wires.get(visitor)
        if wire is None or visitor.leaving or wire.has_unsent:
            return  # who does not hear us out is not heard: each word would make an answer more
        try:
            bodies = wire.receive()
            self._heed_engine()
            now = self._clock()
            for body in bodies:
                self._desk.hear(visitor, decode_from_reader(body), now)
            if bodies:  # a frame is progress
                self._door.observe(visitor, not visitor.greeted, now)
        except Unauthenticated as error:
            self._desk.counts["unauthenticated"] += 1
            self._warn("side channel: %s is turned away: %s", visitor.name, error)
            self._drop(visitor, str(error))
        except SideChannelLost as error:
            self._drop(visitor, str(error))
        except ProtocolError as error:
            self._desk.reject(visitor, error)

    def _answer(self, visitor: Session, now: float) -> None:
        """Send this turn's answers in one frame, and see whether the visitor loiters."""
        wire = self._wires.get(visitor)
        if wire is None:
            return
        try:
            wire.send(self._desk.take_frames(visitor))
        except SideChannelLost as error:
            self._drop(visitor, str(error))
            return
        if visitor.leaving and not wire.has_unsent:
            self._drop(visitor, "told what was wrong")
            return
        wire.read_on(not visitor.leaving and not wire.has_unsent)
        self._door.observe(visitor, wire.is_midway or not visitor.greeted, now)

    def _warn(self, text: str, *values: object) -> None:
        """At most one line a second: strangers come as often as they like."""
        now = self._clock()
        if now < self._silent_until:
            self._unsaid += 1
            return
        log.warning(text + " (%d more before, unsaid)", *values, self._unsaid)
        self._silent_until, self._unsaid = now + 1.0, 0

    def _show_out(self, visitor: Session, why: str) -> None:
        self._desk.counts["loiterers"] += 1
        self._drop(visitor, why)

    def _drop(self, visitor: Session, why: str) -> None:
        wire = self._wires.pop(visitor, None)
        if wire is None:
            return
        log.debug("side channel: %s left: %s", visitor.name, why)
        self._door.leave(visitor)
        wire.close()


def _half_of_our_files() -> int:
    """Half the file descriptors that this process may open; the rest are the engine's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_VISITORS if soft == resource.RLIM_INFINITY else max(1, soft // 2)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise SideChannelInUse(
            error.errno, f"side_channel_port: cannot listen at {host}:{port}: {error.strerror}"
        ) from error
    listener.setblocking(False)
    return listener
