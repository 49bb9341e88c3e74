"""The reports of ``pdconn store``.  Documents have bytes and seconds since the epoch, unrounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdconn.store.budget.accounts import Usage
from pdconn.store.inspect import NamespaceSummary, RootSummary, RowAmount
from pdconn.store.shelf.interface import StoredRow, believed_use
from pdconn.store.verify import CheckedRow, RowState
from pdconn.tools.output.columns import Column, cells, document, headings, text_table
from pdconn.tools.output.table import table
from pdconn.tools.output.units import binary_size, duration, grouped, known

_MOST_SHOWN = 20
"""Bad rows in the table; the document has all."""


def _amount_text(amount: RowAmount) -> str:
    return f"{amount.rows:,}, {binary_size(amount.nbytes)}"


def _amount_document(amount: RowAmount) -> dict[str, int]:
    return {"rows": amount.rows, "bytes": amount.nbytes}


def _hex(digest: bytes) -> str:
    return digest.hex()


# --- namespaces and rows ------------------------------------------------------------------


@dataclass(frozen=True)
class NamespacesReport:
    """One line per namespace; ``now`` in seconds since the epoch."""

    found: Sequence[NamespaceSummary]
    now: float

    def text(self, width: int | None = None) -> str:
        """The table in whole lines; ignores ``width``."""
        return text_table(_namespace_columns(self.now), self.found) if self.found else "no rows"

    def document(self) -> list[dict[str, Any]]:
        """One object per namespace; null for unknown values."""
        return _namespace_documents(self.found)


def _namespace_documents(found: Sequence[NamespaceSummary]) -> list[dict[str, Any]]:
    return [document(_namespace_columns(now=0.0), one) for one in found]


def _namespace_columns(now: float) -> list[Column[NamespaceSummary]]:
    tokens = known(grouped, "?")

    def age(used_at: float) -> str:
        return _age(used_at, now)

    return [
        Column("namespace", "namespace", lambda one: one.namespace),
        Column("FA\nrows", "fa.rows", lambda one: one.fa.rows, grouped),
        Column("FA\nbytes", "fa.bytes", lambda one: one.fa.nbytes, binary_size),
        Column("WA\nrows", "wa.rows", lambda one: one.wa.rows, grouped),
        Column("WA\nbytes", "wa.bytes", lambda one: one.wa.nbytes, binary_size),
        Column("kept\nbytes", "kept.bytes", lambda one: one.kept.nbytes, binary_size),
        Column(None, "block_tokens", lambda one: one.block_tokens),
        Column(
            "longest prefix\ntokens",
            "longest_prefix_tokens",
            lambda one: one.tokens(one.longest_prefix),
            tokens,
        ),
        Column(
            "resumable\ntokens",
            "longest_resumable_tokens",
            lambda one: one.tokens(one.longest_resumable),
            tokens,
        ),
        Column("rows not\nreached", "rows_not_reached", lambda one: one.unreached, grouped),
        Column(None, "oldest_use", lambda one: one.oldest_use),
        Column("newest\nuse", "newest_use", lambda one: one.newest_use, age),
        Column("oldest\nuse", None, lambda one: one.oldest_use, age),
    ]


@dataclass(frozen=True)
class RowsReport:
    """One line per row; ``now`` in seconds since the epoch."""

    rows: Sequence[StoredRow]
    now: float

    def text(self, width: int | None = None) -> str:
        """The table in whole lines; ignores ``width``."""
        return text_table(_row_columns(self.now), self.rows) if self.rows else "no rows"

    def document(self) -> list[dict[str, Any]]:
        """One object per row."""
        return [_row_document(row) for row in self.rows]


def _row_document(row: StoredRow) -> dict[str, Any]:
    return document(_row_columns(now=0.0), row)


def _row_columns(now: float) -> list[Column[StoredRow]]:
    return [
        Column("namespace", "namespace", lambda row: row.namespace),
        Column("kind", "kind", lambda row: row.name.kind, str.upper, str),
        Column("index", "index", lambda row: row.name.index),
        Column("key", "key", lambda row: row.name.key, _hex, _hex),
        Column(
            "parent",
            "parent",
            lambda row: row.name.parent.hex() if any(row.name.parent) else None,
            known(str),
        ),
        Column("tenant", "tenant", lambda row: row.name.tenant.hex() or None, known(str)),
        Column("bytes", "bytes", lambda row: row.nbytes, grouped),
        Column("last use", "used_at", lambda row: row.used_at, lambda at: _age(at, now)),
    ]


def _age(used_at: float, now: float) -> str:
    """How long ago a row was used; of one that is kept, for how long it will be."""
    ahead = believed_use(used_at, now) - now
    return f"kept {duration(ahead)}" if ahead > 0 else duration(max(0.0, now - used_at))


# --- the root -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RootReport:
    """Totals, the budget, and the writers of a root."""

    found: RootSummary

    def text(self, width: int | None = None) -> str:
        """One line per fact, and a table of writers; ignores ``width``."""
        names, values = headings(_ROOT), cells(_ROOT, self.found)
        text = "\n".join(f"{n:<14} {value}" for n, value in zip(names, values, strict=True))
        writers = self.found.writers
        if not writers:
            return text
        rows = [[name, f"{one.rows:,}", binary_size(one.nbytes)] for name, one in writers.items()]
        return f"{text}\n\n{table(['writer', 'parts', 'bytes'], rows)}"

    def document(self) -> dict[str, Any]:
        """All facts, and every namespace."""
        return document(_ROOT, self.found)


def _writers_document(writers: Mapping[str, RowAmount]) -> dict[str, Any]:
    return {name: _amount_document(one) for name, one in writers.items()}


def _budget_text(found: RootSummary) -> str:
    usage = found.usage
    if usage is None:
        used = found.fa.nbytes + found.wa.nbytes + found.parts.nbytes
        return f"no accounts; rows and parts take {binary_size(used)}"
    share = 100 * (usage.committed + usage.reserved) / max(1, usage.capacity)
    return (
        f"{binary_size(usage.committed)} committed and {binary_size(usage.reserved)} reserved "
        f"of {binary_size(usage.capacity)}, {share:.1f} %; {usage.num_writers} writers"
    )


def _budget_document(found: RootSummary) -> dict[str, int] | None:
    return None if found.usage is None else document(_USAGE, found.usage)


_USAGE: tuple[Column[Usage], ...] = (
    Column(None, "capacity_bytes", lambda usage: usage.capacity),
    Column(None, "committed_bytes", lambda usage: usage.committed),
    Column(None, "wa_bytes", lambda usage: usage.wa),
    Column(None, "reserved_bytes", lambda usage: usage.reserved),
    Column(None, "writers", lambda usage: usage.num_writers),
)
_ROOT: tuple[Column[RootSummary], ...] = (
    Column(
        "namespaces",
        "namespaces",
        lambda found: found.namespaces,
        lambda namespaces: f"{len(namespaces):,}",
        _namespace_documents,
    ),
    Column("FA rows", "fa", lambda found: found.fa, _amount_text, _amount_document),
    Column("WA rows", "wa", lambda found: found.wa, _amount_text, _amount_document),
    Column(
        "WA share",
        "wa_share",
        lambda found: found.wa_share,
        lambda share: f"{'-' if share is None else f'{100 * share:.1f} %'} of the bytes",
    ),
    Column("all rows", None, lambda found: found.fa + found.wa, _amount_text),
    Column("kept", "kept", lambda found: found.kept, _amount_text, _amount_document),
    Column(
        "being written",
        "parts",
        lambda found: found.parts,
        lambda parts: f"{parts.rows:,} parts, {binary_size(parts.nbytes)}",
        _amount_document,
    ),
    Column(None, "writers", lambda found: found.writers, write=_writers_document),
    Column(None, "free_bytes", lambda found: found.free_nbytes),
    Column("budget", "budget", lambda found: found, _budget_text, _budget_document),
    Column(
        "device", None, lambda found: found.free_nbytes, lambda free: f"{binary_size(free)} free"
    ),
)


# --- verify and drop ----------------------------------------------------------------------


@dataclass(frozen=True)
class ChecksReport:
    """The number of rows in each state, and the bad ones.

    Attributes:
        dropped: damaged rows that were removed.
        drops: whether damaged rows were to be removed.
        problems: reasons why only the footers of some rows were checked.
    """

    counts: Mapping[RowState, RowAmount]
    bad: Sequence[CheckedRow]
    dropped: RowAmount
    problems: Sequence[str]
    drops: bool

    def text(self, width: int | None = None) -> str:
        """The first bad rows, warnings and totals; ignores ``width``."""
        parts = []
        if self.bad:
            shown = self.bad[:_MOST_SHOWN]
            rows = [
                [one.row.namespace, one.row.name.kind.upper(), one.row.name.file_name, one.state]
                for one in shown
            ]
            parts.append(table(["namespace", "kind", "row", "state"], rows))
            parts.append("\n".join(f"{one.row.name.file_name}: {one.why}" for one in shown))
            if len(self.bad) > _MOST_SHOWN:
                parts.append(f"and {len(self.bad) - _MOST_SHOWN:,} more: --json has them all")
        parts += [f"warning: {one}" for one in self.problems]
        total = sum(self.counts.values(), RowAmount())
        found = ", ".join(f"{one.rows:,} {state}" for state, one in self.counts.items() if one.rows)
        size = binary_size(total.nbytes)
        parts.append(f"{total.rows:,} rows, {size}: {found or 'nothing to check'}")
        if self.drops:
            size = binary_size(self.dropped.nbytes)
            parts.append(f"removed {self.dropped.rows:,} damaged rows, {size}")
        return "\n\n".join(parts)

    def document(self) -> dict[str, Any]:
        """All facts, and all bad rows."""
        return {
            "counts": {
                str(state).replace(" ", "_"): _amount_document(one)
                for state, one in self.counts.items()
            },
            "bad": [
                {**_row_document(one.row), "state": str(one.state), "why": one.why}
                for one in self.bad
            ],
            "dropped": _amount_document(self.dropped),
            "warnings": list(self.problems),
        }


@dataclass(frozen=True)
class RemovalReport:
    """The rows to remove, and the removed ones; ``removed`` is None if nothing was attempted."""

    wanted: RowAmount
    removed: RowAmount | None

    def text(self, width: int | None = None) -> str:
        """One line; ignores ``width``."""
        if self.removed is None:
            return f"would remove {self.wanted.rows:,} rows, {binary_size(self.wanted.nbytes)}"
        size = binary_size(self.removed.nbytes)
        return f"removed {self.removed.rows:,} of {self.wanted.rows:,} rows, {size}"

    def document(self) -> dict[str, Any]:
        """Both amounts."""
        removed = self.removed or RowAmount()
        return {"wanted": _amount_document(self.wanted), "removed": _amount_document(removed)}
