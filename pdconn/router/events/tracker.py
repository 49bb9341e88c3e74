"""KV event batches in sequence: which to apply, and when to request a replay.  Pure.

A publisher numbers its batches from 0 and keeps the last few thousand for replay.  A subscriber
misses batches when it connects late, is slow, or loses its connection; and an engine that
restarts begins at 0 with an empty cache.  One ``Tracker`` for each engine and rank turns what
arrives into a sequence without gaps, as effects: ``Apply``, ``Reset``, ``NeedReplay``.

What is known of the engine's cache is always in one of these states::

    state       up to date   all of it   because
    AWAY        no           -           there is no connection
    SYNCING     no           -           the first replay since the engine started is under way
    STALE       no           -           a replay is under way that closes a gap, or that shows
                                         whether the engine restarted meanwhile
    LIVE        yes          yes
    INCOMPLETE  yes          no          blocks stored before some batch are not known

    AWAY ──connected, nothing known──► SYNCING ──ended: began at 0──► LIVE ◄──┐
      │                                   └──failed, or began later──┐        │ cleared
      │                                                              ▼        │
      └──connected, something known──► STALE                     INCOMPLETE ──┘
                                       ▲   │
    LIVE, INCOMPLETE ──a gap───────────┘   ├──filled──► LIVE or INCOMPLETE, as before
                                           ├──not filled, all blocks dropped──► INCOMPLETE
    any ──disconnected──► AWAY             └──restarted, all blocks dropped──► SYNCING

The state follows from three facts (connected, replay, complete), so there is no table of
transitions.  Four rules:

- **A replay begins one batch early**, with the last one that was applied, recognized by a digest
  of its bytes: its ``mark``.  Another mark, or an answer that ends before it, means that the
  engine restarted; an answer that begins after it, that the engine does not keep it any more.
- **An unfillable gap drops all blocks** (``Reset``), as any of them may be gone.  What is stored
  from then on is known, what was stored before is not: INCOMPLETE, until the engine clears
  its cache or restarts.
- **A replay is repeated only after progress.**  An answer may have holes, as vLLM's ROUTER drops
  what its peer does not take at once (of 10 000 batches of 4 KB on one machine 2500 to 7000
  arrived); each replay from the hole gets further.  A hole right after the anchor stays one.
- **Live batches wait while a replay runs**, the newest ``HELD_LIMIT`` of them; what is pushed out
  is a gap like any other.

A batch that cannot be decoded is a gap that a replay may fill; one that cannot be decoded in a
replay either is an unfillable gap.  A batch of which some *events* cannot be decoded is applied,
but then the state is INCOMPLETE; if one of them was a removal, a block that is gone stays known
until the next ``Reset`` or clear.

Other known limits: a loss of the last batches before a silence is noticed when the next batch
arrives; and a restart that does not break the connection is noticed when the numbers go back or
jump, not if they happen to go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from pdconn.router.prefix.kv_events import Batch, Cleared

#: Bounds of the live batches that wait for a replay (some minutes of a busy engine), and of
#: their bytes.
HELD_LIMIT = 10_000
HELD_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Numbered:
    """A batch as it arrived.

    Attributes:
        seq: its number, from 0.
        mark: digest of its bytes, which distinguishes two batches of one number.
        batch: None where the bytes could not be decoded.
        nbytes: their number.
    """

    seq: int
    mark: int
    batch: Batch | None
    nbytes: int = 0


class _WaitingBatches:
    """Live batches that wait, bounded in number and bytes: the oldest go first."""

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

    def clear(self) -> None:
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
    """The next batch in order."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop all blocks of this engine and rank."""

    why: ResetReason


@dataclass(frozen=True, slots=True)
class NeedReplay:
    """Abandon any replay under way; request one of ``start`` and what follows."""

    start: int


Effect = Apply | Reset | NeedReplay
Effects = tuple[Effect, ...]


class State(Enum):
    """What is known of a pod's cache; see the module."""

    AWAY = "away"
    SYNCING = "syncing"
    STALE = "stale"
    LIVE = "live"
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class _Replay:
    """A replay under way.

    Attributes:
        wanted: the number that was missing when it was requested.
        anchored: whether its beginning is known to continue what was applied before.
        first: whether nothing was known of this engine before it, or before the one it repeats.
        for_held: whether a live batch from after the gap was waiting already.
        holed: whether batches are missing in its middle.
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
    """The sequence of one engine and rank.

    Attributes:
        gaps: noticed in what was published, without the holes of replays.
        replays: requested.
        restarts: noticed.
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
        """What is known of the pod's cache."""
        if not self._connected:
            return State.AWAY
        if self._replay is not None:
            return State.SYNCING if self._replay.first else State.STALE
        return State.LIVE if self._complete else State.INCOMPLETE

    @property
    def replaying(self) -> bool:
        """Whether the last ``NeedReplay`` is still under way."""
        return self._replay is not None

    # --- inputs ---------------------------------------------------------------------------

    def connected(self) -> Effects:
        """A connection is made; the engine may have restarted since the last one."""
        self.disconnected()
        self._connected = True
        return self._request_replay()

    def disconnected(self) -> None:
        """The connection broke: what arrives next may be from a restarted engine."""
        self._connected = False
        self._replay = self._last_live = None
        self._held.clear()

    def live(self, item: Numbered) -> Effects:
        """A batch as it was published."""
        if not self._connected:
            return ()
        tip = _Tip(item.seq, item.mark)
        if tip == self._last_live:
            return ()
        effects: Effects = ()
        if self._last_live is not None and item.seq <= self._last_live.seq:
            self._held.clear()
            self._replay = None
            effects = self._restarted()
        self._last_live = tip
        if self._replay is not None:
            self._held.append(item)
        elif item.seq == self._next and item.batch is not None:
            effects += self._apply(item)
        elif item.seq >= self._next:
            self.gaps += 1
            self._held.append(item)
            effects += self._request_replay()
        return effects

    def replayed(self, item: Numbered) -> Effects:
        """A batch from the replay under way."""
        effects: Effects = ()
        replay = self._replay
        if replay is None or (self._tip is not None and item.seq < self._tip.seq):
            return effects
        if not replay.anchored and self._tip is not None:
            if item.seq == self._tip.seq:
                replay.anchored = item.mark == self._tip.mark
                return () if replay.anchored else self._restarted() + self._request_replay()
            replay.anchored = True
            effects = self._drop(ResetReason.GAP)
        if item.seq < self._next:
            return effects
        if item.seq > self._next:
            if self._next > replay.wanted:
                replay.holed = True
                return effects
            effects += self._drop(ResetReason.GAP)
        return effects + self._apply(item)

    def replay_ended(self) -> Effects:
        """The replay under way has ended, with all that the engine keeps."""
        replay = self._replay
        if replay is None:
            return ()
        if not replay.anchored:
            return self._restarted() + self._request_replay()
        if replay.holed:
            return self._request_replay()
        if self._tip is None:
            self._complete = True  # the engine has published nothing
        return self._settle(replay)

    def replay_failed(self) -> Effects:
        """The replay under way failed: no more of it arrives, though it has not ended."""
        replay = self._replay
        if replay is None:
            return ()
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
        """Apply the waiting batches, or request what is missing before them."""
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
            self._complete = item.seq == 0
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
