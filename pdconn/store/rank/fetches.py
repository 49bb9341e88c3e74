"""Fetches: rows read into staging, verified there, and copied to KV blocks by a load.

A fetch is answered once, when all its rows have been tried; its bytes belong to it until it was
loaded, or dropped and answered::

    Fetch ──► rows: read, verify ──► FetchResult ──► LoadRows ──► loaded
                │                                      └────► failed
    DropFetch ──┴─► rows not begun are left out ──► FetchResult, over

Several threads take rows from one box, so that one reads while another verifies.  Which rows are
left of which fetch is known by the engine's thread, which alone has the :class:`FetchTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdconn.integrity.zeros import fill_with_zeros
from pdconn.planning.errors import PlanningError
from pdconn.store.commands import Fetch, FetchResult, LoadRows
from pdconn.store.errors import RowDamaged, RowMissing, StoreError
from pdconn.store.format.names import RowKind, RowName
from pdconn.store.rank.copies import Copies
from pdconn.store.rank.shares import OpenedRank
from pdconn.store.rank.staging import HostArea
from pdconn.store.rank.tasks import (
    Answer,
    FetchRefused,
    Loaded,
    LoadFailed,
    Problem,
    RowTried,
    TaskReports,
)
from pdconn.store.shelf.base import Shelf
from pdconn.threads import Box
from transport import Spans
from transport.streams import StreamPoint


@dataclass(slots=True, eq=False)
class FetchUnderWay:
    """A fetch: rows ``left`` to try, and ``bad`` ones, by their places among the rows."""

    fetch: Fetch
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
class BeginFetch:
    """Rows to read, once it is known where each lies in staging."""

    fetch: Fetch
    namespace: str


@dataclass(frozen=True, slots=True, eq=False)
class ReadRow:
    """A row to read: its place in its fetch, and where it lies in staging."""

    of: BeginFetch
    place: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadFetched:
    """A load of a fetch, which writes to its blocks once the GPU has come to ``after``."""

    fetch: Fetch
    load: LoadRows
    after: StreamPoint | None


ReadTask = BeginFetch | ReadRow | LoadFetched


def refused_read(task: ReadTask) -> Answer:
    """The answer to a task that is not done."""
    if isinstance(task, ReadRow):
        return RowTried(task.of.fetch.number, task.place, Problem.MISSING)
    if isinstance(task, BeginFetch):
        return FetchRefused(task.fetch.number)
    return LoadFailed(task.load.request)


class FetchTable:
    """The fetches that have bytes in staging."""

    def __init__(self) -> None:
        self._fetches: dict[int, FetchUnderWay] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def add_fetch(self, fetch: Fetch) -> None:
        """A fetch begins."""
        self._fetches[fetch.number] = FetchUnderWay(fetch, set(range(len(fetch.rows))))

    def rows_tried(
        self, number: int, places: Sequence[int] | None, problem: Problem | None
    ) -> FetchResult | None:
        """Rows were read, or could not be; all that are left, for None.  The last one answers."""
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
        if fetch.is_dropped:
            del self._fetches[number]
        return fetch.result()

    def drop_fetch(self, number: int) -> None:
        """The bytes of a fetch are not needed (any more)."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            fetch.is_dropped = True
            if not fetch.left:
                del self._fetches[number]

    def take_fetch(self, number: int) -> Fetch | None:
        """End a fetch by a load: None if there is none, or not with every row."""
        fetch = self._fetches.get(number)
        if fetch is None or fetch.left:
            return None
        del self._fetches[number]
        return None if fetch.bad or fetch.is_dropped else fetch.fetch


class RowReader:
    """One thread's reads and loads.

    Args:
        inbox: where the rows of a fetch are put, before all that waits.
        open_shelf: opens the thread's own shelf, at the first row and again where that failed.
        copies: the thread's own, to KV memory.
    """

    def __init__(
        self,
        opened: OpenedRank,
        staging: HostArea,
        inbox: Box[ReadTask],
        reports: TaskReports,
        *,
        open_shelf: Callable[[], Shelf],
        copies: Copies,
    ) -> None:
        self._opened, self._staging = opened, staging
        self._inbox, self._reports = inbox, reports
        self._open_shelf, self._copies = open_shelf, copies
        self._footer = HostArea(opened.most_footer_nbytes)
        self._shelf: Shelf | None = None

    def close(self) -> None:
        """Close the shelf."""
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def work(self, task: ReadTask) -> None:
        """Do one task and report it."""
        if isinstance(task, ReadRow):
            tried = RowTried(task.of.fetch.number, task.place, self._read(task))
            self._reports.answer(tried, quietly=self._has_more(task.of))
        elif isinstance(task, BeginFetch):
            self._begin(task)
        else:
            if task.after is not None:
                task.after.synchronize()
            self._load(task)

    def _has_more(self, fetch: BeginFetch) -> bool:
        """Whether rows of the same fetch wait: the engine has no answer without them."""
        try:
            following = self._inbox.items[0]
        except IndexError:
            return False
        return isinstance(following, ReadRow) and following.of is fetch

    def _begin(self, begun: BeginFetch) -> None:
        """Put the fetch's rows before other fetches; all are missing where there is no room."""
        tasks: list[ReadTask] = []
        for place, offset in enumerate(self._offsets(begun.fetch)[:-1]):
            tasks.append(ReadRow(begun, place, offset))
        if not tasks or not self._fits(begun.fetch):
            self._reports.answer(FetchRefused(begun.fetch.number))
        else:
            self._inbox.put_first(tasks)

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

    def _read(self, task: ReadRow) -> Problem | None:
        """Read and verify one row; why it is not there, or None."""
        name = task.of.fetch.rows[task.place]
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

    def _load(self, task: LoadFetched) -> None:
        load = task.load
        try:
            for spans in self._spans(task.fetch, load):
                self._copies.copy_in(spans)
            for gaps in self._opened.gaps(load.need):
                fill_with_zeros(gaps)
        except (StoreError, PlanningError, MemoryError, RuntimeError) as error:
            # Torch says RuntimeError where a GPU has no memory: that is no error of ours, of which
            # the third would switch the store off.
            self._reports.warn("a load failed: request=%s: %s", load.request, error)
            self._reports.answer(LoadFailed(load.request))
            return
        self._reports.count(loads=1)
        self._reports.answer(Loaded(load.request))

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
