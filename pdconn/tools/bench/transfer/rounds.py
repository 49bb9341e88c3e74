"""Measures all methods, interleaved, and summarises them.

Machines drift, so the methods of a case are measured in turns, in a new random order each round,
and ratios are computed within a round, before the median.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.tools.bench.percentile import percentile
from pdconn.tools.bench.transfer.bench_case import OpenCase
from pdconn.tools.bench.transfer.methods import Method
from pdconn.tools.bench.transfer.moves import Sample
from pdconn.tools.output.progress_line import LogStep


@dataclass(frozen=True, slots=True)
class MethodTimes:
    """Seconds: medians over the rounds, the 99th percentile (the slowest of few), and all values.

    ``plan_s`` and ``post_s`` are parts of the wall time.
    """

    wall_p50_s: float
    wall_p99_s: float
    plan_s: float
    post_s: float
    walls_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CpuCost:
    """CPU seconds per gigabyte: medians over the rounds."""

    reader_s_per_gb: float
    lender_s_per_gb: float


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method over all rounds.

    ``of_raw`` is the throughput relative to raw's in the same round, ``of_alone`` relative to a
    single request's, ``slowest_pull`` the slowest request's time over the median request's.
    """

    method: Method
    nbytes: int
    runs: int
    times: MethodTimes
    of_raw: float | None
    of_alone: float | None
    slowest_pull: float | None
    cpu: CpuCost

    @property
    def bytes_per_s(self) -> float:
        """The throughput of the median round."""
        return self.nbytes / self.times.wall_p50_s


def take_rounds(
    rig: OpenCase, rounds: int, rng: random.Random, log_step: LogStep
) -> list[MethodResult]:
    """Warm up, check the bytes, measure, check again.

    Raises:
        WrongBytes: a pull delivered bytes that differ from the lender's.
        BenchError: a read failed, or timed out.
    """
    log_step("checking the bytes")
    rig.check_bytes()
    for method in rig.methods:
        rig.measure(method)
    samples_by_method: dict[Method, list[Sample]] = {method: [] for method in rig.methods}
    for number in range(1, rounds + 1):
        for method in rng.sample(rig.methods, len(rig.methods)):
            log_step(f"round {number} of {rounds}: {method}")
            samples_by_method[method].append(rig.measure(method))
    rig.check_bytes()
    return [
        _result(method, samples, samples_by_method) for method, samples in samples_by_method.items()
    ]


def _result(
    method: Method, samples: Sequence[Sample], samples_by_method: dict[Method, list[Sample]]
) -> MethodResult:
    walls = [sample.wall_s for sample in samples]
    nbytes = samples[0].nbytes
    times = MethodTimes(
        percentile(walls, 0.5),
        percentile(walls, 0.99),
        statistics.median(sample.plan_s for sample in samples),
        statistics.median(sample.post_s for sample in samples),
        tuple(walls),
    )
    cpu = CpuCost(
        statistics.median(sample.reader_cpu_s for sample in samples) / nbytes * 1e9,
        statistics.median(sample.lender_cpu_s for sample in samples) / nbytes * 1e9,
    )
    return MethodResult(
        method,
        nbytes,
        samples[0].runs,
        times,
        of_raw=_relative(samples, samples_by_method.get(Method.RAW)),
        of_alone=_relative(samples, samples_by_method.get(Method.ALONE)),
        slowest_pull=_slowest(samples),
        cpu=cpu,
    )


def _speed(sample: Sample) -> float:
    return sample.nbytes / sample.wall_s


def _relative(samples: Sequence[Sample], others: Sequence[Sample] | None) -> float | None:
    """The median of the throughput relative to ``others``, round by round."""
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
