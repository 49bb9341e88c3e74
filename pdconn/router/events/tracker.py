"""Which batches of an engine to believe, and when to ask for what was missed.  Pure.

A publisher numbers its batches from 0 and keeps the last few thousand for replay.  Batches are
lost where a subscriber comes late, is slow, or is cut off; and an engine that starts anew begins
at 0 with an empty cache.  One ``Tracker`` for each engine and rank turns what arrives into a
sequence without gaps, told in effects: ``Apply``, ``Reset``, ``NeedReplay``.

What is known of the engine's cache is always one of these::

    state       up to date   all of it   because
    AWAY        no           -           there is no connection
    SYNCING     no           -           the first replay since the engine started is under way
    STALE       no           -           a replay is under way that closes a gap, or that finds
                                         out whether this is the engine from before
    LIVE        yes          yes
    INCOMPLETE  yes          no          what was stored before some batch is not known

    AWAY ──connected, nothing known──► SYNCING ──ended: began at 0──► LIVE ◄──┐
      │                                   └──failed, or began later──┐        │ cleared
      │                                                              ▼        │
      └──connected, something known──► STALE                     INCOMPLETE ──┘
                                       ▲   │
    LIVE, INCOMPLETE ──a gap───────────┘   ├──filled──► LIVE or INCOMPLETE, as before
                                           ├──not filled, all forgotten──► INCOMPLETE
    any ──disconnected──► AWAY             └──another engine, all forgotten──► SYNCING

The state follows from three facts (connected, replay, complete); there is no fourth to keep
true, hence no table of transitions.  Four rules make it hold:

- **A replay begins one batch early**, with the last one that was taken, told by a digest of its
  bytes: its ``mark``.  Another mark, or an answer that ends before it, means that the engine
  started anew; an answer that begins behind it, that the engine's memory is too short.
- **What cannot be filled is dropped.**  After an unfillable gap any block may be gone, so all of
  them are forgotten (``Reset``), and what is stored from then on is true again, but not all:
  INCOMPLETE.  It ends when the engine clears its cache or starts anew.
- **Replay again only after progress.**  An answer may have holes, as vLLM's ROUTER drops what its
  peer does not take at once (of 10 000 batches of 4 KB on one machine 2500 to 7000 came through);
  whoever asks again from the hole gets further each time.  A hole right behind the anchor is
  one for good.
- **Live batches wait while a replay runs**, the newest ``HELD_LIMIT`` of them; what is pushed out
  is a gap like any other.

A batch that cannot be read at all is a gap that replay may fill; what comes unreadable from replay
is dropped like any other gap.  A batch of which *events* could not be read is applied, but
from then on this is INCOMPLETE; had one of them been a removal, a block that is gone stays
known until the next ``Reset`` or clear.

Other known limits: when the last batches before a silence are lost, that is noticed when the next
one arrives; and an engine that starts anew without the connection ever breaking is noticed when
its numbers go back or jump, not if they happen to go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from pdconn.router.prefix.events import Batch, Cleared

#: Live batches that wait for a replay: some minutes of a busy engine; and their bytes.
HELD_LIMIT = 10_000
HELD_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Numbered:
    """A batch as the wire brought it.

    Attributes:
        seq: its number, from 0.
        mark: digest of its bytes: tells two batches of one number apart.
        batch: None where the bytes could not be read.
        nbytes: how many they were.
    """

    seq: int
    mark: int
    batch: Batch | None
    nbytes: int = 0


class _Held:
    """Live batches that wait, bounded in number and bytes: the oldest go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Numbered] = deque()
        self._nbytes = 0

    def append(self, item: Numbered) -> None:
        self._items.append(item)
        self._nbytes += item.nbytes
        while len(self._items) > self._limit or self._nbytes > HELD_NBYTES:
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


class Why(Enum):
    """Why all that was known is forgotten."""

    RESTARTED = "the engine started anew"
    GAP = "batches are missing that nobody has any more"
    UNREADABLE = "a batch cannot be read"


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch in order."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all blocks of this engine and rank."""

    why: Why


@dataclass(frozen=True, slots=True)
class NeedReplay:
    """Abandon any replay under way; ask for one of ``start`` and what follows."""

    start: int


Effect = Apply | Reset | NeedReplay
Effects = tuple[Effect, ...]


