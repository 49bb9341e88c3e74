"""Rows that a thread knows to be there, in memory, so that most look-ups need no shelf.

It may be wrong both ways: another engine has saved rows since it was listed, or evicted some.
Rows not known are asked of the shelf, and rows that are gone are found out when they are read.
Rows whose bytes were damaged are not offered again until they were saved anew; rows that were
missing when they should have been read are not offered for a minute.

The keeper and the look-ups have one each, and tell each other what they learn::

    keeper    RowsListed, RowsStored, RowsGone ──► look-ups
    look-ups  RowsStored ──► keeper

What a message says is of one namespace, and ignored by a thread that is at another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdconn.store.format.row import RowKind, RowName

_MISSING_S = 60.0


@dataclass(frozen=True, slots=True)
class RowsListed:
    """The rows of a namespace, and no others."""

    namespace: str
    rows: Sequence[RowName]


@dataclass(frozen=True, slots=True)
class RowsStored:
    """Rows that are there; ``are_new``: committed just now, so whatever was wrong is over."""

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

    def has(self, kind: RowKind, key: bytes) -> bool:
        """Whether the row is known to be there."""
        return key in self._known[kind]

    def learn(self, learnt: Learnt, now: float) -> list[RowName]:
        """Take over what another thread says; rows that were known and are gone by it."""
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
        """No row of another namespace is known; rows that failed once are of any."""
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
