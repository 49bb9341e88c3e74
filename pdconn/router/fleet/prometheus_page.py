"""Samples of a Prometheus page, within bounds.  Pure; accepts any text.

``prometheus_client.parser`` parses one line at a time: only lines of the wanted metrics, each no
longer than ``MAX_LINE``, so that a malformed line costs only itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

#: vLLM's page has some hundred KiB; the rest of a longer one is not read.
MAX_PAGE_NBYTES = 4 << 20
#: Characters of a line: a name, labels and a number.
MAX_LINE = 4096
#: Characters passed to the parser, over all lines: a thousand ranks or more.  Parsing them blocks
#: the router's event loop for up to 0.3 s.
MAX_PARSED = 256 << 10
#: The largest plausible count; above it floats skip integers.
MAX_COUNT = float(1 << 53)


@dataclass(frozen=True, slots=True)
class PageValues:
    """The values of a page by metric.

    Attributes:
        by_name: one value per rank and labels; without the metrics that the page lacks.
        num_ignored: malformed lines of these metrics.
    """

    by_name: Mapping[str, Sequence[float]]
    num_ignored: int

    def total(self, name: str) -> int | None:
        """The sum over ranks and labels, of a count; None where the page lacks the metric."""
        found = self.sum_of(name)
        return None if found is None else int(found)

    def sum_of(self, name: str) -> float | None:
        """The sum over ranks and labels; None where the page lacks the metric."""
        return sum(self.by_name[name]) if name in self.by_name else None


def read_values(
    text: str, limits: Mapping[str, float], max_nbytes: int = MAX_PAGE_NBYTES
) -> PageValues:
    """The values of the metrics in ``limits``, each between 0 and its limit.

    Only the first ``max_nbytes`` characters are read, up to a whole line.

    >>> read_values('a{rank="0"} 3\\na{rank="1"} 4\\nb 1', {"a": MAX_COUNT}).total("a")
    7
    """
    if len(text) > max_nbytes:
        text = text[: text.rfind("\n", 0, max_nbytes) + 1]
    names = tuple(limits)
    values: defaultdict[str, list[float]] = defaultdict(list)
    num_parsed = num_ignored = 0
    for line in text.split("\n"):
        if not line.startswith(names) or _name(line) not in limits:
            continue  # a longer name, such as vllm:num_requests_waiting_by_reason
        num_parsed += min(len(line), MAX_LINE)
        if num_parsed > MAX_PARSED:
            break
        sample = _sample(line, limits)
        if sample is None:
            num_ignored += 1
        else:
            values[sample.name].append(sample.value)
    return PageValues(dict(values), num_ignored)


def all_samples(text: str) -> list[Sample]:
    """Every sample of a page, without bounds; for pages of trusted engines."""
    return [sample for each in text_string_to_metric_families(text) for sample in each.samples]


def _name(line: str) -> str:
    """The name of a line's metric."""
    head = line[:MAX_LINE].partition("{")[0].split(maxsplit=1)
    return head[0]


def _sample(line: str, limits: Mapping[str, float]) -> Sample | None:
    """The sample of a line, or None for a malformed one."""
    after_labels = line.rpartition("}")[2].split() if "}" in line else line.split()[1:]
    if len(line) > MAX_LINE or len(after_labels) > 2:  # a value and an optional time stamp
        return None
    try:
        (sample,) = all_samples(line)
    except Exception:  # noqa: BLE001 - the parser raises many kinds on what is no sample
        return None
    limit = limits.get(sample.name)
    if limit is None or not (math.isfinite(sample.value) and 0 <= sample.value <= limit):
        return None
    return sample
