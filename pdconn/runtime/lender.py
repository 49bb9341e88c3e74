"""The lender: a prefill engine's side-channel server, on a thread of its own.

It owns the leases.  The engine posts what it lends and collects what is free
again; decode ranks greet, claim, renew and report over TCP::

    engine thread ── lend, abort ──► mailbox ─┐
                  ◄── collect ── freed        ├── one thread: leases + sockets
    decode ranks ◄── frames ──────────────────┘

The mailbox is emptied before any socket is read, so a lease is in the book before
a claim for it can be.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdconn.lifecycle import lease
from pdconn.lifecycle.lease import Denied
from pdconn.lifecycle.leases import FreedLease, LeaseBook
from pdconn.protocol.errors import MessageError, ProtocolError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Describe,
    Described,
    Done,
    FromLender,
    FromReader,
    Granted,
    Hello,
    Reader,
    Refused,
    Rejected,
    Renew,
    Welcome,
    decode_from_reader,
    encode,
)
from pdconn.runtime.channel import Channel, ChannelLost
from pdconn.runtime.mailbox import Mailbox

log = logging.getLogger(__name__)

MAX_INBOUND_FRAME = 1 << 20
MAX_CONNECTIONS = 4096
GREETING_TIMEOUT_S = 10.0


class SideChannelInUse(OSError):
    """The side channel's port is taken."""


@dataclass(frozen=True, slots=True)
class _Lend:
    request: str
    blocks: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request: str


@dataclass(slots=True)
class _Visitor:
    """A connection: who it is once it has greeted, and when it must have."""

    channel: Channel
    name: str
    greet_by: float
    greeted: bool = False
    leaving: bool = False
    answers: list[FromLender] = field(default_factory=list)
    claimed: set[tuple[str, Reader]] = field(default_factory=set)


