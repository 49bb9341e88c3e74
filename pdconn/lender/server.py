"""The lender: a prefill engine's side-channel server, on a thread of its own.

The thread owns the leases.  The engine's thread lends blocks and takes freed leases back; decode
ranks greet, claim, renew and report over TCP::

    engine's thread ── lend, abort_lease ─► SelectedBox ─┐
                    ◄─ take_reports ─ Box of turns ◄─────┤  one thread: LenderSessions,
    decode ranks ◄── frames ──► Connection ──────────────┘  AdmissionControl, sockets

``Lender`` is the engine's end of the boxes, ``_LenderLoop`` what the thread owns.
"""

from __future__ import annotations

import logging
import math
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdconn.integrity.lent import LentSums
from pdconn.lender.checksums import RankSums
from pdconn.lender.sessions import (
    Abort,
    AbortAll,
    AbortUnclaimed,
    ConnectionLimits,
    EngineCommand,
    LenderReport,
    LenderSessions,
    RevokeAll,
    Session,
    Turn,
)
from pdconn.lender.streams import StreamCompletion, StreamGrowth, StreamOffer
from pdconn.lifecycle.admission import AdmissionControl
from pdconn.lifecycle.lease import FreedLease, LeaseOffer
from pdconn.protocol.errors import ProtocolError
from pdconn.protocol.messages import GrownBlocks, Welcome, decode_from_reader
from pdconn.protocol.ticket import Ticket
from pdconn.sidechannel.advertise import is_wildcard, local_host
from pdconn.sidechannel.clock import steady
from pdconn.sidechannel.connection import Connection, SideChannelLost, Unauthenticated
from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.sidechannel.security import Security
from pdconn.threads import (
    Box,
    SelectedBox,
    ThreadDied,
    ThreadReports,
    ThreadTurn,
    Worker,
    put_turn,
)
from transport.closing import Closing

log = logging.getLogger(__name__)

_AT_ONCE = 32
"""Sockets that are read before the messages of the first one are handled."""

_ACCEPTS = 16
"""Connections that one turn accepts."""

PERIOD_S = 0.002
"""Between two turns under load: the longest that a message waits."""

SPARE_TURNS = 16
"""Turns that may follow each other without a pause, after a pause that was long enough."""


class SideChannelInUse(OSError):
    """The side channel's port is taken."""


class LenderBroken(RuntimeError):
    """The lender's thread has died; leases would never end, so the engine must stop."""


class TurnPacer:
    """Spaces turns: one per ``period_s``, of which the first ``spare`` come without waiting.

    A wake-up costs several times as much as the messages that it handles, since the thread's code
    and data have left the processor's caches.  So turns are spaced under load, and messages that
    arrive between two turns are handled together.  A lender with few readers never waits::

        turns   | | | |              first ones at once, as they are needed
                | | | | | | | |      then one each period, while messages keep coming

    Example:
        >>> pacer = TurnPacer(period_s=1.0, spare=2)
        >>> [pacer.took(10.0), pacer.took(10.0), pacer.took(10.0)]
        [0.0, 0.0, 1.0]
    """

    def __init__(self, period_s: float = PERIOD_S, spare: int = SPARE_TURNS) -> None:
        self._period_s = period_s
        self._spare_s = period_s * spare
        self._paid_until = float("-inf")

    def took(self, now: float) -> float:
        """Record a turn at ``now``; returns how many seconds to wait before the next one."""
        self._paid_until = max(self._paid_until, now) + self._period_s
        return max(0.0, self._paid_until - self._spare_s - now)


