"""Receives one engine's KV events, orders them without gaps, and passes them to a sink.

::

    publisher PUB ────────► SUB ──► ┌─────────┐ effects ┌──────┐
              ROUTER ◄────► DEALER ► │ Tracker │ ──────► │ sink │
                      monitor ────► └─────────┘         └──────┘

``Tracker`` decides; this module performs its effects.  When a connection breaks, its sockets are
closed, so that everything read from a socket is from one run of the engine: received batches are
used only after the socket's monitor has confirmed that the connection is still the same.  For the
same reason each replay has a socket of its own: late answers to an earlier replay are never read.

No message can end the task.  An exception of the sink ends it, and is logged.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import zmq.asyncio
from xxhash import xxh3_64_intdigest

from pdconn.router.background import Background
from pdconn.router.events.event_sockets import EventSockets, burst
from pdconn.router.events.tracker import Apply, Effect, NeedReplay, Numbered, Reset, State, Tracker
from pdconn.router.prefix.kv_events import BadBatch, Batch, decode_batch
from pdconn.router.router_errors import BadSetting

log = logging.getLogger(__name__)

#: Seconds without an answer after which a replay has failed.  vLLM polls every 100 ms.
REPLAY_SILENCE_S = 3.0
#: Seconds before a broken connection is reopened; ZeroMQ itself retries failed connects.
RECONNECT_S = 0.1
#: Seconds for which the lag of a batch counts as the pod's; an idle pod has no lag.
LAG_KEPT_S = 30.0
#: Seconds between two checks of a source that has published nothing.
LOOK_EVERY_S = 3.0
#: Prompt tokens that an engine computes without an event before a warning is logged.
SILENT_TOKENS = 4096
#: File descriptors of one subscriber, as Linux counts them: three sockets of ZeroMQ, the inner end
#: of the monitor, and two connections.
FILES_A_SUBSCRIBER = 6

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/*\[\]]+):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class EventSource:
    """The address at which one data-parallel rank of an engine publishes KV events.

    Attributes:
        engine: the engine's name in the router.
        rank: data-parallel rank.
        events: address of its PUB socket, ``tcp://HOST:PORT``.
        replay: address of its ROUTER socket; None without one: then every gap and every broken
            connection drops all blocks.
        topic: prefix of its messages' topics.
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
    """State and counters of a source.

    Attributes:
        batches, events: number applied.
        undecodable: events of applied batches that were skipped.
        malformed: messages that could not be decoded at all.
        gaps, replays, restarts: number of gaps and restarts detected, and of replays requested.
        lag_s: from the engine's time stamp of a batch until its arrival; None if the last batch
            arrived long ago, or in a replay.
        silent: why nothing arrives from an engine that computes; None if something does.
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
    silent: str | None = None


class Sink(Protocol):
    """Receiver of a source's events.  Called in the event loop, so it must not block."""

    def apply_batch(self, source: EventSource, batch: Batch) -> None:
        """Apply the next batch of a source."""

    def drop_pod(self, source: EventSource, why: str) -> None:
        """Drop everything that a source has reported."""

    def status_changed(self, source: EventSource, status: Status) -> None:
        """The status of a source changed."""


class Silence(Enum):
    """Why nothing arrives from an engine that computes: the reason and a remedy."""

    NOT_BOUND = (
        "nothing listens at {events}",
        """its --kv-events-config needs "enable_kv_cache_events": true, "publisher": "zmq" and """
        """"endpoint": "tcp://*:{port}": vLLM binds an endpoint with * and connects to any other""",
    )
    NO_EVENTS = (
        "it computes prompts and publishes no event at {events}",
        "events need its prefix caching (--enable-prefix-caching), and events= the port of its "
        '"endpoint"',
    )

    def __init__(self, why: str, remedy: str) -> None:
        self.why = why
        self.remedy = remedy


def _no_answer() -> int | None:
    return None


@dataclass(slots=True)
class _Seen:
    """Counters of a source, and the lag of its last batch with the time until which it counts."""

    batches: int = 0
    events: int = 0
    undecodable: int = 0
    malformed: int = 0
    lag_s: float | None = None
    lag_until_s: float = 0.0


