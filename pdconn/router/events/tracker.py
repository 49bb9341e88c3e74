"""KV event batches in sequence: which to apply, and when to request a replay.  Pure.

A publisher numbers its batches from 0 and keeps the last few thousand for replay.  A subscriber
misses batches when it connects late, is slow, or loses its connection; and an engine that
restarts begins at 0 with an empty cache.  One ``Tracker`` for each engine and rank turns what
arrives into a sequence without gaps, as effects: ``Apply``, ``Reset``, ``NeedReplay``.

The state of knowledge about an engine's cache is always one of::

    state       up to date   all of it   because
    AWAY        no           -           there is no connection
    SYNCING     no           -           the first replay since the engine started is in progress
    STALE       no           -           a replay is in progress that closes a gap, or that shows
                                         whether the engine restarted meanwhile
    LIVE        yes          yes
    INCOMPLETE  yes          no          blocks stored before some batch are unknown

    AWAY ──connected, nothing known──► SYNCING ──ended: began at 0──► LIVE ◄──┐
      │                                   └──failed, or began later──┐        │ cleared
      │                                                              ▼        │
      └──connected, something known──► STALE                     INCOMPLETE ──┘
                                       ▲   │
    LIVE, INCOMPLETE ──a gap───────────┘   ├──filled──► LIVE or INCOMPLETE, as before
                                           ├──not filled, all blocks dropped──► INCOMPLETE
    any ──disconnected──► AWAY             └──restarted, all blocks dropped──► SYNCING

The state follows from three facts (connected, replay, complete), so there is no table of
transitions; the rules stand at the lines that apply them.

A batch that cannot be decoded is a gap that a replay may fill; one that cannot be decoded in a
replay either is an unfillable gap.  A batch of which some *events* cannot be decoded is applied,
but then the state is INCOMPLETE; if one of them was a removal, the removed block stays in the index
until the next ``Reset`` or clear.

Other known limits: a loss of the last batches before a silence is detected when the next batch
arrives; and a restart that does not break the connection is detected when the sequence numbers
decrease or jump, not if they happen to continue.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from pdconn.router.prefix.kv_events import Batch, Cleared

#: Bounds of the live batches that are queued during a replay (some minutes of a busy engine), in
#: number and bytes.
HELD_LIMIT = 10_000
HELD_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Numbered:
    """A received batch.

    Attributes:
        seq: the sequence number, from 0.
        mark: digest of the bytes, which distinguishes two batches of one number.
        batch: None where the bytes could not be decoded.
        nbytes: length of the payload.
    """

    seq: int
    mark: int
    batch: Batch | None
    nbytes: int = 0


class _WaitingBatches:
    """A queue of live batches, bounded in number and bytes; the oldest are dropped first."""

    def __init__(self, limit: int, most_nbytes: int) -> None:
        self._limit = limit
        self._most_nbytes = most_nbytes
        self._items: deque[Numbered] = deque()
        self._nbytes = 0

    def append(self, item: Numbered) -> None:
        self._items.append(item)
        self._nbytes += item.nbytes
        while len(self._items) > self._limit or self._nbytes > self._most_nbytes:
            self.popleft()

    def popleft(self) -> Numbered:
        item = self._items.popleft()
        self._nbytes -= item.nbytes
        return item

    def drop_all(self) -> None:
        self._items.clear()
        self._nbytes = 0

    @property
    def first(self) -> Numbered:
        return self._items[0]

    def __bool__(self) -> bool:
        return bool(self._items)


class ResetReason(Enum):
    """Why all blocks of a pod are dropped."""

    RESTARTED = "the engine restarted"
    GAP = "batches are missing and cannot be replayed"
    UNREADABLE = "a batch cannot be decoded"


@dataclass(frozen=True, slots=True)
class Apply:
    """Effect: apply the next batch in order."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Reset:
    """Effect: drop all blocks of this engine and rank."""

    why: ResetReason


@dataclass(frozen=True, slots=True)
class NeedReplay:
    """Effect: abandon any replay in progress; request one of ``start`` and what follows."""

    start: int


Effect = Apply | Reset | NeedReplay
Effects = tuple[Effect, ...]


class State(Enum):
    """The state of knowledge about a pod's cache, as described in the module docstring."""

    AWAY = "away"
    SYNCING = "syncing"
    STALE = "stale"
    LIVE = "live"
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class _Replay:
    """A replay in progress.

    Attributes:
        wanted: the number that was missing when the replay was requested.
        anchored: whether its first batch is known to follow the last applied one.
        first: whether nothing was known of this engine before it, or before the replay it repeats.
        for_held: whether a live batch from after the gap was already queued.
        holed: whether batches are missing inside it.
    """

    wanted: int
    anchored: bool
    first: bool
    for_held: bool
    holed: bool = False


@dataclass(frozen=True, slots=True)
class _Tip:
    seq: int
    mark: int


