"""A load: one try to bring stored rows into a request's blocks, from look-up to report.

::

    NEW ──asked──► LOOKING ──found──► FOUND ──placed──► FETCHING ──fetched──► FETCHED ──taken─┐
     │ │              │                 │                  │                    │             ▼
     │ │             left              left               left                 left        LOADING
     │ │              │                 │                  ▼                    │             │
     │ │              │                 │               DRAINING ──fetched──┐   │          reported
     │ │              │                 │                                   ▼   ▼             │
     │ └────left──────┴─────────────────┴─────────────────────────────────► OVER ◄────────────┤
     └──awaited──► FAILING ──reported─────────────────────────────────────────────────────────┤
                                    FETCHING, FETCHED ──joined──► BESIDE ──ended──────────────┘

*Asked*: the engine asks which tokens it need not compute; the rows of the prompt are looked up.
*Placed*: there is room for them in the ranks' staging areas; ranks read and verify them there.
*Fetched*: every rank has answered.  Only now are tokens promised to the engine, so that neither an
eviction nor damage can fail a request.  *Taken*: the request has blocks for what was promised.
*Left*: the request is computed, or looked up anew by another load: too little was found, rows
were missing or damaged, it waited too long, the cache was reset, or it has left the engine.

*Joined*: the request pulls the rest of its prompt from a lender, which has all of it.  So its rows
are of full attention alone, and nothing of them is promised: ranks may still be reading.  Each
loads what it can of them BESIDE its pull, which reads the rest, and says when that has *ended*.

A read cannot be cancelled, so a load that is left while ranks read is DRAINING, and keeps its room
until they have answered.  *Awaited*: what a load has promised is gone when there are blocks, as
after a reset in between; the engine waits for a report, and gets a failure.

Pure: time is an argument, effects are returned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Row = TypeVar("Row", bound=Hashable)

LOOKUP_S = 5.0
"""How long a request waits for its look-up, and for room in the staging areas."""

FETCH_S = 10.0
"""How long a request waits for its rows before it is computed."""


class LoadState(StrEnum):
    """The state of a load, as in the diagram above."""

    NEW = "new"
    LOOKING = "looking"
    FOUND = "found"
    FETCHING = "fetching"
    FETCHED = "fetched"
    LOADING = "loading"
    BESIDE = "beside"
    DRAINING = "draining"
    FAILING = "failing"
    OVER = "over"


TRANSITIONS: dict[tuple[LoadState, str], LoadState] = {
    (LoadState.NEW, "asked"): LoadState.LOOKING,
    (LoadState.NEW, "left"): LoadState.OVER,
    (LoadState.NEW, "awaited"): LoadState.FAILING,
    (LoadState.LOOKING, "found"): LoadState.FOUND,
    (LoadState.LOOKING, "left"): LoadState.OVER,
    (LoadState.FOUND, "placed"): LoadState.FETCHING,
    (LoadState.FOUND, "left"): LoadState.OVER,
    (LoadState.FETCHING, "fetched"): LoadState.FETCHED,
    (LoadState.FETCHING, "left"): LoadState.DRAINING,
    (LoadState.FETCHED, "taken"): LoadState.LOADING,
    (LoadState.FETCHED, "left"): LoadState.OVER,
    (LoadState.FETCHING, "joined"): LoadState.BESIDE,
    (LoadState.FETCHED, "joined"): LoadState.BESIDE,
    (LoadState.DRAINING, "fetched"): LoadState.OVER,
    (LoadState.BESIDE, "ended"): LoadState.OVER,
    (LoadState.LOADING, "reported"): LoadState.OVER,
    (LoadState.FAILING, "reported"): LoadState.OVER,
}
"""All transitions of a load; any other event leaves the state as it is."""

_MOST_S = {
    LoadState.LOOKING: LOOKUP_S,
    LoadState.FOUND: LOOKUP_S,
    LoadState.FETCHING: FETCH_S,
}


@dataclass(frozen=True, slots=True)
class DropRows:
    """Have ranks skip the reads that have not begun."""


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """Free the load's room: no rank reads into it any more."""


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Copy the rows of these tokens to the request's blocks, and report it received."""

    tokens: range


@dataclass(frozen=True, slots=True)
class LoadBeside:
    """Copy what can be had of the rows of these tokens to the request's blocks, beside its pull."""

    tokens: range


@dataclass(frozen=True, slots=True)
class FailRequest:
    """Report the request as failed."""


@dataclass(frozen=True, slots=True)
class AnsweredInTime:
    """Every rank has answered while the request waited."""


@dataclass(frozen=True, slots=True)
class DistrustRows(Generic[Row]):
    """Have look-ups not find these rows again: they are damaged, or gone."""

    missing: frozenset[Row]
    damaged: frozenset[Row]


Effect = (
    DropRows | FreeRoom | CopyRows | LoadBeside | FailRequest | AnsweredInTime | DistrustRows[Row]
)