class Lender(Closing):
    """Serves ``welcome`` and leases at ``host:port`` until closed.

    Args:
        welcome: our geometry; a Hello must name its incarnation.
        host: address to listen at; ``0.0.0.0`` and ``::`` are all addresses.
        port: 0 picks a free one (:attr:`port`).
        advertised: the host that tickets name; ``host`` unless given.
        why_unreachable: returns why an address cannot read KV and is refused; empty if it can.
        security: how readers must authenticate; by default they need not.
        is_summing: whether checksums of what is lent are added.
        limits: bounds of connections.
        clock: seconds that never go back.

    Raises:
        SideChannelInUse: the port is taken.
        OSError: the address cannot be listened at.
        Unprotected: ``host`` or ``advertised`` is reachable from other hosts, and nothing
            authenticates them.
    """

    def __init__(
        self,
        welcome: Welcome,
        host: str,
        port: int,
        *,
        advertised: str | None = None,
        why_unreachable: Callable[[str], str] | None = None,
        security: Security | None = None,
        is_summing: bool = False,
        limits: ConnectionLimits | None = None,
        clock: Callable[[], float] = steady,
    ) -> None:
        security = security or Security()
        advertised = host if advertised is None else advertised
        security.require(host)
        security.require(advertised)
        door = _Door(
            _listen(host, port),
            security,
            advertised,
            _within_file_limit(limits or ConnectionLimits()),
            why_unreachable or (lambda host: ""),
        )
        self._clock = clock
        self._inbox: SelectedBox[EngineCommand] = SelectedBox()
        self._reported: ThreadReports[LenderReport] = ThreadReports()
        self.port: int = door.port
        outbox = self._reported.outbox
        loop = _LenderLoop(self._inbox, outbox, door, welcome, is_summing=is_summing, clock=clock)
        self._worker = Worker("pdconn-lender", loop.run_lender, self._inbox, outbox)
        self._worker.start_thread()

    @property
    def counts(self) -> Counter[str]:
        """A copy of the counts since :meth:`take_lease_counts`."""
        self._reported.take_in()
        return Counter(self._reported.counts)

    def lend(self, request: str, ticket: bytes, ttl_s: float) -> None:
        """Lend the blocks of ``request``, until :meth:`take_reports` returns its lease.

        Args:
            ticket: digest of the ticket.
            ttl_s: how long the lease, each claim and each renewal hold.

        Raises:
            ValueError: ``ttl_s`` is below a millisecond.
        """
        # The thread is not woken unless it would sleep longer than the lease lasts: a claim, which
        # comes by a socket, wakes it anyway.
        now = self._clock()
        self._inbox.put_before(LeaseOffer(request, ticket, ttl_s, now), now + ttl_s)

    def open_stream(
        self, request: str, stream: str, header: tuple[int, str, str], ttl_s: float
    ) -> None:
        """Let readers that know ``stream`` follow ``request``, which is about to be computed.

        Its lease grows until :meth:`complete_stream` or :meth:`abort_lease`; as after
        :meth:`lend`, :meth:`take_reports` returns it once, and ``request`` may be used again.

        Args:
            header: tokens that will be lent, the digest of the prompt, and that of its adapter.
            ttl_s: how long each claim and each renewal hold.
        """
        self._inbox.put(StreamOffer(request, stream, *header, ttl_s, self._clock()))

    def grow_stream(self, request: str, blocks: tuple[GrownBlocks, ...]) -> None:
        """Announce blocks that are written; they stay as they are until the lease has ended."""
        self._inbox.put(StreamGrowth(request, blocks))

    def complete_stream(self, ticket: Ticket, ttl_s: float) -> None:
        """As :meth:`lend`, for the request of an open stream; nothing if its lease has ended."""
        offer = LeaseOffer(ticket.request_id, ticket.digest(), ttl_s, self._clock())
        self._inbox.put(StreamCompletion(offer, ticket))

    def add_sums(self, request: str, rank: int, sums: LentSums | None) -> None:
        """Add the sums that ``rank`` made of what ``request`` lends, for readers that verify."""
        self._inbox.put(RankSums(request, rank, sums))

    def abort_lease(self, request: str, *, if_unclaimed: bool = False) -> None:
        """Free the blocks as soon as no claim on them holds, or only if none was made."""
        self._inbox.put(AbortUnclaimed(request) if if_unclaimed else Abort(request))

    def abort_all(self) -> None:
        """Free all lent blocks, each lease's as soon as no claim on it holds."""
        self._inbox.put(AbortAll())

    def revoke_all(self) -> None:
        """Free all lent blocks now: reads of them are not confirmed."""
        self._inbox.put(RevokeAll())

    def take_reports(self) -> list[LenderReport]:
        """Leases that ended, and requests that readers follow, since the last call.  Never blocks.

        They are in order: a name is used again after the end of its lease was reported, so what is
        reported after that is of the next lease.

        Raises:
            LenderBroken: the lender's thread has died.
        """
        reported = self._reported
        reported.take_in()
        if reported.error is not None:
            raise LenderBroken(reported.error)
        if not reported.reports:  # in most steps
            return []
        reports, reported.reports = reported.reports, []
        return reports

    def take_freed(self) -> list[FreedLease]:
        """As :meth:`take_reports`, for an engine that opens no streams."""
        return [report for report in self.take_reports() if isinstance(report, FreedLease)]

    def take_lease_counts(self) -> dict[str, int]:
        """Leases, claims, refusals and connections counted since the last call."""
        return self._reported.remove_counts()

    def close(self) -> None:
        """Stop serving and close every socket.  Idempotent."""
        self._worker.end_thread()
        self._inbox.free_sockets()


