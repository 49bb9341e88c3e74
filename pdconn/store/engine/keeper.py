"""The background thread of a store in the scheduler's process: commits, budget, eviction.

The engine's thread asks it for nothing that takes a system call: rows to save are admitted by
an allowance that this thread keeps topped up, and what it is told goes into queues::

    engine's thread  ── admitted, add, touch, failed ──►  keeper  ──►  shelf, ledger, evictor
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdconn.store.engine.catalogue import Catalogue
from pdconn.store.engine.commits import Committer, SaveBatch
from pdconn.store.engine.lookups import ShareSizes
from pdconn.store.errors import StoreError
from pdconn.store.format.names import RowName
from pdconn.store.shelf.base import Shelf, StoredPart, StoredRow

log = logging.getLogger(__name__)

_BUSY_S = 0.02
"""How often notes are looked for while rows are being saved."""
_IDLE_S = 0.5
_TOUCH_S = 60.0
"""A row's last use is noted that often at most."""
_FAULT_S = 5.0
"""After the shelf failed, the next try."""


class Budget(Protocol):
    """The byte budget, as the keeper uses it."""

    def take(self, nbytes: int) -> bool:
        """On the engine's thread: whether ``nbytes`` may be written.  No system call."""

    def open(self, shelf: Shelf) -> None:
        """On the keeper's thread, first."""

    def step(self, shelf: Shelf, namespace: str) -> list[RowName]:
        """Top up, evict; rows of ``namespace`` that were evicted."""

    def commit(self, shelf: Shelf, part: StoredPart, namespace: str, name: RowName) -> bool:
        """Commit a part of taken bytes, to be evicted one day; False if the row was there."""

    def release(self, nbytes: int) -> None:
        """Taken bytes are free again."""

    def remove(self, shelf: Shelf, namespace: str, name: RowName) -> int:
        """Remove a damaged row; its bytes."""

    def usage(self) -> dict[str, int]:
        """Gauges for metrics."""

    def take_listing(self) -> list[StoredRow] | None:
        """All rows that are there, if they were listed anew since the last call."""

    def take_evicted(self) -> tuple[int, int]:
        """Rows of any namespace, and their bytes, evicted since the last call."""

    def close(self) -> None:
        """Give back what was not used."""


Told = Callable[[Sequence[RowName], Sequence[RowName]], None]
"""Is told of rows that are there now, and of rows that are gone, on the keeper's thread."""


