"""Load of an engine, read from its Prometheus page.  Pure, and takes any text.

``prometheus_client.parser`` parses, within bounds: only the first bytes of a page, only the
lines of the few metrics that are used, each no longer than ``MAX_LINE`` and one at a time, so
that a line that makes no sense costs itself alone.

One page covers every data-parallel rank behind a URL.  Queues and leases are added up over the
ranks; of cache usage the fullest rank counts, as a request may go to that one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pdconn.router.fleet.pull_counts import COUNTERS, PullCounts

#: vLLM's page is some hundred KiB; a longer one is not read.
MAX_PAGE_NBYTES = 4 << 20
#: Characters of a line: a name, some labels, a number.
MAX_LINE = 4096
#: Characters that are given to the parser, of all lines together: a thousand ranks' or more.
#: It takes up to 0.3 s for these, in which the router does nothing else.
MAX_PARSED = 256 << 10

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"  # a share of 1, in spite of its name
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
_LENT = "pdconn:leases_granted_total"
_LEASES_ENDED = (
    "pdconn:leases_read_total",
    "pdconn:leases_aborted_total",
    "vllm:nixl_num_kv_expired_reqs_total",
)

#: The largest sensible value of each; above it floats skip whole numbers.
_LIMITS = dict.fromkeys(
    (_RUNNING, _WAITING, _QUERIES, _HITS, _PROMPT_TOKENS, _LENT, *_LEASES_ENDED, *COUNTERS),
    float(1 << 53),
) | {_KV_USAGE: 1.0}
NAMES = tuple(_LIMITS)


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's page; a field is None where the page does not have it.

    Attributes:
        running, waiting: requests.
        kv_usage: of the fullest rank's cache, 0 to 1.
        lent_leases: prompts whose blocks are lent to decode at this moment.
        prefix_queries, prefix_hits: tokens looked up and found, since the engine's start.
        prompt_tokens: of all prompts since its start, found or not.
        pulls: since its start, those that failed too.
        num_ignored: lines of these metrics that made no sense.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    lent_leases: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    prompt_tokens: int | None = None
    pulls: PullCounts | None = None
    num_ignored: int = 0

    @property
    def not_found(self) -> int | None:
        """Prompt tokens since its start that its prefix cache did not hold."""
        if self.prompt_tokens is None:
            return None
        return max(0, self.prompt_tokens - (self.prefix_hits or 0))


def parse_metrics(text: str, max_nbytes: int = MAX_PAGE_NBYTES) -> Load:
    """What a Prometheus page says of its engine's load.

    Only the first ``max_nbytes`` characters are read, up to a whole line.

    >>> parse_metrics('vllm:num_requests_running{engine="0"} 3.0').running
    3
    """
    if len(text) > max_nbytes:
        text = text[: text.rfind("\n", 0, max_nbytes) + 1]
    values: defaultdict[str, list[float]] = defaultdict(list)
    num_parsed = num_ignored = 0
    for line in text.split("\n"):
        if not line.startswith(NAMES) or _name(line) not in _LIMITS:
            continue  # also a longer name: vllm:num_requests_waiting_by_reason
        num_parsed += min(len(line), MAX_LINE)
        if num_parsed > MAX_PARSED:
            break
        sample = _sample(line)
        if sample is None:
            num_ignored += 1
        else:
            values[sample[0]].append(sample[1])
    return Load(
        running=_total(values, _RUNNING),
        waiting=_total(values, _WAITING),
        kv_usage=max(values[_KV_USAGE], default=None),
        lent_leases=_lent(values),
        prefix_queries=_total(values, _QUERIES),
        prefix_hits=_total(values, _HITS),
        prompt_tokens=_total(values, _PROMPT_TOKENS),
        pulls=PullCounts.of({name: int(sum(values[name])) for name in COUNTERS if values[name]}),
        num_ignored=num_ignored,
    )


def _name(line: str) -> str:
    """The name of a line's metric."""
    head = line[:MAX_LINE].partition("{")[0].split(maxsplit=1)
    return head[0]


def _sample(line: str) -> tuple[str, float] | None:
    """The metric and value of a line, or None where it makes no sense."""
    after_labels = line.rpartition("}")[2].split() if "}" in line else line.split()[1:]
    if len(line) > MAX_LINE or len(after_labels) > 2:  # a value and perhaps a time stamp
        return None
    try:
        (family,) = text_string_to_metric_families(line)
        (sample,) = family.samples
    except Exception:  # noqa: BLE001 - the parser raises many kinds on what is no sample
        return None
    limit = _LIMITS.get(sample.name)
    if limit is None or not (math.isfinite(sample.value) and 0 <= sample.value <= limit):
        return None
    return sample.name, sample.value


def _total(values: defaultdict[str, list[float]], name: str) -> int | None:
    return int(sum(values[name])) if values[name] else None


def _lent(values: defaultdict[str, list[float]]) -> int | None:
    """Granted and not ended; counters are read one after another, so never below 0."""
    granted = _total(values, _LENT)
    if granted is None:
        return None
    return max(0, granted - sum(_total(values, name) or 0 for name in _LEASES_ENDED))
