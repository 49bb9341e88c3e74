"""Pulls and leases since an engine's start, from its ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdconn.router.fleet.prometheus_page import MAX_COUNT, read_values
from pdconn.router.fleet.pull_counts import COUNTERS, NO_PULLS, PULLS, PullCounts
from pdconn.tools.doctor.findings import Finding, fault, warning
from pdconn.tools.doctor.fleet.engines import EngineFacts
from pdconn.tools.openai.async_client import MAX_PAGE_NBYTES

SMALL_RUN_NBYTES = 16 << 10
"""Bytes per run below which a READ is bound by its descriptors, not by the link."""
LARGE_PULL_NBYTES = 4 << 20
"""Pulls of fewer bytes are short, however small their runs."""
FEW_PULLS = 5
"""Fewest events for which a share is judged."""
_SWAPPED = "give it as the other role here and to the router (--prefill and --decode, or the file)"

_NBYTES = "vllm:nixl_bytes_transferred_sum"
_RUNS = "vllm:nixl_num_descriptors_sum"
_LENT = "pdconn:leases_granted_total"
_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
_QUARANTINED = "pdconn:pulls_quarantined_total"
_NAMES = (*COUNTERS, _NBYTES, _RUNS, _LENT, _EXPIRED, _QUARANTINED)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over an engine's ranks since its start; ``known`` is False without pdconn's metrics."""

    known: bool
    pulls: int = 0
    failed: int = 0
    nbytes: int = 0
    runs: int = 0
    lent: int = 0
    expired: int = 0
    quarantined: int = 0
    counts: PullCounts = NO_PULLS

    @property
    def run_nbytes(self) -> int | None:
        """Mean bytes per run; None before the first pull."""
        return self.nbytes // self.runs if self.runs else None


def traffic_of(page: str) -> Traffic:
    """Parse a page; malformed lines are skipped."""
    values = read_values(page, dict.fromkeys(_NAMES, MAX_COUNT), MAX_PAGE_NBYTES)
    counts = PullCounts.from_page(values) or NO_PULLS
    return Traffic(
        not values.by_name.keys().isdisjoint((PULLS, _LENT)),
        pulls=counts.received,
        failed=counts.failed,
        nbytes=values.total(_NBYTES) or 0,
        runs=values.total(_RUNS) or 0,
        lent=values.total(_LENT) or 0,
        expired=values.total(_EXPIRED) or 0,
        quarantined=values.total(_QUARANTINED) or 0,
        counts=counts,
    )


def seen_traffic(url: str, traffic: Traffic) -> str:
    """One line about an engine."""
    if not traffic.known:
        return f"{url}: no metrics of pdconn"
    each = traffic.run_nbytes
    runs = "" if each is None else f", {each:,} bytes per run"
    return (
        f"{url}: {traffic.pulls} pulls{runs}, {traffic.failed} failed, {traffic.lent} lent, "
        f"{traffic.expired} leases expired"
    )


def judge_traffic(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Findings from the counters of all engines that answer."""
    up = [(one, traffic_of(one.metrics)) for one in engines if one.error is None]
    for one, traffic in up:
        if not traffic.known:
            message = "its /metrics has no pdconn:pulls_total: it runs another connector, or none"
            remedy = (
                'start it with "kv_connector": "PdconnConnector"; or has it answered no request '
                "yet?"
            )
            yield warning("traffic.no-connector", one.url, message, remedy)
        yield from _pulls(one, traffic)
        yield from _leases(one, traffic)
    yield from _roles(up)
    lent = sum(traffic.lent for one, traffic in up if one.prefills)
    pulled = sum(traffic.pulls + traffic.failed for one, traffic in up if one.decodes)
    if lent >= FEW_PULLS and not pulled:
        message = f"prefill has lent {lent} prompts, and decode has tried no pull"
        remedy = "the router must pass kv_transfer_params of prefill's answer to decode, unchanged"
        yield fault("traffic.no-pulls", "hand-over", message, remedy)


def _roles(engines: Sequence[tuple[EngineFacts, Traffic]]) -> Iterator[Finding]:
    """Findings about engines in the wrong role.

    An engine in both roles lends and pulls; one that is configured as prefill but only pulls, or as
    decode but only lends, is the other.
    """
    for one, traffic in engines:
        tried = traffic.pulls + traffic.failed
        if one.prefills and not one.decodes and tried >= FEW_PULLS and not traffic.lent:
            message = f"given as prefill, it has lent nothing and tried {tried} pulls"
            yield fault("traffic.role", one.url, message, _SWAPPED)
        elif one.decodes and not one.prefills and traffic.lent >= FEW_PULLS and not tried:
            message = f"given as decode, it has lent {traffic.lent} prompts and tried no pull"
            yield fault("traffic.role", one.url, message, _SWAPPED)


def _pulls(one: EngineFacts, traffic: Traffic) -> Iterator[Finding]:
    tried = traffic.pulls + traffic.failed
    if traffic.failed:
        why = f" ({traffic.counts.why})" if traffic.counts.why else ""
        message = f"{traffic.failed} of {tried} pulls have failed{why}"
        remedy = traffic.counts.remedy
        many = tried >= FEW_PULLS and 2 * traffic.failed >= tried
        yield (fault if many else warning)("traffic.failed", one.url, message, remedy)
    if traffic.quarantined:
        message = f"{traffic.quarantined} failed pulls left blocks that a read could still write to"
        remedy = "look at the network to prefill: reads hang"
        yield warning("traffic.quarantined", one.url, message, remedy)
    each = traffic.run_nbytes
    is_large = traffic.nbytes >= traffic.pulls * LARGE_PULL_NBYTES
    if each is not None and each < SMALL_RUN_NBYTES and is_large:
        message = f"{each:,} bytes per run: expected at least {SMALL_RUN_NBYTES:,} for a fast READ"
        remedy = "choose head-major blocks (VLLM_KV_CACHE_LAYOUT=BHLNC), or larger --block-size"
        yield warning("traffic.small-runs", one.url, message, remedy)


def _leases(one: EngineFacts, traffic: Traffic) -> Iterator[Finding]:
    if traffic.lent >= FEW_PULLS and 10 * traffic.expired >= traffic.lent:
        message = f"{traffic.expired} of {traffic.lent} leases expired unread"
        remedy = (
            'set "kv_lease_duration": 60 on prefill if tickets reach decode late; if they do not, '
            "the router must pass kv_transfer_params of prefill's answer on to decode"
        )
        yield warning("traffic.expired", one.url, message, remedy)