class Keeper:
    """Keeps the rows of one root.

    Args:
        namespace: where the engine's rows are, until :meth:`cleared`.
        shelf: opens the shelf, on the thread.
        budget: the byte budget; None for a store that is only read.
        told: is told of rows committed and gone.
        describe: keeps the layout beside the rows of a namespace, for those who verify them.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        namespace: str,
        *,
        catalogue: Catalogue,
        sizes: ShareSizes,
        shelf: Callable[[], Shelf],
        budget: Budget | None,
        committer: Callable[[Callable[[RowName], None]], Committer],
        clock: Callable[[], float],
        told: Told | None,
        describe: Callable[[str], None] = lambda namespace: None,
    ) -> None:
        self.sizes = sizes
        self._namespace, self._catalogue, self._budget = namespace, catalogue, budget
        self._open_shelf, self._clock, self._told = shelf, clock, told or (lambda new, gone: None)
        self._describe = describe
        self._saving: set[RowName] = set()
        self._committer = committer(self._saving.discard)
        self._touched: dict[RowName, float] = {}
        self._is_open = False
        self._queue: queue.SimpleQueue[Callable[[Shelf], None] | None] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._usage: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="pdconn-store-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def namespace(self) -> str:
        """Where rows are looked up and saved now."""
        return self._namespace

    # On the engine's thread

    def is_wanted(self, name: RowName) -> bool:
        """Whether the row is neither there nor being saved."""
        return name not in self._saving and not self._catalogue.has(name.kind, name.key)

    def admitted(self, names: Sequence[RowName]) -> list[RowName]:
        """Those of ``names``, from the first on, that the budget has room for now."""
        taken: list[RowName] = []
        for name in names:
            if self._budget is None or not self._budget.take(self._committer.nbytes(name.kind)):
                self._count(store_saves_skipped=len(names) - len(taken))
                break
            taken.append(name)
        self._saving.update(taken)
        return taken

    def add(self, batch: SaveBatch) -> None:
        """Rows are on their way to the shelf."""
        self._queue.put(lambda shelf: self._committer.add(batch))

    def not_saved(self, part: str) -> None:
        """A rank cannot save its share of the row."""
        self._queue.put(lambda shelf: self._committer.not_saved(part))

    def touch(self, rows: Sequence[RowName]) -> None:
        """The rows were used.  Forgotten while the shelf cannot be opened, perhaps for ever."""
        if not self._is_open:
            return
        self._queue.put(lambda shelf: self._touch(shelf, rows))

    def failed(self, missing: Iterable[RowName], damaged: Iterable[RowName]) -> None:
        """Rows could not be read, or were not what was saved: the latter are removed."""
        missing, damaged = list(missing), list(damaged)
        self._catalogue.failed(missing, self._clock(), damaged=False)
        self._catalogue.failed(damaged, self._clock(), damaged=True)
        self._queue.put(lambda shelf: self._remove(shelf, missing, damaged))

    def cleared(self, namespace: str) -> None:
        """Rows are saved to and looked up in ``namespace`` from now on."""
        self._namespace = namespace
        self._catalogue.clear()

    def is_saving(self) -> bool:
        """Whether a row is on its way to the shelf."""
        return bool(self._saving)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        if not self._counts:
            return {}
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return {name: amount for name, amount in counts.items() if amount}

    def usage(self) -> dict[str, int]:
        """Gauges: bytes of the budget, as last seen."""
        return self._usage

    def close(self) -> None:
        """End the thread; rows whose notes are all there are committed first."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(20.0)

    def _count(self, **amounts: int) -> None:
        with self._counting:
            self._counts.update(amounts)

    # On the keeper's thread

    def _run(self) -> None:
        shelf: Shelf | None = None
        is_over = False
        while not is_over:
            try:
                shelf = shelf or self._begin()
                is_over = self._take(shelf)
                self._step(shelf)
            except StoreError as error:
                log.warning("pdconn: store: %s; next try in %.0f s", error, _FAULT_S)
                is_over = is_over or self._pause(_FAULT_S)
            except Exception:  # the thread goes on, or nothing would be committed or evicted
                log.exception("pdconn: store: the background thread failed")
                is_over = is_over or self._pause(_FAULT_S)
        if self._budget is not None:
            self._budget.close()
        if shelf is not None:
            shelf.close()

    def _begin(self) -> Shelf:
        shelf = self._open_shelf()
        listing = None
        if self._budget is not None:
            self._budget.open(shelf)
            # Taken now: rows that are committed before the first step are not in it.
            listing = self._budget.take_listing()
        rows = shelf.rows(self._namespace) if listing is None else listing
        self._catalogue.add(row.name for row in rows if row.namespace == self._namespace)
        self._is_open = True
        return shelf

    def _take(self, shelf: Shelf) -> bool:
        """Do what was asked for; whether the thread is to end."""
        wait_s = _BUSY_S if len(self._committer) else _IDLE_S
        try:
            asked = self._queue.get(timeout=wait_s)
            while asked is not None:
                asked(shelf)
                asked = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _pause(self, seconds: float) -> bool:
        """Wait; whether the thread is to end.  What was asked for meanwhile stays queued."""
        kept: list[Callable[[Shelf], None] | None] = []
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            try:
                kept.append(self._queue.get(timeout=left))
            except queue.Empty:
                break
            if kept[-1] is None:
                return True
        for asked in kept:
            self._queue.put(asked)
        return False

    def _step(self, shelf: Shelf) -> None:
        if len(self._committer):
            self._describe(self._namespace)
        done = self._committer.step(shelf, lambda: self._namespace, self._clock())
        self._count(
            store_save_failures=self._committer.take_failures(),
            store_rows_committed=sum(row.is_new for row in done),
        )
        gone: list[RowName] = []
        if self._budget is not None:
            evicted = self._budget.step(shelf, self._namespace)
            listing = self._budget.take_listing()
            if listing is not None:
                here = [row.name for row in listing if row.namespace == self._namespace]
                gone += self._catalogue.listed(here)
            gone += evicted
            self._catalogue.removed(evicted)
            rows, nbytes = self._budget.take_evicted()
            self._count(store_rows_evicted=rows, store_evicted_bytes=nbytes)
            self._usage = self._budget.usage()
        if done or gone:
            self._told([row.name for row in done], gone)

    def _touch(self, shelf: Shelf, rows: Sequence[RowName]) -> None:
        now = self._clock()
        due = [row for row in rows if now - self._touched.get(row, -_TOUCH_S) >= _TOUCH_S]
        if len(self._touched) > 1 << 17:
            self._touched.clear()
        self._touched.update(dict.fromkeys(due, now))
        try:
            shelf.touch(self._namespace, due)
        except StoreError as error:  # such as a root that we may only read
            log.debug("pdconn: store: use not noted: %s", error)

    def _remove(self, shelf: Shelf, missing: list[RowName], damaged: list[RowName]) -> None:
        if self._budget is not None:
            for row in damaged:
                self._budget.remove(shelf, self._namespace, row)
                log.warning("pdconn: store: damaged row removed: row=%s", row.file_name)
        self._told((), [*missing, *damaged])
