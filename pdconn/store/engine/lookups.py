"""Look-ups: which boundary of a prompt can be resumed from the store, on a thread of their own.

The engine's thread posts a look-up and asks again at later steps.  Hashing the prompt, asking
the catalogue and the shelf happen here, so that neither a long prompt nor a slow device delays
a step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.engine.catalogue import Catalogue
from pdconn.store.errors import StoreError
from pdconn.store.format.boundaries import Has, find_boundary, rows_needed
from pdconn.store.format.layout import StoreLayout, aligned
from pdconn.store.format.names import Chain, RowKind, RowName
from pdconn.store.settings import REPEAT_S
from pdconn.store.shelf.base import Shelf

log = logging.getLogger(__name__)

Extras = Callable[[], Sequence[bytes] | None]
"""What else than tokens each canonical block depends on; None: the prompt has no keys."""


@dataclass(slots=True, eq=False)
class Lookup:
    """One look-up.  Fields below ``done`` are valid once it is set.

    ``limit`` is the highest boundary to look for, ``held`` the tokens held already.  ``full``
    counts leading FA rows that are there, which is where prompts part.  ``cut_nbytes`` are the
    bytes of staging that the longest prefix needs, if that is more than there is, else 0.
    ``known_extras`` is what ``extras`` gave; ``has_asked`` whether the shelf was asked.
    """

    tokens: Sequence[int]
    extras: Extras
    limit: int
    held: int
    chain: Chain
    is_storable: bool = True
    known_extras: Sequence[bytes] | None = None
    has_asked: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    boundary: int = 0
    full: int = 0
    cut_nbytes: int = 0
    rows: tuple[RowName, ...] = ()


@dataclass(frozen=True, slots=True)
class ShareSizes:
    """Bytes that one row of each kind takes in the staging area of the rank that has most."""

    fa: int
    wa: int

    @classmethod
    def of(cls, shares: Sequence[StoreLayout]) -> ShareSizes:
        """From each rank's share of the rows."""
        return cls(
            max(aligned(share.fa.data_nbytes) for share in shares),
            max((aligned(s.wa.data_nbytes) for s in shares if s.wa is not None), default=0),
        )

    def of_rows(self, rows: Sequence[tuple[RowKind, int]] | Sequence[RowName]) -> int:
        """Bytes of staging for all of ``rows``."""
        kinds = [row.kind if isinstance(row, RowName) else row[0] for row in rows]
        return sum(self.fa if kind is RowKind.FA else self.wa for kind in kinds)


