"""Tables and JSON of ``pdconn store``.  JSON has bytes and seconds since the epoch, unrounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdconn.store.budget.accounts import Usage
from pdconn.store.inspect import NamespaceSummary, RootSummary, RowAmount
from pdconn.store.shelf.base import StoredRow
from pdconn.store.verify import CheckedRow, RowState
from pdconn.tools.lab.table import table

_MOST_SHOWN = 20
"""Bad rows that the table names; JSON has all."""


def size(nbytes: int) -> str:
    """Bytes for people.

    >>> size(1023), size(9 << 20), size(5 << 41)
    ('1,023 B', '9.00 MiB', '10.00 TiB')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{nbytes:,} B" if units[0] == "B" else f"{value:,.2f} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds for people, in one unit.

    >>> duration(0.2), duration(90), duration(7 * 86400)
    ('0 s', '90 s', '7 d')
    """
    for least, unit_s, unit in ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def namespaces_text(found: Sequence[NamespaceSummary], now: float) -> str:
    """One line for each namespace; ``now`` in seconds since the epoch."""
    if not found:
        return "no rows"
    headings = [
        "namespace", "FA\nrows", "FA\nbytes", "WA\nrows", "WA\nbytes", "longest prefix\ntokens",
        "resumable\ntokens", "rows not\nreached", "newest\nuse", "oldest\nuse",
    ]  # fmt: skip
    rows = [
        [
            one.namespace,
            f"{one.fa.rows:,}",
            size(one.fa.nbytes),
            f"{one.wa.rows:,}",
            size(one.wa.nbytes),
            _tokens(one, one.longest_prefix),
            _tokens(one, one.longest_resumable),
            f"{one.unreached:,}",
            duration(now - one.newest_use),
            duration(now - one.oldest_use),
        ]
        for one in found
    ]
    return table(headings, rows)


def _tokens(one: NamespaceSummary, blocks: int | None) -> str:
    tokens = one.tokens(blocks)
    return "?" if tokens is None else f"{tokens:,}"


def rows_text(rows: Sequence[StoredRow], now: float) -> str:
    """One line for each row."""
    if not rows:
        return "no rows"
    headings = ["namespace", "kind", "index", "key", "parent", "bytes", "last use"]
    return table(
        headings,
        [
            [
                row.namespace,
                row.name.kind.upper(),
                str(row.name.index),
                row.name.key.hex(),
                row.name.parent.hex() if any(row.name.parent) else "-",
                f"{row.nbytes:,}",
                duration(now - row.used_at),
            ]
            for row in rows
        ],
    )


def summary_text(found: RootSummary) -> str:
    """Totals, the budget, and the writers."""
    share = "-" if found.wa_share is None else f"{100 * found.wa_share:.1f} %"
    lines = [
        ("namespaces", f"{len(found.namespaces):,}"),
        ("FA rows", _amount(found.fa)),
        ("WA rows", _amount(found.wa)),
        ("WA share", f"{share} of the bytes"),
        ("all rows", _amount(found.fa + found.wa)),
        ("being written", f"{found.parts.rows:,} parts, {size(found.parts.nbytes)}"),
        ("budget", _budget(found)),
        ("device", f"{size(found.free_nbytes)} free"),
    ]
    text = "\n".join(f"{name:<14} {value}" for name, value in lines)
    if not found.writers:
        return text
    rows = [[name, f"{one.rows:,}", size(one.nbytes)] for name, one in found.writers.items()]
    return f"{text}\n\n{table(['writer', 'parts', 'bytes'], rows)}"


def _amount(amount: RowAmount) -> str:
    return f"{amount.rows:,}, {size(amount.nbytes)}"


def _budget(found: RootSummary) -> str:
    usage = found.usage
    if usage is None:
        used = found.fa.nbytes + found.wa.nbytes + found.parts.nbytes
        return f"no accounts; rows and parts take {size(used)}"
    share = 100 * (usage.committed + usage.reserved) / max(1, usage.capacity)
    return (
        f"{size(usage.committed)} committed and {size(usage.reserved)} reserved "
        f"of {size(usage.capacity)}, {share:.1f} %; {usage.num_writers} writers"
    )


def amount_of(amount: RowAmount) -> dict[str, int]:
    """For JSON."""
    return {"rows": amount.rows, "bytes": amount.nbytes}


def namespace_document(one: NamespaceSummary) -> dict[str, Any]:
    """For JSON; null is what could not be known."""
    return {
        "namespace": one.namespace,
        "fa": amount_of(one.fa),
        "wa": amount_of(one.wa),
        "block_tokens": one.block_tokens,
        "longest_prefix_tokens": one.tokens(one.longest_prefix),
        "longest_resumable_tokens": one.tokens(one.longest_resumable),
        "rows_not_reached": one.unreached,
        "oldest_use": one.oldest_use,
        "newest_use": one.newest_use,
    }


def root_document(found: RootSummary) -> dict[str, Any]:
    """For JSON."""
    return {
        "namespaces": [namespace_document(one) for one in found.namespaces],
        "fa": amount_of(found.fa),
        "wa": amount_of(found.wa),
        "wa_share": found.wa_share,
        "parts": amount_of(found.parts),
        "writers": {name: amount_of(one) for name, one in found.writers.items()},
        "free_bytes": found.free_nbytes,
        "budget": None if found.usage is None else _usage_document(found.usage),
    }


def _usage_document(usage: Usage) -> dict[str, int]:
    return {
        "capacity_bytes": usage.capacity,
        "committed_bytes": usage.committed,
        "wa_bytes": usage.wa,
        "reserved_bytes": usage.reserved,
        "writers": usage.num_writers,
    }


def row_document(row: StoredRow) -> dict[str, Any]:
    """For JSON."""
    return {
        "namespace": row.namespace,
        "kind": str(row.name.kind),
        "index": row.name.index,
        "key": row.name.key.hex(),
        "parent": row.name.parent.hex() if any(row.name.parent) else None,
        "bytes": row.nbytes,
        "used_at": row.used_at,
    }


def checks_text(
    counts: Mapping[RowState, RowAmount],
    bad: Sequence[CheckedRow],
    dropped: RowAmount | None,
    problems: Sequence[str],
) -> str:
    """How many rows are in which state, and the bad ones; ``dropped`` if that was asked for."""
    parts = []
    if bad:
        rows = [
            [one.row.namespace, one.row.name.kind.upper(), one.row.name.file_name, one.state]
            for one in bad[:_MOST_SHOWN]
        ]
        reasons = [f"{one.row.name.file_name}: {one.why}" for one in bad[:_MOST_SHOWN]]
        parts.append(table(["namespace", "kind", "row", "state"], rows))
        parts.append("\n".join(reasons))
        if len(bad) > _MOST_SHOWN:
            parts.append(f"and {len(bad) - _MOST_SHOWN:,} more: --json has them all")
    parts += [f"warning: {one}" for one in problems]
    total = sum(counts.values(), RowAmount())
    found = ", ".join(f"{one.rows:,} {state}" for state, one in counts.items() if one.rows)
    parts.append(f"{total.rows:,} rows, {size(total.nbytes)}: {found or 'nothing to check'}")
    if dropped is not None:
        parts.append(f"removed {dropped.rows:,} damaged rows, {size(dropped.nbytes)}")
    return "\n\n".join(parts)


def checks_document(
    counts: Mapping[RowState, RowAmount],
    bad: Sequence[CheckedRow],
    dropped: RowAmount,
    problems: Sequence[str],
) -> dict[str, Any]:
    """For JSON."""
    return {
        "counts": {str(state).replace(" ", "_"): amount_of(one) for state, one in counts.items()},
        "bad": [{**row_document(one.row), "state": str(one.state), "why": one.why} for one in bad],
        "dropped": amount_of(dropped),
        "warnings": list(problems),
    }
