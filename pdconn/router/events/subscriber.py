"""One engine's KV events off the wire, in order and without gaps, into a sink.

::

    publisher PUB ────────► SUB ──► ┌─────────┐ effects ┌──────┐
              ROUTER ◄────► DEALER ► │ Tracker │ ──────► │ sink │
                      monitor ────► └─────────┘         └──────┘

``Tracker`` decides; here its decisions are performed.  A connection that breaks takes its
sockets with it, so that what was read from a socket is from one engine only: before anything that
was read is used, the socket's monitor is asked whether the connection still was that one.  Each
replay has a socket of its own for the same reason: what comes late, comes to nobody.

Nothing from the wire ends the task.  What a sink raises does, and is logged.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest
from zmq.utils.monitor import parse_monitor_message

from pdconn.router.background import Background
from pdconn.router.errors import BadSetting
from pdconn.router.events.tracker import Apply, Effect, NeedReplay, Numbered, Reset, State, Tracker
from pdconn.router.prefix.events import MAX_NBYTES, BadBatch, Batch, decode_batch

log = logging.getLogger(__name__)

#: A replay that says nothing for so long has failed.  vLLM looks every 100 ms at the latest.
REPLAY_SILENCE_S = 3.0
#: Before a broken connection is made anew; one that cannot be made is up to ZeroMQ.
RECONNECT_S = 0.1
#: Messages that a socket holds for us.  vLLM's ROUTER drops what we do not take off it.
LIVE_HWM, REPLAY_HWM = 10_000, 100_000
#: Messages that are handled before other tasks have their turn.
BURST = 64

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/*\[\]]+):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one data-parallel rank of an engine says what its prefix cache holds.

    Attributes:
        engine: the router's name for it.
        rank: data-parallel rank.
        events: address of its PUB socket, ``tcp://HOST:PORT``.
        replay: address of its ROUTER socket; None where it has none: then every gap costs all
            that is known, as does every broken connection.
        topic: what the topic of its messages begins with.
    """

    engine: str
    rank: int
    events: str
    replay: str | None
    topic: str = ""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise BadSetting("rank", "a data-parallel rank from 0", self.rank)
        _check("events", self.events)
        if self.replay is not None:
            _check("replay", self.replay)


def _check(field: str, address: str) -> None:
    match = _TCP.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise BadSetting(field, "tcp://HOST:PORT", address)


@dataclass(frozen=True, slots=True)
class Status:
    """How a source does.

    Attributes:
        batches, events: that were applied.
        undecodable: events left out of those.
        malformed: messages that could not be read at all.
        gaps, replays, restarts: noticed, asked for, noticed.
        lag_s: from the engine's clock at the last batch applied to ours when it was.
    """

    state: State = State.AWAY
    batches: int = 0
    events: int = 0
    undecodable: int = 0
    malformed: int = 0
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    lag_s: float | None = None


class Sink(Protocol):
    """Who wants to know.  Called from the event loop, and not to block it."""

    def apply(self, source: EventSource, batch: Batch) -> None:
        """The next batch of a source."""

    def reset(self, source: EventSource, why: str) -> None:
        """Forget all that a source has said."""

    def state(self, source: EventSource, status: Status) -> None:
        """The state of a source is another one now."""