class StoreLoad(Generic[Row]):
    """One request's load.

    Attributes:
        state: one of :class:`LoadState`.
        number: identifies its room, once it is placed; ``placed_at``: since when.
        rows: the rows that the look-up found.
        boundary: tokens of the prompt up to which ``rows`` reach.
        held: tokens that the engine held when they were looked up; ``rows`` begin there.
        is_beside: whether ``rows`` are of full attention alone, for a request that pulls the rest.
    """

    __slots__ = (
        "_damaged", "_left", "_left_beside", "_local", "_missing", "_num_ranks", "_since",
        "boundary", "held", "is_beside", "number", "placed_at", "rows", "state",
    )  # fmt: skip

    def __init__(self) -> None:
        self.state = LoadState.NEW
        self.number = self.boundary = self.held = 0
        self.rows: tuple[Row, ...] = ()
        self.is_beside = False
        self._left = self._num_ranks = self._left_beside = 0
        self._local: int | None = None
        self._missing: set[Row] = set()
        self._damaged: set[Row] = set()
        self._since = self.placed_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the request gets no tokens from it."""
        return self.state in (LoadState.OVER, LoadState.DRAINING)

    @property
    def is_looking(self) -> bool:
        """Whether its rows are not on their way yet."""
        return self.state in (LoadState.LOOKING, LoadState.FOUND)

    def seconds_waited(self, now: float) -> float:
        """How long the request has waited for the present step."""
        return now - self._since

    @property
    def most_s(self) -> float:
        """How long the request may wait for the present step."""
        return _MOST_S[self.state]

    def begin_lookup(self, now: float) -> None:
        """Begin a look-up of the request's rows."""
        self._enter("asked")
        self._since = now

    def found(
        self, boundary: int, held: int, rows: tuple[Row, ...], *, is_beside: bool = False
    ) -> None:
        """Note the look-up's ``rows``, which reach from ``held`` tokens to ``boundary``."""
        if self._enter("found"):
            self.boundary, self.held, self.rows = boundary, held, rows
            self.is_beside = is_beside

    def place(self, number: int, num_ranks: int, now: float) -> None:
        """Note that there is room, into which ``num_ranks`` ranks fetch the rows."""
        if self._enter("placed"):
            self.number, self._left, self._since = number, num_ranks, now
            self._num_ranks, self.placed_at = num_ranks, now

    def answered(self, missing: Iterable[Row], damaged: Iterable[Row]) -> list[Effect[Row]]:
        """Note that a rank has read and verified its share, or could not."""
        self._missing.update(missing)
        self._damaged.update(damaged)
        self._left -= 1
        if self._left:
            return []
        effects: list[Effect[Row]] = []
        if self.state in (LoadState.FETCHING, LoadState.BESIDE):
            effects.append(AnsweredInTime())
        if self._missing or self._damaged:
            missing_only = frozenset(self._missing - self._damaged)
            effects.append(DistrustRows(missing_only, frozenset(self._damaged)))
        if self._enter("fetched") is LoadState.OVER:
            effects.append(FreeRoom())
        return effects

    def offer(self, num_local: int) -> int | None:
        """Tokens that it loads behind ``num_local``, which the engine holds now.

        None if it loads nothing: rows are missing or damaged, or the engine has lost blocks that
        it held when they were looked up.
        """
        if self.state is not LoadState.FETCHED or self.is_beside:
            return None
        if self._missing or self._damaged or num_local < self.held:
            return None
        self._local = num_local
        return self.boundary - num_local

    def take_blocks(self, num_external: int) -> list[Effect[Row]]:
        """Load ``num_external`` tokens into the blocks that the request has now.

        Returns:
            :class:`CopyRows` if these are the tokens that it offered last; else it is left.
        """
        # 1. A look-up goes on: saves use the keys that it finds.
        if self.state not in (LoadState.FETCHING, LoadState.FETCHED):
            return []
        # 2. The request wants no tokens, or others than were offered, as if its local hit changed.
        is_offered = self._local is not None and self._local + num_external == self.boundary
        if not num_external or not is_offered or not self._enter("taken"):
            return self.leave()
        # 3. It gets what was offered.
        assert self._local is not None
        return [CopyRows(range(self._local, self.boundary))]

    def offers_beside(self, num_local: int) -> bool:
        """Whether it can load tokens beside a pull, behind ``num_local`` that the engine holds."""
        is_under_way = self.state in (LoadState.FETCHING, LoadState.FETCHED)
        return is_under_way and self.is_beside and self.held <= num_local < self.boundary

    def join_pull(self, num_local: int, now: float) -> list[Effect[Row]]:
        """Load what it can beside the request's pull, which has blocks now.

        Returns:
            :class:`LoadBeside`, if it offers something; else it is left.
        """
        if not self.offers_beside(num_local):
            return self.leave()
        self._enter("joined")
        self._left_beside, self._since = self._num_ranks, now
        return [LoadBeside(range(num_local, self.boundary))]

    def ended_beside(self) -> list[Effect[Row]]:
        """Note that a rank has loaded what it could beside its pull, and reads no more rows."""
        if self.state is not LoadState.BESIDE:
            return []
        self._left_beside -= 1
        if self._left_beside:
            return []
        self._enter("ended")
        return [FreeRoom()]

    def give_up_beside(self) -> list[Effect[Row]]:
        """The pull has waited long enough: have ranks load what they have read."""
        return [DropRows()] if self.state is LoadState.BESIDE else []

    def fail_request(self) -> list[Effect[Row]]:
        """Fail the request: the engine waits for what another load has promised and is gone."""
        return [FailRequest()] if self._enter("awaited") else []

    def leave(self) -> list[Effect[Row]]:
        """Drop the load: the request goes on without it."""
        was = self.state
        if not self._enter("left") or was not in (LoadState.FETCHING, LoadState.FETCHED):
            return []
        return [DropRows()] if was is LoadState.FETCHING else [DropRows(), FreeRoom()]

    def reported(self) -> list[Effect[Row]]:
        """Note that every rank has reported the request, received or failed."""
        was = self.state
        return [FreeRoom()] if self._enter("reported") and was is LoadState.LOADING else []

    def _enter(self, event: str) -> LoadState | None:
        entered = TRANSITIONS.get((self.state, event))
        if entered is not None:
            self.state = entered
        return entered
