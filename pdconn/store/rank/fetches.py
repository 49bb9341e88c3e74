"""Fetches: rows read into staging, verified there, and copied to KV blocks by a load.

A fetch is answered once, when all its rows have been tried; its bytes belong to it until it was
loaded, or dropped and answered::

    Fetch ──► rows: read, verify ──► FetchResult ──► LoadRows ──► loaded
                │                                      └────► failed
    DropFetch ──┴─► rows not begun are left out ──► FetchResult, over

Several threads take rows, so that one reads while another verifies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from pdconn.integrity.zeros import fill_with_zeros
from pdconn.planning.errors import PlanningError
from pdconn.store.commands import Fetch, FetchResult, LoadRows
from pdconn.store.errors import RowDamaged, RowMissing, StoreError
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.rank.copies import Copies
from pdconn.store.rank.reports import StoreReports
from pdconn.store.rank.shares import OpenedRank
from pdconn.store.rank.staging import HostArea
from pdconn.store.shelf.base import Shelf
from transport import Spans
from transport.streams import StreamPoint


class Problem(Enum):
    """Why a row is not in staging; left out are rows of dropped fetches, which are not tried."""

    MISSING = auto()
    DAMAGED = auto()
    LEFT_OUT = auto()


@dataclass(slots=True, eq=False)
class FetchUnderWay:
    """A fetch: rows ``left`` to try, and ``bad`` ones, by their places among the rows."""

    fetch: Fetch
    namespace: str
    left: set[int]
    bad: dict[int, Problem] = field(default_factory=dict)
    is_dropped: bool = False

    def result(self) -> FetchResult:
        """The answer, once none is left."""
        found: dict[Problem, list[RowName]] = {problem: [] for problem in Problem}
        for place in sorted(self.bad):
            found[self.bad[place]].append(self.fetch.rows[place])
        missing, damaged = found[Problem.MISSING], found[Problem.DAMAGED]
        return FetchResult(self.fetch.number, tuple(missing), tuple(damaged))


@dataclass(frozen=True, slots=True, eq=False)
class RowRead:
    """A row to read: its place in its fetch, and where it lies in staging."""

    of: FetchUnderWay
    place: int
    offset: int


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    """A load, which writes to its blocks once the GPU has come to ``after``."""

    load: LoadRows
    after: StreamPoint | None


ReadTask = FetchUnderWay | RowRead | LoadUnderWay


class FetchTable:
    """The fetches that have bytes in staging.  Any thread."""

    def __init__(self, reports: StoreReports) -> None:
        self._reports = reports
        self._lock = threading.Lock()
        self._fetches: dict[int, FetchUnderWay] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def add(self, fetch: Fetch, namespace: str) -> FetchUnderWay:
        """A fetch begins."""
        made = FetchUnderWay(fetch, namespace, set(range(len(fetch.rows))))
        with self._lock:
            self._fetches[fetch.number] = made
        return made

    def tried(self, fetch: FetchUnderWay, place: int, problem: Problem | None) -> None:
        """A row was read, or could not be; the last one answers the fetch."""
        with self._lock:
            if place not in fetch.left:
                return
            fetch.left.remove(place)
            if problem is not None:
                fetch.bad[place] = problem
            if fetch.left:
                return
        self._answer(fetch)

    def all_missing(self, fetch: FetchUnderWay) -> None:
        """No row will be tried; answers the fetch."""
        with self._lock:
            fetch.bad = dict.fromkeys(fetch.left, Problem.MISSING)
            fetch.left.clear()
        self._answer(fetch)

    def drop(self, number: int) -> None:
        """The bytes of a fetch are not needed (any more)."""
        with self._lock:
            fetch = self._fetches.get(number)
            if fetch is None:
                return
            fetch.is_dropped = True
            if not fetch.left:
                del self._fetches[number]

    def take(self, number: int) -> FetchUnderWay | None:
        """End a fetch by a load: None if there is none, or not with every row."""
        with self._lock:
            fetch = self._fetches.get(number)
            if fetch is None or fetch.left:
                return None
            del self._fetches[number]
        return None if fetch.bad or fetch.is_dropped else fetch

    def _answer(self, fetch: FetchUnderWay) -> None:
        with self._lock:
            if fetch.is_dropped:
                self._fetches.pop(fetch.fetch.number, None)
        result = fetch.result()
        self._reports.count(rows_missing=len(result.missing), rows_damaged=len(result.damaged))
        self._reports.answer(result)


class RowReader:
    """One thread's reads and loads.

    Args:
        open_shelf: opens the thread's own shelf, at the first row and again where that failed.
        put_first: adds tasks before all that wait.
        copies: the thread's own, to KV memory.
    """

    def __init__(
        self,
        opened: OpenedRank,
        staging: HostArea,
        fetches: FetchTable,
        reports: StoreReports,
        *,
        open_shelf: Callable[[], Shelf],
        put_first: Callable[[list[ReadTask]], None],
        copies: Copies,
    ) -> None:
        self._opened, self._staging = opened, staging
        self._fetches, self._reports = fetches, reports
        self._open_shelf, self._put_first, self._copies = open_shelf, put_first, copies
        self._footer = HostArea(opened.most_footer_nbytes)
        self._shelf: Shelf | None = None

    def close(self) -> None:
        """Close the shelf."""
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def work(self, task: ReadTask) -> None:
        """Do one task and report it."""
        if isinstance(task, RowRead):
            self._fetches.tried(task.of, task.place, self._read(task))
        elif isinstance(task, FetchUnderWay):
            self._begin(task)
        else:
            if task.after is not None:
                task.after.synchronize()
            self._load(task.load)

    def _begin(self, fetch: FetchUnderWay) -> None:
        """Put the fetch's rows before other fetches; all are missing where there is no room."""
        tasks: list[ReadTask] = []
        for place, offset in enumerate(self._offsets(fetch.fetch)[:-1]):
            tasks.append(RowRead(fetch, place, offset))
        if not tasks or not self._fits(fetch.fetch):
            self._fetches.all_missing(fetch)
        else:
            self._put_first(tasks)

    def _offsets(self, fetch: Fetch) -> list[int]:
        """Where each row begins in staging, and where the last one ends."""
        offsets = [fetch.offset]
        for name in fetch.rows:
            offsets.append(offsets[-1] + self._opened.kinds[name.kind].share.nbytes)
        return offsets

    def _fits(self, fetch: Fetch) -> bool:
        nbytes = self._offsets(fetch)[-1] - fetch.offset
        if self._staging.holds(fetch.offset, nbytes):
            return True
        self._reports.warn(
            "a fetch is outside of the staging area: offset=%d nbytes=%d staging=%d",
            fetch.offset,
            nbytes,
            self._staging.nbytes,
        )
        return False

    def _read(self, task: RowRead) -> Problem | None:
        """Read and verify one row; why it is not there, or None."""
        name = task.of.fetch.rows[task.place]
        if task.of.is_dropped:
            return Problem.LEFT_OUT
        share = self._opened.kinds[name.kind].share
        if not share.slabs:
            return None
        data = self._staging.view(task.offset, share.nbytes)
        footer = self._footer.view(0, share.footer_nbytes)
        try:
            self._own_shelf().read(task.of.namespace, name, share.ranges(data, footer))
            share.check(data, footer, task.of.namespace, name)
        except RowMissing:
            return Problem.MISSING
        except RowDamaged as error:
            self._reports.warn("a damaged row: row=%s: %s", name.file_name, error)
            return Problem.DAMAGED
        except StoreError as error:
            self._reports.count(read_failures=1)
            self._reports.warn("a row could not be read: row=%s: %s", name.file_name, error)
            return Problem.MISSING
        self._reports.count(rows_read=1, bytes_read=share.nbytes + share.footer_nbytes)
        return None

    def _load(self, load: LoadRows) -> None:
        fetch = self._fetches.take(load.number)
        if fetch is None:
            self._reports.warn("a load without its rows: request=%s", load.request)
            self.fail(load)
            return
        try:
            for spans in self._spans(fetch.fetch, load):
                self._copies.copy_in(spans)
            for gaps in self._opened.gaps(load.need):
                fill_with_zeros(gaps)
        except (StoreError, PlanningError, MemoryError, RuntimeError) as error:
            # Torch says RuntimeError where a GPU has no memory: that is no error of ours, of which
            # the third would switch the store off.
            self._reports.warn("a load failed: request=%s: %s", load.request, error)
            self.fail(load)
            return
        self._reports.count(loads=1)
        self._reports.loaded(load.request)

    def fail(self, load: LoadRows) -> None:
        """Report that a request's blocks do not hold what they should."""
        self._reports.count(load_failures=1)
        self._reports.load_failed(load.request)

    def _spans(self, fetch: Fetch, load: LoadRows) -> Iterator[Spans]:
        """What is to be copied, kind by kind: a kind without rows must need none."""
        rows: dict[RowKind, list[tuple[int, int]]] = {kind: [] for kind in self._opened.kinds}
        for name, offset in zip(fetch.rows, self._offsets(fetch), strict=False):
            rows[name.kind].append((name.index, self._staging.address + offset))
        for kind, of_kind in rows.items():
            own = self._opened.kinds[kind]
            if own.share.slabs:
                yield from own.pairing.spans_to_load(load.need, of_kind)

    def _own_shelf(self) -> Shelf:
        if self._shelf is None:
            self._shelf = self._open_shelf()
        return self._shelf
