"""Look-ups: which boundary of a prompt can be resumed from the store, on a thread of their own.

::

    engine's thread  Lookups ── LookupQuestion ──► LookupLoop ──► Catalogue, shelf
                       ◄──────── LookupAnswer ────────┘  ▲  │
    keeper           RowsListed, RowsStored, RowsGone ───┘  └── RowsStored ──► keeper

The engine's thread posts a look-up and asks again at later steps.  Hashing the prompt, asking
the catalogue and the shelf happen here, so that neither a long prompt nor a slow device delays
a step.

A *catalogue* holds the rows that a thread knows to be there, so that most look-ups need no shelf.
It may be wrong both ways: another engine has saved rows since it was listed, or evicted some.
Unknown rows are looked for in the shelf, and rows that are gone are noticed when they are read.
Damaged rows are not offered again until they are saved anew; rows that were missing when they
should have been read are not offered for a minute.

The keeper and the look-ups have a catalogue each, and put what they learn into each other's inbox.
A message is of one namespace, and ignored by a thread that is at another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.store.format.prompt_rows import Chain, IsThere, find_boundary, rows_needed
from pdconn.store.format.row import RowKind, RowName, StoreLayout, aligned
from pdconn.store.settings import REPEAT_S
from pdconn.store.shelf.interface import Shelf
from pdconn.store.store_errors import StoreError
from pdconn.threads import Box, ThreadDied, Worker

log = logging.getLogger(__name__)

_MISSING_S = 60.0


@dataclass(frozen=True, slots=True)
class RowsListed:
    """The rows of a namespace, and no others."""

    namespace: str
    rows: Sequence[RowName]


@dataclass(frozen=True, slots=True)
class RowsStored:
    """Rows that are there; ``are_new``: just committed, so that earlier failures do not count."""

    namespace: str
    rows: Sequence[RowName]
    are_new: bool = False


@dataclass(frozen=True, slots=True)
class RowsGone:
    """Rows that are not there any more."""

    namespace: str
    rows: Sequence[RowName]


@dataclass(frozen=True, slots=True)
class RowsFailed:
    """Rows that could not be read, or were not what was saved."""

    namespace: str
    missing: Sequence[RowName]
    damaged: Sequence[RowName]


@dataclass(frozen=True, slots=True)
class NamespaceChanged:
    """Rows are looked up in and saved to ``namespace`` from now on."""

    namespace: str


Learnt = RowsListed | RowsStored | RowsGone | RowsFailed | NamespaceChanged


class Catalogue:
    """Keys of the rows of one namespace, by kind.

    Attributes:
        namespace: which one.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._known: dict[RowKind, dict[bytes, RowName]] = {kind: {} for kind in RowKind}
        self._not_offered: dict[tuple[RowKind, bytes], float] = {}

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._known.values())

    def has_key(self, kind: RowKind, key: bytes) -> bool:
        """Whether the row is known to be there."""
        return key in self._known[kind]

    def learn_rows(self, learnt: Learnt, now: float) -> list[RowName]:
        """Apply what another thread has learnt.  Returns rows that were known and are gone."""
        if isinstance(learnt, NamespaceChanged):
            self._enter(learnt.namespace)
        elif learnt.namespace != self.namespace:
            return []
        elif isinstance(learnt, RowsListed):
            return self._list_anew(learnt.rows)
        elif isinstance(learnt, RowsStored):
            self._add(learnt.rows)
            for row in learnt.rows if learnt.are_new and self._not_offered else ():
                self._not_offered.pop((row.kind, row.key), None)
        elif isinstance(learnt, RowsGone):
            self._remove(learnt.rows)
        else:
            self._remove(learnt.missing)
            self._remove(learnt.damaged)
            for rows, until in (learnt.missing, now + _MISSING_S), (learnt.damaged, float("inf")):
                self._not_offered.update({(row.kind, row.key): until for row in rows})
        return []

    def is_offered(self, kind: RowKind, key: bytes, now: float) -> bool:
        """Whether the row may be promised to a request."""
        until = self._not_offered.get((kind, key))
        if until is not None and until <= now:
            del self._not_offered[kind, key]
            return True
        return until is None

    def _enter(self, namespace: str) -> None:
        """Forget the rows of another namespace; what is not offered stays so in every one."""
        if namespace != self.namespace:
            self.namespace = namespace
            self._known = {kind: {} for kind in RowKind}

    def _add(self, rows: Iterable[RowName]) -> None:
        for row in rows:
            self._known[row.kind][row.key] = row

    def _remove(self, rows: Iterable[RowName]) -> None:
        for row in rows:
            self._known[row.kind].pop(row.key, None)

    def _list_anew(self, rows: Iterable[RowName]) -> list[RowName]:
        known = self._known
        self._known = {kind: {} for kind in RowKind}
        self._add(rows)
        return [
            row
            for kind in RowKind
            for key, row in known[kind].items()
            if key not in self._known[kind]
        ]


