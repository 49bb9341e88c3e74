"""``pdconn plan --store --trace FILE``: how large the store should be, over the requests of a file.

Large traces are simulated by several processes, each for some of the capacities: every one reads
the file, so that none holds the trace in memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from pdconn.store.format.footer import row_sizes
from pdconn.store.format.prompt_rows import Spacing
from pdconn.store.format.row import RowKind
from pdconn.store.settings import SAVE, StoreSettings, size_of
from pdconn.tools.cli.common_options import BadArgument, tokens
from pdconn.tools.cli.store.planned_store import store_numbers
from pdconn.tools.output.progress_line import ProgressLine
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.store.cost import StoredShapes
from pdconn.tools.plan.store.curve import (
    FIXED_S,
    Curve,
    Rates,
    TracedRequest,
    check_capacities,
    joined_curves,
    simulate,
    usual_capacities,
)
from pdconn.tools.plan.store.curve_report import CurveReport, TraceSummary
from pdconn.tools.plan.store.simulated_store import SimulatedSettings
from pdconn.tools.plan.store.trace import (
    MAX_LINE,
    MOONCAKE_BLOCK,
    BadTrace,
    TraceCounts,
    find_answers,
    read_trace,
    with_answers,
)
from pdconn.tools.plan.store.trace_sample import TraceSample, TraceSurvey

_ALONE_REQUESTS = 5000
"""Fewer requests are simulated by this process alone: others take a second to start."""
_SAMPLE_REQUESTS = 50_000
_SHOWN = 8192
_FEWEST_ROWS = 64
"""The smallest usual capacity, in rows of each kind: below it hardly a prompt is kept whole."""


def configure_trace(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="with --store: requests of Mooncake's trace format, of pdconn proxy's access log "
        "(--log-format json --log-blocks), or recorded KV events; shows what stores of several "
        "capacities save of them, and --svg draws that",
    )  # fmt: skip
    group.add_argument(
        "--capacities", metavar="SIZES",
        help="capacities for --trace, such as 100GiB,1TiB (default: eight, up to twice what the "
        "trace takes)",
    )  # fmt: skip
    group.add_argument(
        "--engine-cache", type=tokens, default=512 << 10, metavar="TOKENS",
        help="the engines' own cache in front of the store, for --trace: what vLLM logs as GPU KV "
        "cache size, the sum of all engines; 0 for none (default: 512k)",
    )  # fmt: skip
    group.add_argument(
        "--store-save", choices=SAVE, default="prompt",
        help="save of the store, for --trace (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--store-fixed-ms", type=float, default=1e3 * FIXED_S, metavar="MS",
        help="milliseconds that a load takes besides reading (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--trace-requests", type=int, default=_SAMPLE_REQUESTS, metavar="N",
        help="simulate about so many requests of a longer trace, chosen by their prefixes, on "
        "stores that are smaller in proportion; 0 for all (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--trace-block", type=tokens, default=MOONCAKE_BLOCK, metavar="TOKENS",
        help="tokens of a block of Mooncake's format (default: %(default)s)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _TraceFile:
    """A file of requests, which is read as often as needed.

    Attributes:
        answers: ids of answers by number of the request, see :func:`find_answers`.
    """

    path: Path
    block_tokens: int
    answers: dict[int, tuple[int, ...]]

    def requests(self, counts: TraceCounts | None = None) -> Iterator[TracedRequest]:
        """The requests, from the first on.

        Raises:
            BadTrace, OSError: the file cannot be read.
        """
        read = read_trace(_lines(self.path), counts or TraceCounts(), self.block_tokens)
        found = _named(self.path, read)
        return with_answers(found, self.answers) if self.answers else found


@dataclass(frozen=True, slots=True)
class _Simulation:
    """A trace with what it is simulated on, but for the capacities."""

    trace: _TraceFile
    sample: TraceSample
    part: float
    settings: SimulatedSettings
    rates: Rates
    engine_nbytes: int

    def run(
        self, capacities: list[int], on_progress: Callable[[int], None] = lambda number: None
    ) -> Curve:
        """The curve at ``capacities``."""
        return simulate(
            self.sample.choose(self.trace.requests()), self.settings, capacities, self.rates,
            engine_nbytes=self.engine_nbytes, part=self.part, on_progress=on_progress,
        )  # fmt: skip


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        # One byte more than a line may have, so that a longer one is noticed.
        while line := file.readline(MAX_LINE + 1):
            yield line


def _named(path: Path, requests: Iterator[TracedRequest]) -> Iterator[TracedRequest]:
    try:
        yield from requests
    except BadTrace as error:
        raise error.prefixed(f"{path} ") from error


def forecast_traced(args: argparse.Namespace, engine: EngineShape) -> CurveReport | None:
    """What stores save of a trace; None if not requested.

    Raises:
        BadArgument, ForecastError, OSError: an option is invalid, or the trace cannot be read.
    """
    if args.trace is None:
        return None
    if not args.store:
        raise BadArgument("--trace", "--store beside it", args.trace)
    if not args.trace.is_file():
        raise BadArgument("--trace", "a file, which is read several times", args.trace)
    if args.trace_block < 1:
        raise BadArgument("--trace-block", "a number of tokens above 0", args.trace_block)
    if args.trace_requests < 0:
        raise BadArgument("--trace-requests", "a number of requests, or 0", args.trace_requests)
    if not 0 <= args.store_fixed_ms < 1e6:
        raise BadArgument(
            "--store-fixed-ms", "milliseconds from 0 to a million", args.store_fixed_ms
        )
    rows, settings, rates = _model_of(args, engine)
    progress = ProgressLine("pdconn plan: ")
    try:
        return _simulated(args, rows, settings, rates, progress)
    finally:
        progress.erase()


def _model_of(
    args: argparse.Namespace, engine: EngineShape
) -> tuple[StoredShapes, SimulatedSettings, Rates]:
    numbers = store_numbers(args)
    rows = StoredShapes.of_engine(engine, is_packed=numbers.is_packed)
    usual = StoreSettings(root="", capacity=1)
    settings = SimulatedSettings(
        rows.layout,
        Spacing.from_setting(rows.layout, numbers.every),
        rows.staged,
        numbers.staging,
        usual.min_tokens,
        args.chunk,
        saves_answers=args.store_save == "all",
    )
    return (
        rows,
        settings,
        Rates(rows.load, numbers.rate, args.prefill_rate, args.store_fixed_ms / 1e3),
    )


def _simulated(
    args: argparse.Namespace,
    rows: StoredShapes,
    settings: SimulatedSettings,
    rates: Rates,
    progress: ProgressLine,
) -> CurveReport:
    row_nbytes = row_sizes(rows.layout)
    token_nbytes = row_nbytes[RowKind.FA] / rows.layout.block_tokens
    trace = _TraceFile(args.trace, args.trace_block, {})
    counts = TraceCounts()
    progress.show_step("reading the trace")
    survey = TraceSurvey.of(_shown(trace.requests(counts), progress))
    if not survey.distinct_tokens:
        raise BadTrace(str(args.trace), "a request with a whole block", f"{counts.lines} lines")
    if settings.saves_answers:
        trace = replace(trace, answers=find_answers(trace.requests()))
    sample = survey.sample(args.trace_requests)
    engine_nbytes = int(args.engine_cache * token_nbytes)
    part = sample.part(_shown(trace.requests(), progress))
    if not part:
        raise BadArgument(
            "--trace-requests", "more, to have any in the sample", args.trace_requests
        )
    if args.capacities is None:
        smallest = int(_FEWEST_ROWS * sum(row_nbytes.values()) / part)
        capacities = usual_capacities(int(survey.distinct_tokens * token_nbytes), smallest)
    else:
        capacities = [_size(size) for size in args.capacities.split(",")]
        try:
            check_capacities(capacities)
        except ShapeError as error:
            raise BadArgument("--capacities", error.expected, args.capacities) from error
    simulation = _Simulation(trace, sample, part, settings, rates, engine_nbytes)
    curve = _run(simulation, capacities, survey.requests, progress)
    return CurveReport(
        curve,
        TraceSummary(
            str(args.trace), survey.requests, survey.prompt_tokens, counts.lines, counts.skipped,
            args.engine_cache, args.store_save, rates.prefill,
        ),
    )  # fmt: skip


def _shown(requests: Iterator[TracedRequest], progress: ProgressLine) -> Iterator[TracedRequest]:
    for number, request in enumerate(requests):
        if not number % _SHOWN:
            progress.show_step(f"reading the trace: {number:,} requests")
        yield request


def _size(text: str) -> int:
    try:
        return size_of(text)
    except ValueError as error:
        raise BadArgument(
            "--capacities", f"sizes with commas between, each {error}", text
        ) from error


def _run(
    simulation: _Simulation, capacities: list[int], num_requests: int, progress: ProgressLine
) -> Curve:
    num_processes = min(len(os.sched_getaffinity(0)), len(capacities))
    began = time.monotonic()

    def show(number: int) -> None:
        rate = number / max(1e-6, time.monotonic() - began)
        of = int(num_requests * simulation.part)
        progress.show_step(f"{number:,} of about {of:,} requests, {rate:,.0f} a second")

    if num_processes < 2 or num_requests < _ALONE_REQUESTS:
        return simulation.run(capacities, show)
    shares = [capacities[first::num_processes] for first in range(num_processes)]
    # Spawned, not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes - 1, mp_context=context) as pool:
        others = [pool.submit(simulation.run, share) for share in shares[1:]]
        mine = simulation.run(shares[0], show)
        return joined_curves([mine, *(other.result() for other in others)])
