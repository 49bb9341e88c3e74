"""Metrics of the store: counts by ranks and by the scheduler's part, and bytes of the budget.

Ranks count rows once for each rank that reads or writes a share of them; the scheduler's part
counts prompts and rows once.  ``pdconn.vllm.stats`` registers them.
"""

from __future__ import annotations

from pdconn.lifecycle.promises import BreakReason

STORE_COUNTERS: dict[str, tuple[str, str]] = {
    # the scheduler's part
    "store_lookups": ("pdconn:store_lookups", "Prompts looked up in the store."),
    "store_hits": ("pdconn:store_hits", "Prompts whose prefix was loaded from the store."),
    "store_hit_tokens": ("pdconn:store_hit_tokens", "Tokens loaded from the store."),
    "store_misses": ("pdconn:store_misses", "Look-ups that found no prefix worth loading."),
    "store_beside": ("pdconn:store_beside", "Pulls of which a part was loaded from the store."),
    "store_beside_tokens": (
        "pdconn:store_beside_tokens",
        "Tokens whose full attention was to be loaded from the store, beside a pull of the rest.",
    ),
    "store_beside_missed_tokens": (
        "pdconn:store_beside_missed_tokens",
        "Of pdconn:store_beside_tokens_total, those that a rank pulled after all, since rows were "
        "gone, damaged or late.",
    ),
    "store_late": (
        "pdconn:store_late",
        "Look-ups and hits given up because the shelf took too long.",
    ),
    "store_no_room": (
        "pdconn:store_no_room",
        "Hits given up because the staging area had no room.",
    ),
    "store_cut": (
        "pdconn:store_cut",
        "Prompts of which less was loaded than is stored, since staging holds no more.",
    ),
    "store_rows_missing": (
        "pdconn:store_rows_missing",
        "Rows that were gone or could not be read when they were fetched, per rank.",
    ),
    "store_rows_damaged": (
        "pdconn:store_rows_damaged",
        "Rows whose bytes were not those saved, per rank; they are removed.",
    ),
    "store_rows_locked": (
        "pdconn:store_rows_locked",
        "Rows encrypted with a key that is not in the store's key file, per rank.",
    ),
    "store_rows_committed": ("pdconn:store_rows_committed", "Rows saved."),
    "store_saves_skipped": (
        "pdconn:store_saves_skipped",
        "Rows for which the budget had no room when they could be saved, each time.",
    ),
    "store_save_failures": (
        "pdconn:store_save_failures",
        "Rows not saved because a rank or the shelf failed.",
    ),
    "store_rows_evicted": ("pdconn:store_rows_evicted", "Rows that this engine evicted."),
    "store_evicted_bytes": ("pdconn:store_evicted_bytes", "Bytes that this engine evicted."),
    "store_promises_made": (
        "pdconn:store_promises_made",
        "Turns of sessions whose rows were kept for the next turn.",
    ),
    "store_promises_used": (
        "pdconn:store_promises_used",
        "Of these, turns whose next turn has come and finds all of them.",
    ),
    "store_promises_refused": (
        "pdconn:store_promises_refused",
        "Turns whose rows were not kept: there were none, or more than the tenant's share.",
    ),
    **{
        f"store_promises_broken_{why}": (
            f"pdconn:store_promises_broken_{why}",
            f"Promises to keep rows broken: {text}",
        )
        for why, text in (
            (BreakReason.ROOM, "rows were evicted or removed all the same."),
            (BreakReason.SHARE, "later promises of a tenant that keeps most."),
            (BreakReason.RESET, "the cache was reset, or the weights have changed."),
        )
    },
    # ranks
    "store_rows_read": ("pdconn:store_rows_read", "Shares of rows read and verified, per rank."),
    "store_bytes_read": ("pdconn:store_read_bytes", "Bytes read from the store, per rank."),
    "store_read_failures": ("pdconn:store_read_failures", "Reads that the shelf refused."),
    "store_loads": ("pdconn:store_loads", "Prefixes copied to KV blocks, per rank."),
    "store_load_failures": (
        "pdconn:store_load_failures",
        "Prefixes that could not be copied to KV blocks, per rank.",
    ),
    "store_turns_overdue": (
        "pdconn:store_turns_overdue",
        "Rows of prefetches, and chunks of saves, that were moved although something more urgent "
        "waited, since they had waited as long as they may, per rank.",
    ),
    "store_rows_written": ("pdconn:store_rows_written", "Shares of rows written, per rank."),
    "store_bytes_written": ("pdconn:store_written_bytes", "Bytes written, per rank."),
    "store_heads_spilled": (
        "pdconn:store_heads_spilled",
        "Heads of rows that compression made no smaller, per rank.",
    ),
    "store_write_failures": (
        "pdconn:store_write_failures",
        "Shares of rows that could not be written, per rank.",
    ),
}
"""By name of the count: the metric and its help text."""

STORE_GAUGES: dict[str, tuple[str, str]] = {
    "store_capacity_bytes": (
        "pdconn:store_capacity_bytes",
        "Bytes that the root may hold: the least that an engine on it allows.",
    ),
    "store_committed_bytes": ("pdconn:store_committed_bytes", "Bytes of rows in the root."),
    "store_window_bytes": ("pdconn:store_window_bytes", "Of those, bytes of WA rows."),
    "store_reserved_bytes": (
        "pdconn:store_reserved_bytes",
        "Bytes that engines have reserved for rows to write.",
    ),
    "store_kept_bytes": (
        "pdconn:store_kept_bytes",
        "Bytes of rows that this engine keeps for sessions; shared ones count once.",
    ),
    "store_kept_sessions": (
        "pdconn:store_kept_sessions",
        "Sessions whose rows this engine keeps.",
    ),
}
"""By name in the budget's usage: the metric and its help text."""

STORE_TENANT_COUNTERS: dict[str, tuple[str, str]] = {
    "store_tenant_lookups": (
        "pdconn:store_tenant_lookups",
        "Prompts looked up in the store, by tenant.",
    ),
    "store_tenant_hits": (
        "pdconn:store_tenant_hits",
        "Prompts whose prefix was loaded from the store, by tenant.",
    ),
    "store_tenant_hit_tokens": (
        "pdconn:store_tenant_hit_tokens",
        "Tokens loaded from the store, by tenant.",
    ),
}
"""As :data:`STORE_COUNTERS`, with a label ``tenant`` that follows the name and a slash."""

STORE_TENANT_GAUGES: dict[str, tuple[str, str]] = {
    "store_tenant_bytes": (
        "pdconn:store_tenant_bytes",
        "Bytes of rows in the root by tenant, of the engine that evicts, with tenant_quota.",
    ),
}
"""As :data:`STORE_GAUGES`, with a label ``tenant`` that follows the name and a slash."""