Extras = Callable[[], Sequence[bytes] | None]
"""Gives what each canonical block depends on besides tokens; None if the prompt has no keys."""


@dataclass(frozen=True, slots=True, eq=False)
class LookupQuestion:
    """One look-up.

    ``limit`` is the highest boundary to look for, ``held`` the tokens held already.  Of ``tokens``
    those up to ``limit``, and the one after it, do not change any more.
    """

    number: int
    tokens: Sequence[int]
    extras: Extras
    limit: int
    held: int
    chain: Chain


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What a look-up has found.

    ``full`` counts leading FA rows that are there: the prompt parts from those saved behind them.
    ``cut_nbytes`` are the bytes of staging that the longest prefix needs, if that is more than
    there is, else 0.  ``known_extras`` is what ``extras`` gave; ``has_asked`` whether the shelf was
    asked.  ``there`` are keys by kind of the prompt's rows that are known to be in ``namespace``.
    """

    number: int
    namespace: str
    chain: Chain
    is_storable: bool = True
    known_extras: Sequence[bytes] | None = None
    has_asked: bool = False
    boundary: int = 0
    full: int = 0
    cut_nbytes: int = 0
    rows: tuple[RowName, ...] = ()
    there: tuple[tuple[RowKind, tuple[bytes, ...]], ...] = ()


@dataclass(slots=True, eq=False)
class Lookup:
    """A look-up as the engine's thread has it; ``answer`` is there once it is done."""

    question: LookupQuestion
    answer: LookupAnswer | None = None