class Lender:
    """Serves ``welcome`` and leases at ``host:port`` until closed.

    Args:
        welcome: our geometry; its incarnation is what visitors must want.
        host: address to listen at, which tickets name too.
        port: 0 picks a free one; see :attr:`port`.
        clock: seconds that never go back.

    Raises:
        SideChannelInUse: the port is taken.
        OSError: the address cannot be listened at.
    """

    def __init__(
        self,
        welcome: Welcome,
        host: str,
        port: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._welcome = welcome
        self._welcome_frame = encode([welcome])
        self._described_frame = encode([Described.of(welcome)])
        self._clock = clock
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._mailbox: Mailbox[_Lend | _Abort] = Mailbox()
        self._book = LeaseBook()
        self._freed: deque[FreedLease] = deque()
        self._visitors: dict[int, _Visitor] = {}
        self._strangers: deque[_Visitor] = deque()
        self._touched: dict[int, _Visitor] = {}
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="pdconn-lender", daemon=True)
        self._thread.start()

    def lend(self, request: str, blocks: bytes, ttl_s: float) -> None:
        """Blocks with digest ``blocks`` stay as they are until collected as freed."""
        self._mailbox.post(_Lend(request, blocks, ttl_s))

    def abort(self, request: str) -> None:
        """Take the blocks back as soon as no granted claim can be believed."""
        self._mailbox.post(_Abort(request))

    def collect(self) -> list[FreedLease]:
        """Leases that ended since the last call; never blocks."""
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        return freed

    def take_counts(self) -> dict[str, int]:
        """Leases, claims and refusals counted since the last call."""
        counts, self.counts = self.counts, Counter()
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
        except Exception:
            log.critical("the side channel stopped: leases will run out unread", exc_info=True)
        finally:
            for visitor in list(self._visitors.values()):
                self._drop(visitor, "the engine is shutting down")
            self._listener.close()
            self._selector.close()

    def _turn(self) -> None:
        ready = self._selector.select(self._patience())
        for item in self._mailbox.take():
            self._obey(item)
        now = self._clock()
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif key.data is not None:
                self._serve(key.data, events)
        self._note(self._book.tick(self._clock()))
        touched, self._touched = self._touched, {}
        for visitor in touched.values():
            self._answer(visitor)
        self._drop_the_silent(self._clock())

    def _patience(self) -> float | None:
        times = [self._strangers[0].greet_by] if self._strangers else []
        deadline = self._book.next_deadline()
        if deadline is not None:
            times.append(deadline)
        return max(0.0, min(times) - self._clock()) if times else None

    def _drop_the_silent(self, now: float) -> None:
        """Who came first must greet first, so the queue is in order of time."""
        while self._strangers and (
            self._strangers[0].greeted or self._strangers[0].greet_by <= now
        ):
            visitor = self._strangers.popleft()
            if not visitor.greeted:
                self._drop(visitor, "no greeting in time")

    def _obey(self, item: _Lend | _Abort) -> None:
        now = self._clock()
        if isinstance(item, _Lend):
            self.counts["lent"] += 1
            self._book.lend(item.request, item.blocks, item.ttl_s, now)
        else:
            self._note(self._book.abort(item.request, now))

    def _note(self, freed: list[FreedLease]) -> None:
        for ended in freed:
            self.counts[f"freed_{ended.why}"] += 1
            self._freed.append(ended)

    def _accept(self, now: float) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            log.warning("side channel: a connection could not be accepted: %s", error)
            return
        if len(self._visitors) >= MAX_CONNECTIONS:
            sock.close()
            self.counts["connections_refused"] += 1
            return
        name = f"{address[0]}:{address[1]}"
        visitor = _Visitor(Channel(sock, MAX_INBOUND_FRAME), name, now + GREETING_TIMEOUT_S)
        self._visitors[id(visitor)] = visitor
        self._strangers.append(visitor)
        self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _serve(self, visitor: _Visitor, events: int) -> None:
        self._touched[id(visitor)] = visitor
        try:
            if events & selectors.EVENT_WRITE:
                visitor.channel.flush()
            if events & selectors.EVENT_READ and not visitor.leaving:
                for body in visitor.channel.receive():
                    for message in decode_from_reader(body):
                        self._hear(visitor, message)
        except ChannelLost as error:
            self._drop(visitor, str(error))
        except ProtocolError as error:
            self.counts["bad_messages"] += 1
            log.warning("side channel: %s said something wrong: %s", visitor.name, error)
            self._reject(visitor, error.field, str(error.expected), str(error.seen))

    def _hear(self, visitor: _Visitor, message: FromReader) -> None:
        if visitor.leaving:
            return
        if isinstance(message, Hello):
            self._greet(visitor, message)
        elif isinstance(message, Describe):
            self.counts["described"] += 1
            visitor.channel.send(self._described_frame)
            visitor.leaving = True
        elif not visitor.greeted:
            raise MessageError("first message", "hello", type(message).__name__.lower())
        elif isinstance(message, Claim):
            self.counts["claims"] += 1
            now = self._clock()
            answer = self._book.claim(message.request, message.reader, message.blocks, now)
            if isinstance(answer, Denied):
                self.counts[f"refused_{answer.why}"] += 1
            else:
                visitor.claimed.add((message.request, message.reader))
            visitor.answers.append(_reply(message, answer))
        elif isinstance(message, Renew):
            self.counts["renewals"] += 1
            renewed = self._book.renew(message.request, message.reader, self._clock())
            visitor.answers.append(_reply(message, renewed))
        elif isinstance(message, Done):
            self._done(visitor, message)

    def _done(self, visitor: _Visitor, message: Done) -> None:
        """Only who claimed may end a claim that holds; others could be a mistake or a lie."""
        now, claim = self._clock(), (message.request, message.reader)
        if claim not in visitor.claimed and self._book.is_claimed(*claim, now):
            self.counts["dones_of_others"] += 1
            return
        visitor.claimed.discard(claim)
        self._note(self._book.done(message.request, message.reader, now))

    def _greet(self, visitor: _Visitor, hello: Hello) -> None:
        if visitor.greeted:
            self._reject(visitor, "hello", "one on a connection", "another")
        elif hello.version != PROTOCOL_VERSION:
            self._reject(visitor, "version", str(PROTOCOL_VERSION), str(hello.version))
        elif hello.wants != self._welcome.incarnation:
            self._reject(visitor, "incarnation", self._welcome.incarnation, hello.wants)
        else:
            visitor.greeted = True
            visitor.name = f"{hello.engine_id} at {visitor.name}"
            visitor.channel.send(self._welcome_frame)

    def _reject(self, visitor: _Visitor, field: str, expected: str, seen: str) -> None:
        self.counts["rejected"] += 1
        visitor.answers.append(Rejected(field, expected[:256], seen[:256]))
        visitor.leaving = True

    def _answer(self, visitor: _Visitor) -> None:
        """Send this turn's answers in one frame, and watch for writing if it must wait."""
        if id(visitor) not in self._visitors:
            return
        try:
            if visitor.answers:
                answers, visitor.answers = visitor.answers, []
                visitor.channel.send(encode(answers))
        except ChannelLost as error:
            self._drop(visitor, str(error))
            return
        if visitor.leaving and not visitor.channel.has_unsent:
            self._drop(visitor, "rejected")
            return
        wanted = selectors.EVENT_WRITE if visitor.channel.has_unsent else 0
        if not visitor.leaving:
            wanted |= selectors.EVENT_READ
        if wanted != self._selector.get_key(visitor.channel.socket).events:
            self._selector.modify(visitor.channel.socket, wanted, visitor)

    def _drop(self, visitor: _Visitor, why: str) -> None:
        if self._visitors.pop(id(visitor), None) is None:
            return
        log.debug("side channel: %s left: %s", visitor.name, why)
        self._selector.unregister(visitor.channel.socket)
        visitor.channel.close()


def _reply(message: Claim | Renew, answer: lease.Granted | Denied) -> Granted | Refused:
    pull = message.reader.pull
    if isinstance(answer, Denied):
        return Refused(message.seq, message.request, pull, answer.why, answer.detail)
    return Granted(message.seq, message.request, pull, max(1, int(answer.ttl_s * 1000)))


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
