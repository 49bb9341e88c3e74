"""The fetches of a rank that have bytes in staging, and the pulls that some of them join.

::

    Fetch ──► rows: read, verify ──► FetchResult ──► LoadRows ──► loaded
                │         │                            └────► failed
                │         └── JoinPull ──► rows before the first bad one: copied ──► BesideEnded
    DropFetch ──┴─► rows not begun are left out ──► FetchResult, over

A fetch that joins a pull is copied once its rows were tried, or once it is dropped: a read that
hangs then keeps its bytes in staging, and not the pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdconn.planning.plan import Need
from pdconn.store.format.row import RowName
from pdconn.store.rank.tasks import Problem
from pdconn.store.rank_commands import Fetch, FetchResult, JoinPull
from transport.streams import StreamPoint


@dataclass(slots=True, eq=False)
class JoinedPull:
    """The pull that a fetch joins.

    Attributes:
        join: with blocks of the request.
        after: a point that the GPU must reach before they are written.
        loaded: what is being copied, or was; None until then.
        has_ended: whether nothing will be copied any more.
    """

    join: JoinPull
    after: StreamPoint | None
    loaded: Need | None = None
    has_ended: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that were copied."""
        return max((len(tokens) for tokens in self.loaded.tokens), default=0) if self.loaded else 0


@dataclass(slots=True, eq=False)
class FetchUnderWay:
    """A fetch: rows ``left`` to try, and ``bad`` ones, by their places among the rows."""

    fetch: Fetch
    left: set[int]
    bad: dict[int, Problem] = field(default_factory=dict)
    is_dropped: bool = False
    joined: JoinedPull | None = None

    def result(self) -> FetchResult:
        """The answer, once no row is left."""
        found: dict[Problem, list[RowName]] = {problem: [] for problem in Problem}
        for place in sorted(self.bad):
            found[self.bad[place]].append(self.fetch.rows[place])
        missing, damaged = found[Problem.MISSING], found[Problem.DAMAGED]
        return FetchResult(self.fetch.number, tuple(missing), tuple(damaged))

    @property
    def is_over(self) -> bool:
        """Whether nothing reads into its bytes, or copies from them, any more."""
        return not self.left and (self.is_dropped if self.joined is None else self.joined.has_ended)

    @property
    def may_copy(self) -> bool:
        """Whether a pull has joined it that waits for no further rows."""
        is_known = self.joined is not None and self.joined.loaded is None
        return is_known and (self.is_dropped or not self.left)

    def rows_end(self, row_tokens: int) -> int | None:
        """The first token of the first row that is not in staging; None if all are."""
        lost = self.left | self.bad.keys()
        return self.fetch.rows[min(lost)].index * row_tokens if lost else None


class FetchTable:
    """The fetches that have bytes in staging."""

    def __init__(self) -> None:
        self._fetches: dict[int, FetchUnderWay] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def add_fetch(self, fetch: Fetch) -> None:
        """Add a fetch, all of whose rows are left to try."""
        self._fetches[fetch.number] = FetchUnderWay(fetch, set(range(len(fetch.rows))))

    def find_fetch(self, number: int) -> FetchUnderWay | None:
        """A fetch that is not over."""
        return self._fetches.get(number)

    def rows_tried(
        self, number: int, places: Sequence[int] | None, problem: Problem | None
    ) -> FetchUnderWay | None:
        """Note that rows were read, or could not be; for None, all that are left.

        Returns:
            The fetch, which has its answer now, if no row is left.
        """
        fetch = self._fetches.get(number)
        if fetch is None:
            return None
        tried = fetch.left.copy() if places is None else fetch.left.intersection(places)
        if places is not None and not tried:
            return None
        fetch.left -= tried
        if problem is not None:
            fetch.bad.update(dict.fromkeys(tried, problem))
        if fetch.left:
            return None
        if fetch.joined is None:  # else its end is answered, too
            self.forget_if_over(fetch)
        return fetch

    def drop_fetch(self, number: int) -> FetchUnderWay | None:
        """Drop a fetch: it is over once no row is left."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            fetch.is_dropped = True
            self.forget_if_over(fetch)
        return fetch

    def take_fetch(self, number: int) -> Fetch | None:
        """Remove a fetch, to load it; None if there is none, or if rows of it are missing."""
        fetch = self._fetches.get(number)
        if fetch is None or fetch.left:
            return None
        del self._fetches[number]
        return None if fetch.bad or fetch.is_dropped else fetch.fetch

    def forget_if_over(self, fetch: FetchUnderWay) -> bool:
        """Forget a fetch whose bytes are free.  Returns whether they are since this call."""
        return fetch.is_over and self._fetches.pop(fetch.fetch.number, None) is not None
