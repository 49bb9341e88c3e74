"""Pulls and leases on vLLM's own ``/metrics``, under its names where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from pdconn.lifecycle.promises import BreakReason
from pdconn.protocol.messages import RefusalReason
from pdconn.puller.commands import PullRecord
from pdconn.vllm.store.store_metrics import (
    STORE_COUNTERS,
    STORE_GAUGES,
    STORE_TENANT_COUNTERS,
    STORE_TENANT_GAUGES,
)

_SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0]
_BYTES = [2.0 ** (10 + i) for i in range(1, 25, 2)]
_DESCRIPTORS = [1, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000]

_HISTOGRAMS: dict[str, tuple[str, str, list[Any]]] = {
    "transfer_s": ("vllm:nixl_xfer_time_seconds", "Time of a KV pull's reads.", _SECONDS),
    "post_s": ("vllm:nixl_post_time_seconds", "Time to post a KV pull's reads.", _SECONDS),
    "nbytes": ("vllm:nixl_bytes_transferred", "Bytes per KV pull.", _BYTES),
    "descriptors": ("vllm:nixl_num_descriptors", "Descriptors per KV pull.", _DESCRIPTORS),
    "claim_s": ("pdconn:claim_seconds", "From a ticket's arrival to its claim.", _SECONDS),
    "plan_s": ("pdconn:plan_seconds", "Planning a KV pull.", _SECONDS),
    "total_s": ("pdconn:pull_seconds", "From a request's blocks to its KV.", _SECONDS),
    "visible_s": (
        "pdconn:pull_visible_seconds",
        "From a request's blocks to its KV, without the time in which prefill still computed it.",
        _SECONDS,
    ),
}

_COUNTERS: dict[str, tuple[str, str]] = {
    "failed": ("vllm:nixl_num_failed_transfers", "KV pulls that failed."),
    "quarantined": (
        "pdconn:pulls_quarantined",
        "Failed KV pulls whose blocks a read could still write to.",
    ),
    "freed_expired": ("vllm:nixl_num_kv_expired_reqs", "Leases that expired unread."),
    "pulls": ("pdconn:pulls", "KV pulls received, per rank."),
    "pulls_followed": (
        "pdconn:pulls_followed",
        "KV pulls of requests that were followed while prefill computed them.",
    ),
    "early": ("pdconn:early_bytes", "Bytes whose reads began before prefill had computed all."),
    "early_block_seconds": (
        "pdconn:early_block_seconds",
        "Seconds for which blocks were held before prefill had computed all, times blocks.",
    ),
    "streams": ("pdconn:streams", "Requests that could be followed while they were computed."),
    "follows": ("pdconn:streams_followed", "Readers, per rank, that followed such a request."),
    "streams_gave_way": (
        "pdconn:streams_gave_way",
        "Requests whose readers were refused, since they were preempted and no blocks were free.",
    ),
    "blocks_announced": (
        "pdconn:blocks_announced",
        "Blocks announced to such readers before their request was computed.",
    ),
    "full": ("pdconn:full_attention_bytes", "Bytes pulled of full-attention groups."),
    "window": ("pdconn:window_bytes", "Bytes pulled of windowed groups."),
    "state": ("pdconn:state_bytes", "Bytes pulled of recurrent states."),
    "saved_by_window": ("pdconn:saved_by_window_bytes", "Bytes that no window needs."),
    "saved_by_hits": ("pdconn:saved_by_hits_bytes", "Bytes that decode held already."),
    "lent": ("pdconn:leases_granted", "Leases granted: prompts lent."),
    "freed_read": ("pdconn:leases_read", "Leases that ended with their last reader."),
    "freed_aborted": ("pdconn:leases_aborted", "Leases that the engine aborted."),
    "claims": ("pdconn:claims", "Claims received."),
    "renewals": ("pdconn:renewals", "Renewals received."),
    "confirmed": ("pdconn:pulls_confirmed", "Reads that ended while they were lent."),
    "checksum_requests": ("pdconn:checksum_requests", "Checksum requests received."),
    "described": ("pdconn:described", "Describe messages answered."),
    "done_rejected": ("pdconn:done_rejected", "Done messages for a claim of another connection."),
    "accept_failed": ("pdconn:accept_failed", "Connections that the system could not open."),
    "pulls_verified": ("pdconn:pulls_verified", "KV pulls whose checksums agreed."),
    "pulls_corrupted": ("pdconn:pulls_corrupted", "KV pulls whose checksums differed."),
    "pulls_unverified": (
        "pdconn:pulls_unverified",
        "KV pulls that failed for want of checksums to compare.",
    ),
    "pulls_unreachable": (
        "pdconn:pulls_unreachable",
        "KV pulls whose lender was lost or refused us.",
    ),
    "turns_overdue": (
        "pdconn:turns_overdue",
        "Chunks of prefetches that were read although a request waited for another read, since "
        "they had waited as long as they may.",
    ),
    "answers_lent": ("pdconn:answers_lent", "Prompts with answers lent for a next turn."),
    "answers_given_up": (
        "pdconn:answers_given_up",
        "Answers and prefixes lent whose leases were given up for later ones, for requests that "
        "could not be admitted, or for an engine that stops.",
    ),
    "promises_made": (
        "pdconn:promises_made",
        "Turns of sessions whose KV was kept for the next turn.",
    ),
    "promises_used": ("pdconn:promises_used", "Of these, turns whose next turn has come."),
    "promises_refused": (
        "pdconn:promises_refused",
        "Turns whose KV was not kept, since it was more than the tenant's share.",
    ),
    **{
        f"promises_broken_{why}": (f"pdconn:promises_broken_{why}", f"Promises broken: {text}")
        for why, text in (
            (BreakReason.ROOM, "requests lacked blocks."),
            (BreakReason.SHARE, "later promises of a tenant that keeps most."),
            (BreakReason.RESET, "the cache was reset, or the weights have changed."),
        )
    },
    "tickets_mistaken": (
        "pdconn:tickets_mistaken",
        "Tickets that were for another prompt than their request's, which was computed.",
    ),
    "tickets_gone": (
        "pdconn:tickets_gone",
        "Tickets whose claim failed before their pull began: loaded from the store, or computed.",
    ),
    "prefixes_late": (
        "pdconn:prefixes_late",
        "Prefixes whose claim or pull took longer than computing them: computed.",
    ),
    "prefixes_stored": (
        "pdconn:prefixes_stored",
        "Prefixes that were not pulled, since the store loaded the prompt alone.",
    ),
    "tickets_gave_way": (
        "pdconn:tickets_gave_way",
        "Of pdconn:tickets_gone_total, tickets whose claims were given up while their requests "
        "waited for blocks and blocks were lent, so that no engines wait for each other: computed.",
    ),
    "pulls_unauthenticated": (
        "pdconn:pulls_unauthenticated",
        "KV pulls whose lender failed to authenticate.",
    ),
    **{
        f"{key}_{why}": (f"pdconn:{name}_{why}", f"{text}: {why}.")
        for key, name, text in (
            ("refused", "claims_refused", "Claims refused"),
            ("pulls_refused", "pulls_refused", "KV pulls whose claim was refused"),
            ("unconfirmed", "pulls_unconfirmed", "Reads that ended after the lease did"),
        )
        for why in RefusalReason
    },
    "bad_messages": ("pdconn:bad_messages", "Invalid side-channel messages."),
    "connections_rejected": (
        "pdconn:connections_rejected",
        "Side-channel connections ended for an invalid message.",
    ),
    "connections_unauthenticated": (
        "pdconn:connections_unauthenticated",
        "Side-channel connections that failed to authenticate.",
    ),
    "connections_timed_out": (
        "pdconn:connections_timed_out",
        "Side-channel connections closed because they stalled.",
    ),
    "connections_refused": (
        "pdconn:connections_refused",
        "Side-channel connections refused because too many were open.",
    ),
    **STORE_COUNTERS,
}

_GAUGES: dict[str, tuple[str, str]] = {
    "kept_blocks": ("pdconn:kept_blocks", "Blocks kept for sessions; shared ones count once."),
    "blocks": ("pdconn:blocks", "Blocks of the engine, once a session is kept."),
    "keepable_blocks": (
        "pdconn:keepable_blocks",
        "Blocks that all sessions together may keep, once one is kept.",
    ),
    "kept_sessions": ("pdconn:kept_sessions", "Sessions whose KV is kept."),
    **STORE_GAUGES,
}


@dataclass
class PdStats(KVConnectorStats):
    """Statistics of an interval: values by histogram (``seen``), ``counts``, and ``gauges``."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data.setdefault("seen", {})
        self.data.setdefault("counts", {})
        self.data.setdefault("gauges", {})

    def add_count(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        self.data["counts"][name] = self.data["counts"].get(name, 0) + amount

    def record(self, record: PullRecord) -> None:
        """Add a received pull."""
        moved = record.moved
        for name, value in (
            ("transfer_s", record.transfer_s),
            ("post_s", record.post_s),
            ("nbytes", moved.nbytes),
            ("descriptors", record.num_descriptors),
            ("claim_s", record.claim_s),
            ("plan_s", record.plan_s),
            ("total_s", record.total_s),
            ("visible_s", record.visible_s),
        ):
            self.data["seen"].setdefault(name, []).append(value)
        self.add_count("pulls")
        for name in ("full", "window", "state", "saved_by_window", "saved_by_hits"):
            self.add_count(name, getattr(moved, name))
        if record.is_followed:
            self.add_count("pulls_followed")
            self.add_count("early", record.early_nbytes)
            self.add_count("early_block_seconds", record.early_s * record.num_blocks)

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {"seen": {}, "counts": {}, "gauges": {}}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.data["seen"] or self.data["counts"] or self.data["gauges"])

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the statistics of another worker or interval."""
        for name, values in other.data.get("seen", {}).items():
            self.data["seen"].setdefault(name, []).extend(values)
        for name, amount in other.data.get("counts", {}).items():
            self.add_count(name, amount)
        self.data["gauges"] |= other.data.get("gauges", {})
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values of vLLM's log line."""
        seen, counts = self.data["seen"], self.data["counts"]
        times = seen.get("total_s", [])
        nbytes, moving = sum(seen.get("nbytes", [])), sum(seen.get("transfer_s", []))
        store = {
            name.replace("_", " "): counts.get(name, 0)
            for name in ("store_hits", "store_hit_tokens", "store_rows_committed")
            if any(key.startswith("store_") for key in counts)
        }
        return {
            "pulls": counts.get("pulls", 0),
            "failed": counts.get("failed", 0),
            "avg pull (ms)": round(1e3 * sum(times) / len(times), 3) if times else 0,
            "GB/s": round(nbytes / moving / 1e9, 3) if moving else 0,
            "descriptors": sum(seen.get("descriptors", [])),
            "leases lent": counts.get("lent", 0),
            "leases expired": counts.get("freed_expired", 0),
            **store,
        }


class PdPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics and updates them per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        del metric_types
        self._histograms = {
            key: create_metric_per_engine(
                self._histogram_cls(
                    name=name, documentation=text, buckets=buckets, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: create_metric_per_engine(
                self._counter_cls(name=name, documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for key, (name, text) in _COUNTERS.items()
        }
        self._gauges = {
            key: create_metric_per_engine(
                self._gauge_cls(
                    name=name,
                    documentation=text,
                    labelnames=labelnames,
                    multiprocess_mode="mostrecent",
                ),
                per_engine_labelvalues,
            )
            for key, (name, text) in _GAUGES.items()
        }
        # Their children are made when a tenant is first named: the store bounds how many are.
        self._labelvalues = per_engine_labelvalues
        self._tenant_gauges = {
            key: self._gauge_cls(
                name=name,
                documentation=text,
                labelnames=[*labelnames, "tenant"],
                multiprocess_mode="mostrecent",
            )
            for key, (name, text) in STORE_TENANT_GAUGES.items()
        }
        self._tenant_counters = {
            key: self._counter_cls(
                name=name, documentation=text, labelnames=[*labelnames, "tenant"]
            )
            for key, (name, text) in STORE_TENANT_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval; counts and gauges without a metric are left out."""
        for name, values in transfer_stats_data.get("seen", {}).items():
            for value in values:
                self._histograms[name][engine_idx].observe(value)
        for name, amount in transfer_stats_data.get("counts", {}).items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)
            of, _, tenant = name.partition("/")
            if tenant and of in self._tenant_counters:
                labels = [*self._labelvalues[engine_idx], tenant]
                self._tenant_counters[of].labels(*labels).inc(amount)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            of, _, tenant = name.partition("/")
            if tenant and of in self._tenant_gauges:
                labels = [*self._labelvalues[engine_idx], tenant]
                self._tenant_gauges[of].labels(*labels).set(value)


__all__ = ["PdPromMetrics", "PdStats"]
