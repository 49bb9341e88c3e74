"""Turns of every line, interleaved, and what they come to.

Machines drift, so the lines of a case are measured turn by turn in an order drawn anew
each round, and ratios are taken within a round before the median is.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdconn.bench.percentile import percentile
from pdconn.bench.transfer.lines import Line
from pdconn.bench.transfer.moves import Sample
from pdconn.bench.transfer.rig import OpenCase

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LineResult:
    """One line over all rounds.

    Times are medians and the 99th percentile (of few rounds: the slowest), in seconds;
    ``of_raw`` is the throughput as a part of raw's in the same round, ``slowest_pull``
    the slowest request's time over the median request's.  CPU is seconds per gigabyte.
    """

    line: Line
    nbytes: int
    runs: int
    wall_p50_s: float
    wall_p99_s: float
    plan_s: float
    post_s: float
    bytes_per_s: float
    of_raw: float | None
    of_alone: float | None
    slowest_pull: float | None
    reader_cpu_s_per_gb: float
    lender_cpu_s_per_gb: float
    walls_s: tuple[float, ...]


def take_rounds(rig: OpenCase, rounds: int, rng: random.Random, say: Say) -> list[LineResult]:
    """Warm up, check the bytes, measure, check again.

    Raises:
        WrongBytes: a pull brought something else than what is lent.
        BenchError: a read failed or does not end.
    """
    say("checking what arrives")
    rig.check()
    for line in rig.lines:
        rig.measure(line)
    taken: dict[Line, list[Sample]] = {line: [] for line in rig.lines}
    for number in range(1, rounds + 1):
        for line in rng.sample(rig.lines, len(rig.lines)):
            say(f"round {number} of {rounds}: {line}")
            taken[line].append(rig.measure(line))
    rig.check()
    return [_result(line, samples, taken) for line, samples in taken.items()]


def _result(line: Line, samples: Sequence[Sample], taken: dict[Line, list[Sample]]) -> LineResult:
    walls = [sample.wall_s for sample in samples]
    nbytes = samples[0].nbytes
    return LineResult(
        line,
        nbytes,
        samples[0].runs,
        percentile(walls, 0.5),
        percentile(walls, 0.99),
        statistics.median(sample.plan_s for sample in samples),
        statistics.median(sample.post_s for sample in samples),
        nbytes / percentile(walls, 0.5),
        _part_of(samples, taken.get(Line.RAW)),
        _part_of(samples, taken.get(Line.ALONE)),
        _slowest(samples),
        statistics.median(sample.reader_cpu_s for sample in samples) / nbytes * 1e9,
        statistics.median(sample.lender_cpu_s for sample in samples) / nbytes * 1e9,
        tuple(walls),
    )


def _speed(sample: Sample) -> float:
    return sample.nbytes / sample.wall_s


def _part_of(samples: Sequence[Sample], others: Sequence[Sample] | None) -> float | None:
    """Throughput over that of others, round by round; the median of it."""
    if others is None:
        return None
    pairs = zip(samples, others, strict=True)
    return statistics.median(_speed(sample) / _speed(other) for sample, other in pairs)


def _slowest(samples: Sequence[Sample]) -> float | None:
    if len(samples[0].each_s) < 2:
        return None
    return statistics.median(
        max(sample.each_s) / statistics.median(sample.each_s) for sample in samples
    )