@dataclass(frozen=True, slots=True)
class Fitting:
    """The largest boundary whose rows fit into staging, and they; 0 and none if there is none.

    ``cut_nbytes`` are the bytes of staging that the largest of all boundaries needs, if it is
    another one, else 0.
    """

    boundary: int = 0
    rows: tuple[tuple[RowKind, int], ...] = ()
    cut_nbytes: int = 0

    @classmethod
    def of(
        cls, layout: StoreLayout, sizes: ShareSizes, staging: int, tokens: range, has: Has
    ) -> Fitting:
        """For boundaries above ``tokens.start``, which are held, up to ``tokens.stop``."""
        size, held, limit = layout.block_tokens, tokens.start, tokens.stop
        most_blocks = staging // sizes.fa if sizes.fa else limit
        cut_nbytes = 0
        while limit > held:
            boundary = find_boundary(layout, limit, has)
            if boundary <= held:
                break
            rows = rows_needed(layout, held, boundary)
            nbytes = sizes.of_rows(rows)
            if nbytes <= staging:
                return cls(boundary, tuple(rows), cut_nbytes)
            cut_nbytes = cut_nbytes or nbytes
            limit = min(boundary - size, (held // size + most_blocks) * size)
        return cls(cut_nbytes=cut_nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Finder:
    """What look-ups are answered from.

    ``staging`` are bytes of a rank's staging area: a boundary whose rows need more is not found.
    """

    layout: StoreLayout
    namespace: Callable[[], str]
    catalogue: Catalogue
    sizes: ShareSizes
    staging: int
    clock: Callable[[], float]

    def hash(self, lookup: Lookup) -> bool:
        """Fill in the keys of a prompt, which need no shelf; whether it has any."""
        lookup.known_extras = extras = lookup.extras()
        if extras is None:
            lookup.is_storable = False
            return False
        lookup.chain = lookup.chain.extended(lookup.tokens, lookup.limit, extras)
        return True

    def answer(self, lookup: Lookup, shelf: Shelf) -> None:
        """Fill in which rows of a prompt with keys are there."""
        chain = lookup.chain
        has = _Asked(self, chain, shelf)
        limit = min(lookup.limit, len(chain.keys) * self.layout.block_tokens)
        tokens = range(lookup.held, max(limit, lookup.held))
        found = Fitting.of(self.layout, self.sizes, self.staging, tokens, has)
        lookup.boundary, lookup.cut_nbytes = found.boundary, found.cut_nbytes
        lookup.rows = tuple(chain.name(kind, index) for kind, index in found.rows)
        lookup.full, lookup.has_asked = has.full, has.has_asked


class _Asked:
    """Whether rows of one prompt are there; ``full`` counts its leading FA rows that are."""

    def __init__(self, finder: Finder, chain: Chain, shelf: Shelf) -> None:
        self._finder, self._chain, self._shelf = finder, chain, shelf
        self._namespace, self._now = finder.namespace(), finder.clock()
        self.full = 0
        self.has_asked = False

    def __call__(self, kind: RowKind, index: int) -> bool:
        catalogue, key = self._finder.catalogue, self._chain.keys[index]
        if not catalogue.is_offered(kind, key, self._now):
            return False
        if not catalogue.has(kind, key):
            name = self._chain.name(kind, index)
            self.has_asked = True
            if not self._shelf.has(self._namespace, name):
                return False
            catalogue.add((name,))
        if kind is RowKind.FA:
            self.full = max(self.full, index + 1)
        return True


class LookupThread:
    """Answers look-ups in order; ``shelf`` opens the shelf, on the thread."""

    def __init__(self, finder: Finder, shelf: Callable[[], Shelf]) -> None:
        self._finder, self._open_shelf = finder, shelf
        self._has_told_of_cuts = False
        self._warnings = QuietLog(log, pause_s=REPEAT_S)
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdconn-store-lookup", daemon=True)
        self._thread.start()

    def post(self, lookup: Lookup) -> None:
        """Answer it soon."""
        self._queue.put(lookup)

    def close(self) -> None:
        """End the thread; look-ups that wait are never answered."""
        self._queue.put(None)
        self._thread.join(10.0)

    def _tell_of_cut(self, lookup: Lookup) -> None:
        """Say once that a larger ``staging`` would load more; a metric counts the rest."""
        if not lookup.cut_nbytes or self._has_told_of_cuts:
            return
        self._has_told_of_cuts = True
        log.warning(
            "pdconn: store: staging holds less than a stored prefix, less of it is loaded; said "
            "once: tokens=%d needed=%d staging=%d",
            lookup.boundary,
            lookup.cut_nbytes,
            self._finder.staging,
        )

    def _run(self) -> None:
        shelf: Shelf | None = None
        while (lookup := self._queue.get()) is not None:
            try:
                if self._finder.hash(lookup):
                    shelf = shelf or self._open_shelf()
                    self._finder.answer(lookup, shelf)
                    self._tell_of_cut(lookup)
            except StoreError as error:
                self._warnings.warning("pdconn: store: look-up failed: %s", error)
            except Exception:  # the thread must answer the next one
                log.exception("pdconn: store: look-up failed")
            lookup.done.set()
        if shelf is not None:
            shelf.close()