class _SilenceWatch:
    """Detects an engine that computes and publishes nothing; ``found`` is the reason."""

    def __init__(self, computed: Callable[[], int | None], every_s: float) -> None:
        self._computed, self._every_s = computed, every_s
        self.at_s = 0.0
        self.found: Silence | None = None
        self._heard = False
        self._unconnected = 0
        self._computed_before: int | None = None

    def put_off(self) -> None:
        """Check again after ``every_s``."""
        self.at_s = time.monotonic() + self._every_s

    def start_over(self) -> None:
        """Start over on a new connection: it may lead to another engine."""
        self.found, self._heard, self._computed_before = None, False, None
        self._unconnected = 0

    def heard(self) -> None:
        """Note that a batch was applied."""
        self.found, self._heard = None, True

    def look(self, is_up: bool) -> Silence | None:
        """The reason for silence, when it is first detected."""
        if time.monotonic() < self.at_s:
            return None
        self.put_off()
        computed = self._computed()
        if self.found is not None or computed is None or (is_up and self._heard):
            return None
        if not is_up:
            self._unconnected += 1  # checked twice, since the engine may be busy the first time
            self.found = Silence.NOT_BOUND if self._unconnected > 1 else None
        elif self._computed_before is None:
            self._computed_before = computed
        elif computed - self._computed_before >= SILENT_TOKENS:
            self.found = Silence.NO_EVENTS
        return self.found