class State(Enum):
    """How far to trust what is known; the module explains."""

    AWAY = "away"
    SYNCING = "syncing"
    STALE = "stale"
    LIVE = "live"
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class _Replay:
    """A replay under way.

    Attributes:
        wanted: the number that was missing when it was asked for.
        anchored: whether its beginning is known to fit what was taken before.
        first: whether nothing was known of this engine before it, or before the one it goes on.
        for_held: whether a live batch waited already, so that it lies behind the gap.
        holed: whether something is missing in its middle.
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
        gaps: in what was published, as they were noticed; holes of a replay are not among them.
        replays, restarts: how often one was asked for, and noticed.
    """

    def __init__(self, held_limit: int = HELD_LIMIT) -> None:
        self.gaps = self.replays = self.restarts = 0
        self._connected = False
        self._complete = False
        self._tip: _Tip | None = None  # the last batch taken since the last Reset
        self._heard: _Tip | None = None  # the last live one since the connection was made
        self._replay: _Replay | None = None
        self._held = _Held(held_limit)

    @property
    def state(self) -> State:
        """How far to trust what has been applied."""
        if not self._connected:
            return State.AWAY
        if self._replay is not None:
            return State.SYNCING if self._replay.first else State.STALE
        return State.LIVE if self._complete else State.INCOMPLETE

    @property
    def replaying(self) -> bool:
        """Whether answers of the last ``NeedReplay`` are still wanted."""
        return self._replay is not None

    # --- inputs ---------------------------------------------------------------------------

    def connected(self) -> Effects:
        """A connection is made, by whatever engine answers at the address now."""
        self.disconnected()
        self._connected = True
        return self._ask()

    def disconnected(self) -> None:
        """The connection is gone: what arrives from here on may be another engine's."""
        self._connected = False
        self._replay = self._heard = None
        self._held.clear()

    def live(self, item: Numbered) -> Effects:
        """A batch as it was published."""
        if not self._connected:
            return ()
        tip = _Tip(item.seq, item.mark)
        if tip == self._heard:
            return ()
        effects: Effects = ()
        if self._heard is not None and item.seq <= self._heard.seq:
            self._held.clear()
            self._replay = None
            effects = self._restarted()
        self._heard = tip
        if self._replay is not None:
            self._held.append(item)
        elif item.seq == self._next and item.batch is not None:
            effects += self._take(item)
        elif item.seq >= self._next:
            self.gaps += 1
            self._held.append(item)
            effects += self._ask()
        return effects

    def replayed(self, item: Numbered) -> Effects:
        """A batch that the replay under way brought."""
        effects: Effects = ()
        replay = self._replay
        if replay is None or (self._tip is not None and item.seq < self._tip.seq):
            return effects
        if not replay.anchored and self._tip is not None:
            if item.seq == self._tip.seq:
                replay.anchored = item.mark == self._tip.mark
                return () if replay.anchored else self._restarted() + self._ask()
            replay.anchored = True
            effects = self._forget(Why.GAP)
        if item.seq < self._next:
            return effects
        if item.seq > self._next:
            if self._next > replay.wanted:
                replay.holed = True
                return effects
            effects += self._forget(Why.GAP)
        return effects + self._take(item)

    def replay_ended(self) -> Effects:
        """The replay under way has brought all that there is."""
        replay = self._replay
        if replay is None:
            return ()
        if not replay.anchored:
            return self._restarted() + self._ask()
        if replay.holed:
            return self._ask()
        if self._tip is None:
            self._complete = True  # there is nothing that one could know
        return self._settle(replay)

    def replay_failed(self) -> Effects:
        """No more of the replay under way will come, though it has not ended."""
        replay = self._replay
        if replay is None:
            return ()
        if self._next > replay.wanted:
            return self._ask()
        return self._forget(Why.GAP) + self._settle(replay)

    # --- steps ----------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        return 0 if self._tip is None else self._tip.seq + 1

    def _ask(self) -> Effects:
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
        """Take what has waited, or ask for what is missing before it."""
        effects: Effects = ()
        while self._held:
            item = self._held.first
            if item.seq > self._next:
                if self._next != replay.wanted or not replay.for_held:
                    self.gaps += self._tip is not None
                    return effects + self._ask()
                effects += self._forget(Why.GAP)
            elif item.seq < self._next:
                self._held.popleft()
                continue
            effects += self._take(self._held.popleft())
        self._replay = None
        return effects

    def _take(self, item: Numbered) -> Effects:
        if self._tip is None:
            self._complete = item.seq == 0
        self._tip = _Tip(item.seq, item.mark)
        batch = item.batch
        if batch is None:
            self._complete = False
            return (Reset(Why.UNREADABLE),)
        if any(isinstance(event, Cleared) for event in batch.events):
            self._complete = True
        if batch.num_undecodable:
            self._complete = False
        return (Apply(batch),)

    def _forget(self, why: Why) -> Effects:
        self._complete = False
        if self._tip is None:
            return ()
        self._tip = None
        return (Reset(why),)

    def _restarted(self) -> Effects:
        self.restarts += 1
        return self._forget(Why.RESTARTED)