@dataclass(frozen=True, slots=True)
class ShareSizes:
    """Bytes that one row of each kind takes in the staging area of the rank that has most."""

    fa: int
    wa: int

    @classmethod
    def from_shares(cls, shares: Sequence[StoreLayout]) -> ShareSizes:
        """From each rank's share of the rows."""
        return cls(
            max(aligned(share.fa.data_nbytes) for share in shares),
            max((aligned(s.wa.data_nbytes) for s in shares if s.wa is not None), default=0),
        )

    def staging_nbytes(self, rows: Sequence[tuple[RowKind, int]] | Sequence[RowName]) -> int:
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
    def largest(
        cls, layout: StoreLayout, sizes: ShareSizes, staging: int, tokens: range, has: IsThere
    ) -> Fitting:
        """Of boundaries above ``tokens.start``, which are held, up to ``tokens.stop``."""
        size, held, limit = layout.block_tokens, tokens.start, tokens.stop
        most_blocks = staging // sizes.fa if sizes.fa else limit
        cut_nbytes = 0
        while limit > held:
            boundary = find_boundary(layout, limit, has)
            if boundary <= held:
                break
            rows = rows_needed(layout, held, boundary)
            nbytes = sizes.staging_nbytes(rows)
            if nbytes <= staging:
                return cls(boundary, tuple(rows), cut_nbytes)
            cut_nbytes = cut_nbytes or nbytes
            limit = min(boundary - size, (held // size + most_blocks) * size)
        return cls(cut_nbytes=cut_nbytes)


@dataclass(slots=True, eq=False)
class Finder:
    """Finds rows of prompts in a catalogue and a shelf.

    ``staging`` are bytes of a rank's staging area: a boundary whose rows need more is not found.
    """

    layout: StoreLayout
    catalogue: Catalogue
    sizes: ShareSizes
    staging: int
    clock: Callable[[], float]

    def hash_prompt(self, question: LookupQuestion) -> LookupAnswer:
        """The keys of a prompt, which need no shelf."""
        empty = LookupAnswer(question.number, self.catalogue.namespace, question.chain)
        extras = question.extras()
        if extras is None:
            return replace(empty, is_storable=False)
        # The last token is computed and not looked up, and a row that it ends may be there.
        chain = question.chain.extended(question.tokens, question.limit + 1, extras)
        return replace(empty, known_extras=extras, chain=chain)

    def find_rows(
        self, question: LookupQuestion, hashed: LookupAnswer, asked: AskedRows
    ) -> LookupAnswer:
        """Which rows of a prompt with keys are there."""
        chain = hashed.chain
        limit = min(question.limit, len(chain.keys) * self.layout.block_tokens)
        tokens = range(question.held, max(limit, question.held))
        found = Fitting.largest(self.layout, self.sizes, self.staging, tokens, asked)
        has = self.catalogue.has_key
        return replace(
            hashed,
            boundary=found.boundary,
            cut_nbytes=found.cut_nbytes,
            rows=tuple(chain.name(kind, index) for kind, index in found.rows),
            full=asked.full,
            has_asked=asked.has_asked,
            there=tuple(
                (kind, tuple(key for key in chain.keys if has(kind, key))) for kind in RowKind
            ),
        )


class AskedRows:
    """Says whether rows of one prompt are there; ``full`` counts its leading FA rows that are.

    ``found`` are rows that the shelf has and the catalogue lacked.
    """

    def __init__(self, finder: Finder, chain: Chain, shelf: Shelf) -> None:
        self._finder, self._chain, self._shelf = finder, chain, shelf
        self._now = finder.clock()
        self.full = 0
        self.has_asked = False
        self.found: list[RowName] = []

    def __call__(self, kind: RowKind, index: int) -> bool:
        catalogue, key = self._finder.catalogue, self._chain.keys[index]
        if not catalogue.is_offered(kind, key, self._now):
            return False
        if not catalogue.has_key(kind, key):
            name = self._chain.name(kind, index)
            self.has_asked = True
            if not self._shelf.has(catalogue.namespace, name):
                return False
            catalogue.learn_rows(RowsStored(catalogue.namespace, (name,)), self._now)
            self.found.append(name)
        if kind is RowKind.FA:
            self.full = max(self.full, index + 1)
        return True


class Lookups:
    """The engine's end of the look-ups' boxes.

    Args:
        worker: their thread.
        note: called with each answer, on the engine's thread.
    """

    def __init__(
        self,
        worker: Worker[LookupQuestion | Learnt],
        note: Callable[[LookupAnswer], None] = lambda answer: None,
    ) -> None:
        self._worker, self._note = worker, note
        self._open: dict[int, Lookup] = {}
        self._number = 0
        worker.start_thread()

    def look_up(
        self, tokens: Sequence[int], extras: Extras, limit: int, held: int, chain: Chain
    ) -> Lookup:
        """Post a :class:`LookupQuestion`."""
        self._number += 1
        question = LookupQuestion(self._number, tokens, extras, limit, held, chain)
        lookup = self._open[self._number] = Lookup(question)
        self._worker.inbox.put(question)
        return lookup

    def take_answers(self) -> None:
        """Fill in the answers that have come."""
        if not self._worker.outbox.items:
            return
        for answer in self._worker.outbox.take_all():
            if isinstance(answer, ThreadDied):
                continue  # requests that wait for it time out, and are computed
            self._note(answer)
            lookup = self._open.pop(answer.number, None)
            if lookup is not None:
                lookup.answer = answer

    def close(self) -> None:
        """End the thread; look-ups that wait get no answer."""
        self._worker.end_thread(10.0)


class LookupLoop:
    """What the look-ups' thread owns.

    Args:
        inbox, outbox: of :class:`Lookups`; the keeper puts what it learns into the former.
        keeper: the keeper's inbox, for rows that its catalogue lacks.
        shelf: opens the shelf, on the thread.
    """

    def __init__(
        self,
        inbox: Box[LookupQuestion | Learnt],
        outbox: Box[LookupAnswer | ThreadDied],
        keeper: Box[Any],
        finder: Finder,
        shelf: Callable[[], Shelf],
    ) -> None:
        self._inbox, self._outbox, self._keeper = inbox, outbox, keeper
        self._finder, self._open_shelf = finder, shelf
        self._shelf: Shelf | None = None
        self._has_warned_of_cut = False
        self._warnings = QuietLog(log, pause_s=REPEAT_S)

    def run_lookups(self) -> None:
        """Answer in order until the inbox is closed."""
        try:
            while not self._inbox.is_closed:
                item = self._inbox.take_one()
                if isinstance(item, LookupQuestion):
                    self._outbox.put(self._answer(item))
                elif item is not None:
                    self._finder.catalogue.learn_rows(item, self._finder.clock())
        finally:
            if self._shelf is not None:
                self._shelf.close()

    def _answer(self, question: LookupQuestion) -> LookupAnswer:
        """The answer, of what is known by then if something fails."""
        finder = self._finder
        answer = LookupAnswer(question.number, finder.catalogue.namespace, question.chain)
        try:
            answer = finder.hash_prompt(question)
            if answer.is_storable:
                self._shelf = self._shelf or self._open_shelf()
                asked = AskedRows(finder, answer.chain, self._shelf)
                answer = finder.find_rows(question, answer, asked)
                if asked.found:
                    self._keeper.put(RowsStored(finder.catalogue.namespace, tuple(asked.found)))
                self._warn_of_cut(answer)
        except StoreError as error:
            self._warnings.warning("pdconn: store: look-up failed: %s", error)
        except Exception:  # the thread must answer the next one
            log.exception("pdconn: store: look-up failed")
        return answer

    def _warn_of_cut(self, answer: LookupAnswer) -> None:
        """Warn once that a larger ``staging`` would load more; a metric counts every case."""
        if not answer.cut_nbytes or self._has_warned_of_cut:
            return
        self._has_warned_of_cut = True
        log.warning(
            "pdconn: store: staging holds less than a stored prefix, less of it is loaded; said "
            "once: tokens=%d needed=%d staging=%d",
            answer.boundary,
            answer.cut_nbytes,
            self._finder.staging,
        )