class Subscriber:
    """Receives the events of one source from ``start`` to ``close``.

    Args:
        context: of all sockets; by default one of its own.  Share one among hundreds of
            sources (each source takes up to 4 of ``zmq.MAX_SOCKETS``).
        now: seconds since the epoch.
        replay_silence_s: a replay without an answer for this long has failed.
        computed: prompt tokens that the engine did not find in its cache since its start; None
            while it reports none.  An engine that computes and publishes nothing is logged once.
        look_every_s: seconds between two checks of that.
    """

    def __init__(
        self,
        source: EventSource,
        sink: Sink,
        *,
        context: zmq.asyncio.Context | None = None,
        now: Callable[[], float] = time.time,
        replay_silence_s: float = REPLAY_SILENCE_S,
        computed: Callable[[], int | None] = _no_answer,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._source, self._sink, self._now = source, sink, now
        self._silence = _SilenceWatch(computed, look_every_s)
        self._context = context
        self._silence_s = replay_silence_s
        self._task = Background(limit=1)
        self._tracker = Tracker()
        self._reported = State.AWAY
        self._seen = _Seen()

    def start_receiving(self) -> None:
        """Start receiving.  Idempotent."""
        name = f"KV events of {self._source.engine} rank {self._source.rank}"
        self._task.spawn(self._receive(), name)

    async def close(self) -> None:
        """Stop receiving and close all sockets."""
        await self._task.close(grace_s=0)

    @property
    def status(self) -> Status:
        """The source's state and counters."""
        tracker, seen, silent = self._tracker, self._seen, self._silence.found
        return Status(
            state=tracker.state,
            batches=seen.batches,
            events=seen.events,
            undecodable=seen.undecodable,
            malformed=seen.malformed,
            gaps=tracker.gaps,
            replays=tracker.replays,
            restarts=tracker.restarts,
            lag_s=seen.lag_s if time.monotonic() < seen.lag_until_s else None,
            silent=None if silent is None else self._say(silent.why),
        )

    # --- the task -------------------------------------------------------------------------

    async def _receive(self) -> None:
        context = self._context or zmq.asyncio.Context()
        try:
            while True:
                sockets = EventSockets(
                    context, self._source.events, self._source.topic, self._silence_s
                )
                try:
                    await self._serve(sockets)
                finally:
                    self._tracker.disconnected()
                    sockets.close()
                self._report()
                await asyncio.sleep(RECONNECT_S)
        finally:
            if self._context is None:
                context.term()

    async def _serve(self, sockets: EventSockets) -> None:
        """Receive until the connection breaks."""
        self._silence.put_off()
        while True:
            await sockets.wait_readable(self._silence.at_s)
            # Read first and query the monitor second, so that nothing read here can be from a
            # connection whose end the monitor has not reported yet.
            published = await burst(sockets.live)
            answers = [] if sockets.replay is None else await burst(sockets.replay)
            broken, made = await sockets.changes()
            if broken:
                return
            if made:
                self._silence.start_over()
                await self._perform(self._tracker.connected(), sockets)
            for frames in published:
                await self._published(frames, sockets)
            await self._answered(answers, sockets)
            self._report()
            self._look(sockets.is_up)
            await asyncio.sleep(0)

    def _look(self, is_up: bool) -> None:
        """Log, once, that an engine computes and nothing arrives from it."""
        silence = self._silence.look(is_up)
        if silence is not None:
            why, remedy = self._say(silence.why), self._say(silence.remedy)
            log.warning("pdconn: KV events: %s; %s %s", why, remedy, self._name)

    def _say(self, words: str) -> str:
        events = self._source.events
        return words.replace("{events}", events).replace("{port}", events.rpartition(":")[2])

    async def _published(self, frames: list[bytes], sockets: EventSockets) -> None:
        item = self._numbered(frames[1], frames[2]) if len(frames) == 3 else None
        if item is None:
            self._seen.malformed += 1
        else:
            await self._perform(self._tracker.live(item), sockets)
            # A replayed batch is old, and the lag of an idle pod's last batch has no meaning.
            if item.batch is not None:
                self._seen.lag_s = self._now() - item.batch.ts
                self._seen.lag_until_s = time.monotonic() + LAG_KEPT_S

    async def _answered(self, answers: list[list[bytes]], sockets: EventSockets) -> None:
        asked = sockets.replay
        for frames in answers:
            if sockets.replay is not asked:
                return  # answers to a replay that was abandoned
            item = None
            if len(frames) == 4 and not frames[0]:
                if frames[2] == _END:
                    await self._perform(self._tracker.replay_ended(), sockets)
                    continue
                item = self._numbered(frames[2], frames[3])
            if item is None:
                self._seen.malformed += 1
            else:
                sockets.note_replay_answer()  # malformed messages do not count as answers
                await self._perform(self._tracker.replayed(item), sockets)
        # Without a replay in progress its deadline has no meaning.
        if sockets.replay_timed_out and sockets.replay is asked and not answers:
            log.warning("pdconn: KV events: replay timed out %s", self._name)
            await self._perform(self._tracker.replay_failed(), sockets)

    def _numbered(self, seq: bytes, payload: bytes) -> Numbered | None:
        number = int.from_bytes(seq, "big", signed=True)
        if len(seq) != 8 or number < 0:
            return None
        batch = None
        try:
            batch = decode_batch(payload)
        except BadBatch as error:
            self._seen.malformed += 1
            log.debug("pdconn: KV events: malformed batch: %s %s", error, self._name)
        return Numbered(number, xxh3_64_intdigest(payload), batch, len(payload))

    async def _perform(self, effects: tuple[Effect, ...], sockets: EventSockets) -> None:
        for effect in effects:
            match effect:
                case Apply(batch):
                    self._apply(batch)
                case Reset(why):
                    log.warning(
                        "pdconn: KV events: all blocks dropped: %s %s", why.value, self._name
                    )
                    self._sink.drop_pod(self._source, why.value)
                case NeedReplay(start) if self._source.replay is not None:
                    log.info("pdconn: KV events: replay requested %s start=%d", self._name, start)
                    await sockets.request_replay(self._source.replay, start)
                case NeedReplay():
                    await self._perform(self._tracker.replay_failed(), sockets)
        if not self._tracker.replaying:
            sockets.close_replay()

    def _apply(self, batch: Batch) -> None:
        self._silence.heard()
        self._seen.batches += 1
        self._seen.events += len(batch.events)
        self._seen.undecodable += batch.num_undecodable
        self._sink.apply_batch(self._source, batch)

    def _report(self) -> None:
        state = self._tracker.state
        if state is not self._reported:
            self._reported = state
            self._sink.status_changed(self._source, self.status)

    @property
    def _name(self) -> str:
        return f"engine={self._source.engine} rank={self._source.rank}"


_END = (-1).to_bytes(8, "big", signed=True)
