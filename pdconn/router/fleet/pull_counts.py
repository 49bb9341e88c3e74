"""The engines' counters of pulls, and the causes of failed pulls.  Pure.

A router hands tickets over and does not see whether decode could use them: after a failed pull the
prompt is recomputed, or the request fails, as ``kv_load_failure_policy`` says.  The engines' own
counters show it.  They count per rank and since an engine's start, so their growth is what matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pdconn.protocol.messages import RefusalReason
from pdconn.router.fleet.prometheus_page import PageValues

PULLS = "pdconn:pulls_total"
FAILED = "vllm:nixl_num_failed_transfers_total"
READS = "vllm:nixl_xfer_time_seconds_count"
"""Failed transfers of vLLM's NixlConnector, which has no counter of successful pulls."""


@dataclass(frozen=True, slots=True)
class PullCause:
    """A counter of failed pulls: its meaning, in words that follow a number, and a remedy.

    Attributes:
        is_apart: counts tickets whose pull never began, which ``FAILED`` does not count.
    """

    metric: str
    words: str
    remedy: str
    is_apart: bool = False


_REFUSED = {
    RefusalReason.EXPIRED: (
        "expired",
        'tickets reach decode late: set "kv_lease_duration" on prefill higher',
    ),
    RefusalReason.UNKNOWN: (
        "unknown to prefill",
        "prefill restarted, or tickets reach another engine than the one that made them",
    ),
    RefusalReason.CONSUMED: ("used already", "something sends a ticket to decode twice"),
    RefusalReason.ABORTED: ("aborted", "prefill took its leases back: was its cache reset?"),
    RefusalReason.ALTERED: ("altered", "something between the engines changes tickets"),
    RefusalReason.BAD_READER: ("of a wrong reader", "both engines need the same pdconn"),
    RefusalReason.TOO_MANY: ("too many at once", "prefill serves more readers than it takes"),
}

PULL_CAUSES = (
    PullCause(
        "pdconn:pulls_unverified_total",
        "without checksums to compare",
        'decode has "verify" and prefill makes no checksums: set "verify" on prefill as on decode',
    ),
    PullCause(
        "pdconn:pulls_unauthenticated_total",
        "failed to authenticate",
        "give both engines one secret (PDCONN_SECRET_FILE), or certificates of one CA",
    ),
    PullCause(
        "pdconn:pulls_unreachable_total",
        "lost or refused by prefill",
        "look at prefill's side channel: its host, its port, and what lies between",
    ),
    PullCause(
        "pdconn:pulls_corrupted_total",
        "with wrong checksums",
        "bytes changed on the way: look at the cards and at the hosts' memory",
    ),
    PullCause(
        "pdconn:pulls_quarantined_total",
        "that a read could still write to",
        "reads hang: look at the network to prefill",
    ),
    *(
        PullCause(f"pdconn:pulls_refused_{why.value}_total", f"refused: {words}", remedy)
        for why, (words, remedy) in _REFUSED.items()
    ),
    *(
        PullCause(f"pdconn:pulls_unconfirmed_{why.value}_total", f"read too late: {words}", remedy)
        for why, (words, remedy) in _REFUSED.items()
    ),
    PullCause(
        "pdconn:tickets_mistaken_total",
        "for another prompt, which decode computed",
        "both engines need the same tokenizer and chat template; of one that asks for the time, "
        "--reuse-tokens hands prefill's tokens over",
        is_apart=True,
    ),
    PullCause(
        "pdconn:tickets_gone_total",
        "whose claim failed, and the store or decode took over",
        "is prefill there, and reached by decode? decode's log names each reason",
        is_apart=True,
    ),
)
"""Most failed pulls have exactly one cause; some (a plan that cannot be made) have none."""

COUNTERS = (PULLS, FAILED, READS, *(one.metric for one in PULL_CAUSES))
_LOG = "its log names the reason of each; docs/troubleshooting.md lists them"


@dataclass(frozen=True, slots=True)
class PullCounts:
    """An engine's counters of pulls.

    Attributes:
        received: pulls whose KV arrived and was verified.
        failed: pulls that failed, and tickets whose pull never began.
        causes: the counters among ``PULL_CAUSES`` that are not 0, by metric.
    """

    received: int
    failed: int
    causes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_totals(cls, totals: Mapping[str, int]) -> PullCounts | None:
        """Counters from a page's totals by metric; None where the engine counts no pulls."""
        if PULLS not in totals and READS not in totals:
            return None
        causes = {one.metric: totals.get(one.metric, 0) for one in PULL_CAUSES}
        not_begun = sum(causes[one.metric] for one in PULL_CAUSES if one.is_apart)
        return cls(
            totals.get(PULLS, totals.get(READS, 0)),
            totals.get(FAILED, 0) + not_begun,
            {metric: number for metric, number in causes.items() if number},
        )

    @classmethod
    def from_page(cls, values: PageValues) -> PullCounts | None:
        """Counters from a page; None where the engine counts no pulls."""
        totals = {name: values.total(name) for name in COUNTERS}
        return cls.from_totals({name: total for name, total in totals.items() if total is not None})

    def since(self, before: PullCounts) -> PullCounts:
        """The growth since ``before``; the whole counters if the engine restarted in between."""
        if self.received < before.received or self.failed < before.failed:
            return self
        causes = {name: n - before.causes.get(name, 0) for name, n in self.causes.items()}
        return PullCounts(
            self.received - before.received,
            self.failed - before.failed,
            {name: number for name, number in causes.items() if number > 0},
        )

    @property
    def tried(self) -> int:
        """Pulls that were received or failed."""
        return self.received + self.failed

    @property
    def why(self) -> str:
        """The causes in words, most frequent first; empty if none is known.

        >>> PullCounts(0, 3, {"pdconn:pulls_unverified_total": 3}).why
        '3 without checksums to compare'
        """
        return ", ".join(f"{self.causes[one.metric]} {one.words}" for one in self._known())

    @property
    def remedy(self) -> str:
        """The remedy for the most frequent cause."""
        known = self._known()
        return known[0].remedy if known else _LOG

    def _known(self) -> list[PullCause]:
        known = [one for one in PULL_CAUSES if self.causes.get(one.metric)]
        return sorted(known, key=lambda one: -self.causes[one.metric])


NO_PULLS = PullCounts(0, 0)

WINDOW_S = 300.0
STEP_S = 10.0


class RecentPulls:
    """The growth of the engines' counters over the last ``WINDOW_S``, in steps of ``STEP_S``."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, PullCounts]]] = {}

    def note_counts(self, engine: str, counts: PullCounts | None, now: float) -> PullCounts:
        """Note an engine's counters; returns their growth since the previous call."""
        if counts is None:
            return NO_PULLS
        seen = self._seen.setdefault(engine, deque([(now, counts)]))
        grown = counts.since(seen[-1][1])
        if len(seen) > 1 and now - seen[-2][0] < STEP_S:
            seen.pop()
        seen.append((now, counts))
        while len(seen) > 2 and seen[1][0] <= now - WINDOW_S:
            seen.popleft()
        return grown

    def lately(self, engine: str) -> PullCounts:
        """The growth over the window."""
        seen = self._seen.get(engine)
        return NO_PULLS if seen is None else seen[-1][1].since(seen[0][1])

    def keep_engines(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        self._seen = {name: one for name, one in self._seen.items() if name in engines}
