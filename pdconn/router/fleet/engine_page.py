"""An engine's load, parsed from its Prometheus page.  Pure; accepts any text.

One page covers all data-parallel ranks behind a URL.  Queues and leases are summed over the ranks;
of cache usage the fullest rank counts, as a request may go to that one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.router.fleet.prometheus_page import (
    MAX_COUNT,
    MAX_PAGE_NBYTES,
    PageValues,
    read_values,
)
from pdconn.router.fleet.pull_counts import COUNTERS, PullCounts

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"  # a fraction of 1, despite its name
_KEPT, _BLOCKS = "pdconn:kept_blocks", "pdconn:blocks"
_KEEPABLE = "pdconn:keepable_blocks"
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
_ITL = "vllm:inter_token_latency_seconds"
_LENT = "pdconn:leases_granted_total"
_LEASES_ENDED = (
    "pdconn:leases_read_total",
    "pdconn:leases_aborted_total",
    "vllm:nixl_num_kv_expired_reqs_total",
)

#: The largest plausible value of each.
_LIMITS = dict.fromkeys(
    (
        _RUNNING,
        _WAITING,
        _KEPT,
        _BLOCKS,
        _KEEPABLE,
        _QUERIES,
        _HITS,
        _PROMPT_TOKENS,
        f"{_ITL}_sum",
        f"{_ITL}_count",
        _LENT,
        *_LEASES_ENDED,
        *COUNTERS,
    ),
    MAX_COUNT,
) | {_KV_USAGE: 1.0}


@dataclass(frozen=True, slots=True)
class Load:
    """The values on an engine's page; a field is None where the page lacks it.

    Attributes:
        running, waiting: number of requests.
        kv_usage: of the fullest rank's cache, 0 to 1, without what is kept for sessions.
        kept_share: of what the fullest rank may keep for sessions, 0 to 1.
        lent_leases: prompts whose blocks are lent to decode now.
        prefix_queries, prefix_hits: tokens looked up and found since the engine's start.
        prompt_tokens: tokens of all prompts since its start, cached or not.
        pulls: counters since its start, failed pulls included.
        itl_sum_s, itl_count: of all pauses between two tokens since its start.
        num_ignored: malformed lines of these metrics.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    lent_leases: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    prompt_tokens: int | None = None
    pulls: PullCounts | None = None
    itl_sum_s: float | None = None
    itl_count: int | None = None
    num_ignored: int = 0
    kept_share: float | None = None

    @property
    def not_found(self) -> int | None:
        """Prompt tokens since the engine's start that its prefix cache did not hold."""
        if self.prompt_tokens is None:
            return None
        return max(0, self.prompt_tokens - (self.prefix_hits or 0))


def parse_metrics(text: str, max_nbytes: int = MAX_PAGE_NBYTES) -> Load:
    """The load of an engine, from the text of its Prometheus page.

    Only the first ``max_nbytes`` characters are read, up to a whole line.

    >>> parse_metrics('vllm:num_requests_running{engine="0"} 3.0').running
    3
    """
    values = read_values(text, _LIMITS, max_nbytes)
    return Load(
        running=values.total(_RUNNING),
        waiting=values.total(_WAITING),
        kv_usage=_usage(values),
        lent_leases=_lent(values),
        prefix_queries=values.total(_QUERIES),
        prefix_hits=values.total(_HITS),
        prompt_tokens=values.total(_PROMPT_TOKENS),
        pulls=PullCounts.from_page(values),
        itl_sum_s=values.sum_of(f"{_ITL}_sum"),
        itl_count=values.total(f"{_ITL}_count"),
        num_ignored=values.num_ignored,
        kept_share=_kept_share(values),
    )


def _usage(values: PageValues) -> float | None:
    """Blocks in use; those kept for sessions do not count, since they give way to requests."""
    used, kept, blocks = (values.by_name.get(name, ()) for name in (_KV_USAGE, _KEPT, _BLOCKS))
    if len(used) == len(kept) == len(blocks):
        # A kept block that a request uses as well counts as free, which is rare and harmless.
        ranks = zip(used, kept, blocks, strict=True)
        used = [max(0.0, share - held / max(1.0, count)) for share, held, count in ranks]
    return max(used, default=None)


def _kept_share(values: PageValues) -> float | None:
    """What is kept for sessions, as a share of what the engine may keep; None without both."""
    kept, keepable = (values.by_name.get(name, ()) for name in (_KEPT, _KEEPABLE))
    if len(kept) != len(keepable):
        return None
    shares = (min(1.0, held / max(1.0, most)) for held, most in zip(kept, keepable, strict=True))
    return max(shares, default=None)


def _lent(values: PageValues) -> int | None:
    """Leases granted and not ended; never below 0, though counters are read at different times."""
    granted = values.total(_LENT)
    if granted is None:
        return None
    return max(0, granted - sum(values.total(name) or 0 for name in _LEASES_ENDED))