class Subscriber:
    """Listens to one source from ``start`` to ``close``.

    Args:
        context: of all sockets; one of its own where there is none.  Whoever has hundreds of
            sources shares one (each source takes up to 4 of ``zmq.MAX_SOCKETS``).
        now: the time in seconds since the epoch, as engines tell it.
    """

    def __init__(
        self,
        source: EventSource,
        sink: Sink,
        *,
        context: zmq.asyncio.Context | None = None,
        now: Callable[[], float] = time.time,
        replay_silence_s: float = REPLAY_SILENCE_S,
    ) -> None:
        self._source, self._sink, self._now = source, sink, now
        self._context = context
        self._silence_s = replay_silence_s
        self._task = Background(limit=1)
        self._tracker = Tracker()
        self._said = State.AWAY
        self._batches = self._events = self._undecodable = self._malformed = 0
        self._lag_s: float | None = None

    def start(self) -> None:
        """Begin to listen; a second time does nothing."""
        name = f"kv events of {self._source.engine} rank {self._source.rank}"
        self._task.spawn(self._listen(), name)

    async def close(self) -> None:
        """Stop listening; nothing stays open."""
        await self._task.close(grace_s=0)

    @property
    def status(self) -> Status:
        """How the source does now."""
        tracker = self._tracker
        return Status(
            state=tracker.state,
            batches=self._batches,
            events=self._events,
            undecodable=self._undecodable,
            malformed=self._malformed,
            gaps=tracker.gaps,
            replays=tracker.replays,
            restarts=tracker.restarts,
            lag_s=self._lag_s,
        )

    # --- the task -------------------------------------------------------------------------

    async def _listen(self) -> None:
        context = self._context or zmq.asyncio.Context()
        try:
            while True:
                line = _Line(context, self._source, self._silence_s)
                try:
                    await self._serve(line)
                finally:
                    self._tracker.disconnected()
                    line.close()
                self._tell()
                await asyncio.sleep(RECONNECT_S)
        finally:
            if self._context is None:
                context.term()

    async def _serve(self, line: _Line) -> None:
        """Until the connection breaks."""
        while True:
            await line.something()
            # Read first and ask the monitor second, so that nothing read here can be of a
            # connection that it has not told us about.
            published = await _burst(line.live)
            answers = [] if line.replay is None else await _burst(line.replay)
            broken, made = await line.changes()
            if broken:
                return
            if made:
                await self._perform(self._tracker.connected(), line)
            for frames in published:
                await self._published(frames, line)
            await self._answered(answers, line)
            self._tell()
            await asyncio.sleep(0)

    async def _published(self, frames: list[bytes], line: _Line) -> None:
        item = self._numbered(frames[1], frames[2]) if len(frames) == 3 else None
        if item is None:
            self._malformed += 1
        else:
            await self._perform(self._tracker.live(item), line)

    async def _answered(self, answers: list[list[bytes]], line: _Line) -> None:
        asked = line.replay
        for frames in answers:
            if line.replay is not asked:
                return  # of a question that nobody asks any more
            item = None
            if len(frames) == 4 and not frames[0]:
                if frames[2] == _END:
                    await self._perform(self._tracker.replay_ended(), line)
                    continue
                item = self._numbered(frames[2], frames[3])
            if item is None:
                self._malformed += 1
            else:
                line.heard()  # junk does not keep a replay going
                await self._perform(self._tracker.replayed(item), line)
        if line.silent and line.replay is asked and not answers:
            log.warning("kv events: no replay from %s", self._name)
            await self._perform(self._tracker.replay_failed(), line)

    def _numbered(self, seq: bytes, payload: bytes) -> Numbered | None:
        number = int.from_bytes(seq, "big", signed=True)
        if len(seq) != 8 or number < 0:
            return None
        batch = None
        try:
            batch = decode_batch(payload)
        except BadBatch as error:
            self._malformed += 1
            log.debug("kv events: unreadable batch from %s: %s", self._name, error)
        return Numbered(number, xxh3_64_intdigest(payload), batch, len(payload))

    async def _perform(self, effects: tuple[Effect, ...], line: _Line) -> None:
        for effect in effects:
            match effect:
                case Apply(batch):
                    self._apply(batch)
                case Reset(why):
                    log.warning("kv events: forget %s: %s", self._name, why.value)
                    self._sink.reset(self._source, why.value)
                case NeedReplay(start) if self._source.replay is not None:
                    log.info("kv events: ask %s for batches from %d", self._name, start)
                    await line.ask(self._source.replay, start)
                case NeedReplay():
                    await self._perform(self._tracker.replay_failed(), line)
        if not self._tracker.replaying:
            line.hang_up()

    def _apply(self, batch: Batch) -> None:
        self._batches += 1
        self._events += len(batch.events)
        self._undecodable += batch.num_undecodable
        self._lag_s = self._now() - batch.ts
        self._sink.apply(self._source, batch)

    def _tell(self) -> None:
        state = self._tracker.state
        if state is not self._said:
            self._said = state
            self._sink.state(self._source, self.status)

    @property
    def _name(self) -> str:
        return f"engine={self._source.engine} rank={self._source.rank}"


# --- sockets ------------------------------------------------------------------------------

_END = (-1).to_bytes(8, "big", signed=True)


class _Line:
    """The sockets of one connection.

    Attributes:
        live: what is published.
        replay: answers to the question under way, if any.
    """

    def __init__(self, context: zmq.asyncio.Context, source: EventSource, silence_s: float) -> None:
        self._context, self._silence_s = context, silence_s
        self._deadline = 0.0
        self._up = False
        self.replay: zmq.asyncio.Socket | None = None
        self.live = _socket(context, zmq.SUB, LIVE_HWM)
        self._monitor = self.live.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        )
        self.live.subscribe(source.topic)
        self.live.connect(source.events)

    def close(self) -> None:
        self.hang_up()
        self.live.disable_monitor()
        self._monitor.close(linger=0)
        self.live.close(linger=0)

    async def something(self) -> None:
        """Wait until a socket has something, or the replay has said nothing for too long."""
        poller = zmq.asyncio.Poller()
        for socket in (self.live, self._monitor, self.replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        left_s = None if self.replay is None else max(0.0, self._deadline - time.monotonic())
        await poller.poll(None if left_s is None else int(left_s * 1e3) + 1)

    async def changes(self) -> tuple[bool, bool]:
        """Whether the connection broke since it was made, and whether it was made just now."""
        made = False
        for frames in await _burst(self._monitor):
            if parse_monitor_message(frames)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._up = made = True
            elif self._up:
                return True, made
        return False, made

    # --- replay ---------------------------------------------------------------------------

    async def ask(self, address: str, start: int) -> None:
        """Ask for batches from ``start`` on, and for no others any more."""
        self.hang_up()
        self.replay = _socket(self._context, zmq.DEALER, REPLAY_HWM)
        self.replay.connect(address)
        self.heard()
        await self.replay.send_multipart([b"", start.to_bytes(8, "big")])

    def heard(self) -> None:
        self._deadline = time.monotonic() + self._silence_s

    @property
    def silent(self) -> bool:
        return time.monotonic() >= self._deadline

    def hang_up(self) -> None:
        if self.replay is not None:
            self.replay.close(linger=0)
            self.replay = None


def _socket(context: zmq.asyncio.Context, kind: int, hwm: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = True
    socket.rcvhwm = hwm
    socket.maxmsgsize = MAX_NBYTES
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 30, 10, 3
    return socket


async def _burst(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    with suppress(zmq.Again):
        while len(messages) < BURST:
            messages.append(await socket.recv_multipart(zmq.NOBLOCK))
    return messages