class _Door:
    """The listening socket, its limits, and how its connections authenticate.

    Attributes:
        accept_from: when it accepts again, after the system could not open a connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        security: Security,
        advertised: str,
        limits: ConnectionLimits,
        why_unreachable: Callable[[str], str],
    ) -> None:
        self.listener, self.limits, self.why_unreachable = listener, limits, why_unreachable
        self.port: int = listener.getsockname()[1]
        self._policy = security.for_lender(f"{advertised}:{self.port}")
        self.accept_from = math.inf

    def connection(self, sock: socket.socket) -> Connection:
        """A connection over an accepted socket; OSError where the peer has closed it."""
        limits, policy = self.limits, self._policy
        if policy is not None:  # a router may have written this address into the ticket
            policy = policy.reached_at(f"{local_host(sock)}:{self.port}")
        return Connection(sock, limits.frame_nbytes, limits.unsent_nbytes, policy)


class _LenderLoop:
    """What the lender's thread owns: sessions with their leases, and sockets."""

    def __init__(
        self,
        inbox: SelectedBox[EngineCommand],
        outbox: Box[ThreadTurn[LenderReport] | ThreadDied],
        door: _Door,
        welcome: Welcome,
        *,
        is_summing: bool,
        clock: Callable[[], float],
    ) -> None:
        self._inbox, self._outbox, self._door, self._clock = inbox, outbox, door, clock
        self._warn = QuietLog(log, clock).warning
        self._sessions = LenderSessions(welcome, is_summing, self._warn, door.limits)
        self._admission: AdmissionControl[Session] = AdmissionControl(door.limits)
        self._connections: dict[Session, Connection] = {}
        self._last = Turn()
        self._pacer = TurnPacer()
        self._rest_s = 0.0
        self._selector = selectors.DefaultSelector()

    def run_lender(self) -> None:
        """Take turns until the inbox is closed."""
        self._selector.register(self._inbox.socket, selectors.EVENT_READ, None)
        self._selector.register(self._door.listener, selectors.EVENT_READ, None)
        try:
            while not self._inbox.is_closed:
                self._turn()
        finally:
            for session in list(self._connections):
                self._close(session, "the engine is shutting down")
            self._report()
            self._door.listener.close()
            self._selector.close()

    def _turn(self) -> None:
        """Wait, handle what arrived, publish, reply, and close what stalled."""
        timeout_s = self._timeout_s()
        if self._rest_s > 0.0 and timeout_s != 0.0:
            # Under load, wait for more messages, but not longer than until something is due.
            time.sleep(self._rest_s if timeout_s is None else min(self._rest_s, timeout_s))
            timeout_s = self._timeout_s()
        touched = self._take_in(self._selector.select(timeout_s))
        self._apply_commands()
        # The clock is read after the sockets: a claim holds from now on, and was sent earlier.
        now = self._clock()
        self._rest_s = self._pacer.took(now)
        self._last = self._sessions.turn(now)
        touched += self._last.pending
        self._report()  # before the replies: a test that has a reply finds it counted
        for session in touched:
            self._reply(session, now)
        if now >= self._admission.deadline:
            for session in self._admission.overdue(now):
                self._time_out(session, "stalled for too long")
        if now >= self._door.accept_from:
            self._door.accept_from = math.inf
            self._selector.register(self._door.listener, selectors.EVENT_READ, None)
        self._report()

    def _take_in(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> list[Session]:
        """Accept connections and handle messages; returns the sessions with messages."""
        touched: list[Session] = []
        for key, _ in ready:
            if key.data is not None:
                touched.append(key.data)
            elif key.fileobj is self._door.listener:
                for _ in range(_ACCEPTS):
                    if not self._accept():
                        break
            else:
                self._inbox.drain_socket()
        for at in range(0, len(touched), _AT_ONCE):
            self._receive(touched[at : at + _AT_ONCE])
        return touched

    def _timeout_s(self) -> float | None:
        """How long to sleep; None until a socket is ready."""
        due = min(self._last.wake_at, self._admission.deadline, self._door.accept_from)
        self._inbox.sleeps_until = due  # published before the box is looked at
        if self._inbox.items:
            return 0.0
        return None if due == math.inf else max(0.0, due - self._clock())

    def _apply_commands(self) -> None:
        if self._inbox.items:
            now = self._clock()
            for command in self._inbox.take_all():
                self._sessions.apply_command(command, now)

    def _report(self) -> None:
        """Pass freed leases and counts to the engine's thread."""
        put_turn(self._outbox, self._sessions.reports, self._sessions.counts)

    def _accept(self) -> bool:
        """Accept one connection; whether another may wait."""
        try:
            sock, address = self._door.listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return False
        except OSError as error:  # no file descriptor or memory left: a retry would fail at once
            pause_s = self._door.limits.accept_pause_s
            log.warning(
                "pdconn: accept() failed; pausing new connections for %g s: %s", pause_s, error
            )
            self._sessions.counts["accept_failed"] += 1
            self._selector.unregister(self._door.listener)
            self._door.accept_from = self._clock() + pause_s
            return False
        refusal = self._admission.refusal(address[0]) or self._door.why_unreachable(address[0])
        if refusal:
            sock.close()
            self._sessions.counts["connections_refused"] += 1
            log.debug("pdconn: connection refused: %s peer=%s:%d", refusal, *address[:2])
            return True
        try:
            self._open(sock, address)
        except OSError as error:  # the peer has closed, or the system cannot watch the socket
            log.warning("pdconn: connection failed: %s peer=%s:%d", error, *address[:2])
            self._sessions.counts["accept_failed"] += 1
            sock.close()
        return True

    def _open(self, sock: socket.socket, address: tuple[str, int]) -> None:
        session = Session(f"{address[0]}:{address[1]}")
        connection = self._door.connection(sock)
        connection.watch_socket(self._selector, session)
        self._connections[session] = connection
        crowded_out = self._admission.admit(session, address[0], self._clock())
        if crowded_out is not None:
            self._time_out(crowded_out, "too many connections stall")

    def _receive(self, sessions: Sequence[Session]) -> None:
        """Read all these sockets, then handle their messages, as of a time after the last read."""
        arrived = [(session, bodies) for session in sessions if (bodies := self._bodies(session))]
        if not arrived:
            return
        # After the sockets and before their messages: the lease that a claim is for is in the table
        # by then, since the ticket was sent after it was lent.
        self._apply_commands()
        now = self._clock()
        for session, bodies in arrived:
            try:
                for body in bodies:
                    self._sessions.handle_messages(session, decode_from_reader(body), now)
                self._observe(session, not session.greeted, now)  # a whole frame is progress
            except ProtocolError as error:
                self._sessions.reject(session, error)

    def _bodies(self, session: Session) -> list[bytes]:
        """Messages of a session that are complete."""
        connection = self._connections.get(session)
        if connection is None or session.leaving or connection.has_unsent:
            return []  # backpressure: do not read while our replies are unsent
        try:
            return connection.receive_frames()
        except Unauthenticated as error:
            self._sessions.counts["connections_unauthenticated"] += 1
            self._warn("pdconn: connection not authenticated: %s peer=%r", error, session.name)
            self._close(session, str(error))
        except SideChannelLost as error:
            self._close(session, str(error))
        return []

    def _reply(self, session: Session, now: float) -> None:
        """Send this turn's replies, and record whether the session stalls."""
        connection = self._connections.get(session)
        if connection is None:
            return
        try:
            connection.send_frames(self._sessions.take_frames(session) if session.replies else [])
        except SideChannelLost as error:
            self._close(session, str(error))
            return
        if session.leaving and not connection.has_unsent:
            self._close(session, "its last reply is sent")
            return
        connection.read_on(not session.leaving and not connection.has_unsent)
        self._observe(session, connection.is_midway or not session.greeted, now)

    def _observe(self, session: Session, stalls: bool, now: float) -> None:
        if session.stalls != stalls:
            session.stalls = stalls
            self._admission.note_stall(session, stalls, now)

    def _time_out(self, session: Session, why: str) -> None:
        self._sessions.counts["connections_timed_out"] += 1
        self._close(session, why)

    def _close(self, session: Session, why: str) -> None:
        connection = self._connections.pop(session, None)
        if connection is None:
            return
        session.leaving = True
        log.debug("pdconn: connection closed: %s peer=%r", why, session.name)
        self._admission.remove_session(session)
        connection.close()


def _within_file_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """``limits`` within half of the process's file descriptors; the engine needs the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    return replace(limits, connections=min(limits.connections, max(1, soft // 2)))


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6 and is_wildcard(host):  # serve IPv4 too, on every system
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
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