class Tracker:
    """The sequence of batches of one engine and rank.

    Attributes:
        gaps: detected in published batches, without the holes of replays.
        replays: number requested.
        restarts: number detected.
    """

    def __init__(self, held_limit: int = HELD_LIMIT, held_nbytes: int = HELD_NBYTES) -> None:
        self.gaps = self.replays = self.restarts = 0
        self._connected = False
        self._complete = False
        self._tip: _Tip | None = None  # the last batch applied since the last Reset
        self._last_live: _Tip | None = None  # since the connection was made
        self._replay: _Replay | None = None
        self._held = _WaitingBatches(held_limit, held_nbytes)

    @property
    def state(self) -> State:
        """The state of knowledge about the pod's cache."""
        if not self._connected:
            return State.AWAY
        if self._replay is not None:
            return State.SYNCING if self._replay.first else State.STALE
        return State.LIVE if self._complete else State.INCOMPLETE

    @property
    def replaying(self) -> bool:
        """Whether the last ``NeedReplay`` is still in progress."""
        return self._replay is not None

    # --- inputs ---------------------------------------------------------------------------

    def connected(self) -> Effects:
        """A connection was made; the engine may have restarted since the last one."""
        self.disconnected()
        self._connected = True
        return self._request_replay()

    def disconnected(self) -> None:
        """The connection broke: later batches may be from a restarted engine."""
        self._connected = False
        self._replay = self._last_live = None
        self._held.drop_all()

    def live(self, item: Numbered) -> Effects:
        """Process a published batch."""
        # 1. It is from a connection that has ended, or a repetition.
        if not self._connected:
            return ()
        tip = _Tip(item.seq, item.mark)
        if tip == self._last_live:
            return ()
        effects: Effects = ()
        # 2. The numbers went back: the engine has restarted without breaking the connection.
        if self._last_live is not None and item.seq <= self._last_live.seq:
            self._held.drop_all()
            self._replay = None
            effects = self._restarted()
        self._last_live = tip
        # 3. A replay is in progress: the batch waits for its end.  The queue keeps the newest ones;
        # a batch that it drops is a gap like any other.
        if self._replay is not None:
            self._held.append(item)
        # 4. It is the next one.
        elif item.seq == self._next and item.batch is not None:
            effects += self._apply(item)
        # 5. Batches before it are missing, or it cannot be decoded: a replay may have them.
        elif item.seq >= self._next:
            self.gaps += 1
            self._held.append(item)
            effects += self._request_replay()
        return effects

    def replayed(self, item: Numbered) -> Effects:
        """Process a batch of the replay in progress."""
        effects: Effects = ()
        replay = self._replay
        # 1. No replay is in progress, or the batch lies before the last applied one.
        if replay is None or (self._tip is not None and item.seq < self._tip.seq):
            return effects
        # 2. The replay starts one batch early, with the last applied one, recognized by its mark.
        # Another mark means that the engine restarted; a later number, that the engine no longer
        # keeps that batch.
        if not replay.anchored and self._tip is not None:
            if item.seq == self._tip.seq:
                replay.anchored = item.mark == self._tip.mark
                return () if replay.anchored else self._restarted() + self._request_replay()
            replay.anchored = True
            effects = self._drop(ResetReason.GAP)
        if item.seq < self._next:
            return effects
        # 3. Batches before it are missing.  After some progress the rest is requested again:
        # vLLM's ROUTER drops messages that its peer does not accept at once (of 10 000 batches of
        # 4 KB on one machine 2500 to 7000 arrived).  Without progress the gap is final, and as any
        # block may have been evicted in it, all are dropped.
        if item.seq > self._next:
            if self._next > replay.wanted:
                replay.holed = True
                return effects
            effects += self._drop(ResetReason.GAP)
        return effects + self._apply(item)

    def replay_ended(self) -> Effects:
        """The replay has ended; the engine has sent everything it keeps."""
        replay = self._replay
        if replay is None:
            return ()
        # 1. It ended before the last applied batch: the engine has restarted.
        if not replay.anchored:
            return self._restarted() + self._request_replay()
        # 2. It had holes after some progress: the rest is requested again.
        if replay.holed:
            return self._request_replay()
        # 3. It is whole.
        if self._tip is None:
            self._complete = True  # the engine has published nothing
        return self._settle(replay)

    def replay_failed(self) -> Effects:
        """The replay failed: no more of it arrives, though it has not ended."""
        replay = self._replay
        if replay is None:
            return ()
        # A replay is repeated only after progress; otherwise its gap is final.
        if self._next > replay.wanted:
            return self._request_replay()
        return self._drop(ResetReason.GAP) + self._settle(replay)

    # --- steps ----------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        return 0 if self._tip is None else self._tip.seq + 1

    def _request_replay(self) -> Effects:
        self.replays += 1
        tip, before = self._tip, self._replay
        self._replay = _Replay(
            wanted=self._next,
            anchored=tip is None,
            first=tip is None or (before is not None and before.first),
            for_held=bool(self._held),
        )
        return (NeedReplay(0 if tip is None else tip.seq),)

    def _settle(self, replay: _Replay) -> Effects:
        """Apply the queued batches, or request what is missing before them."""
        effects: Effects = ()
        while self._held:
            item = self._held.first
            if item.seq > self._next:
                if self._next != replay.wanted or not replay.for_held:
                    self.gaps += self._tip is not None
                    return effects + self._request_replay()
                effects += self._drop(ResetReason.GAP)
            elif item.seq < self._next:
                self._held.popleft()
                continue
            effects += self._apply(self._held.popleft())
        self._replay = None
        return effects

    def _apply(self, item: Numbered) -> Effects:
        if self._tip is None:
            self._complete = item.seq == 0  # blocks stored before a later batch are unknown
        self._tip = _Tip(item.seq, item.mark)
        batch = item.batch
        if batch is None:
            self._complete = False
            return (Reset(ResetReason.UNREADABLE),)
        if any(isinstance(event, Cleared) for event in batch.events):
            self._complete = True
        if batch.num_undecodable:
            self._complete = False
        return (Apply(batch),)

    def _drop(self, why: ResetReason) -> Effects:
        self._complete = False
        if self._tip is None:
            return ()
        self._tip = None
        return (Reset(why),)

    def _restarted(self) -> Effects:
        self.restarts += 1
        return self._drop(ResetReason.RESTARTED)
