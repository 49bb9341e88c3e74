"""``pdconn bench transfer``: its options, and the cases that they select."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pdconn.planning.planning_errors import PlanningError
from pdconn.tools.bench.bench_errors import BadOption, BenchError
from pdconn.tools.bench.interrupts import held_interrupts
from pdconn.tools.bench.manifest import manifest
from pdconn.tools.bench.transfer.bench_case import OpenCase
from pdconn.tools.bench.transfer.bench_lender import MAX_BYTES, ListeningLender, LocalLender, listen
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.rounds import take_rounds
from pdconn.tools.bench.transfer.transfer_report import CaseResult, TransferReport, draw
from pdconn.tools.bench.transfer.workload import Workload
from pdconn.tools.cli import EXIT_INTERRUPTED
from pdconn.tools.cli.common_options import (
    BadArgument,
    check_file,
    check_picture,
    configure_json,
    publish_json,
    tokens,
)
from pdconn.tools.output.progress_line import ProgressLine
from pdconn.tools.plan.engine_shape import EngineShape, parse_engine
from pdconn.tools.plan.model_shape import ModelShape
from pdconn.tools.plan.plan_errors import ForecastError, ShapeError
from pdconn.tools.plan.shapes import built_in
from pdconn.tools.plan.tables import IDS
from transport import TransportError

_EPILOG = """\
Every case compares four methods in one run: pdconn, one READ of as many bytes in one
piece (raw), the same blocks layer by layer (layered), and a memcpy.  The bytes that
arrive are compared with the lender's before and after.  Several values of an option, separated by
commas, make a case each.

An engine is written as tp=4,pp=1,layout=BHLNC,block=16, as for pdconn plan; --layout and
--block set both engines.  Without a layout it is the one of pdconn plan, which vLLM
takes with pdconn.

examples:
  pdconn bench transfer
  pdconn bench transfer --model gpt-oss-20b --prompt 32768 --path shm-huge,tcp
  pdconn bench transfer --block 2,8,32 --layout BLHNC,LBHNC --ids random,contiguous --plot out.png
  pdconn bench transfer --prefill tp=4,layout=BHLNC --decode tp=8,layout=BHLNC --rank 3
  pdconn bench transfer --concurrency 32 --prompt 512

  on the host that lends:      pdconn bench transfer --serve 10.0.0.1:7777
  on the host that measures:   pdconn bench transfer --remote 10.0.0.1:7777 --path auto

exit codes:
  0    measured, and every byte was right
  1    a read failed, or brought wrong bytes; or the output was closed before the result
  2    invalid options
  130  interrupted by Ctrl-C; a lender that serves ends with 0
A second Ctrl-C ends the process at once, with 130.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    paths = "; ".join(f"{path.name}: {path.words}" for path in PATHS.values())
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", metavar="NAME", help="a built-in shape (%(default)s)")
    add("--prefill", default="", metavar="ENGINE", help="the engine that lends, e.g. tp=4")
    add("--decode", default="", metavar="ENGINE", help="the engine that pulls, e.g. tp=2")
    add("--rank", type=int, default=0, help="the decode rank that pulls (%(default)s)")
    add("--layout", default="", metavar="L,...", help="memory orders, e.g. BLHNC,LBHNC")
    add("--block", default="", metavar="N,...", help="tokens per block")
    add("--prompt", default="2048", metavar="N,...", help="tokens, k: times 1024 (%(default)s)")
    add("--ids", default="random", metavar="ORDER,...", help=f"order of ids: {', '.join(IDS)}")
    add("--concurrency", default="1", metavar="N,...", help="pulls at once (%(default)s)")
    add("--path", default="shm-huge", metavar="PATH,...", help=f"{paths} (%(default)s)")
    add("--mooncake", action="store_true", help="measure Mooncake's transfer engine, too")
    add("--rounds", type=int, default=9, help="measurements of each method (%(default)s)")
    add("--seed", type=int, default=0, help="seed of block ids and of the order of measurements")
    configure_json(parser)
    add("--plot", type=Path, metavar="FILE", help="draw throughput against block size")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--remote", metavar="HOST:PORT", help="read from a lender on another host")
    other.add_argument("--serve", metavar="HOST:PORT", help="run that lender until interrupted")
    add("--max-gib", type=float, default=MAX_BYTES / (1 << 30), help="GiB that --serve may lend")


def run_command(args: argparse.Namespace) -> int:
    """Run the lender, or measure every case and report."""
    try:
        if args.serve:
            return _serve(args)
        cases = _cases(args)
        remote = _address(args.remote) if args.remote else None
        check_file("json", args.json)
        check_picture("plot", args.plot)
    except (BadOption, BadArgument, ForecastError, PlanningError, OSError) as error:
        print(f"pdconn bench transfer: {error}", file=sys.stderr)
        return 2
    try:
        with held_interrupts(_end_now):
            results = _measured(args, remote, cases)
        publish_json(args.json, TransferReport(results, manifest()).document())
        if args.plot:
            draw(results, args.plot)
    except (BenchError, TransportError, OSError) as error:
        print(f"pdconn bench transfer: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(args: argparse.Namespace) -> int:
    host, port = _address(args.serve)
    with contextlib.suppress(KeyboardInterrupt), held_interrupts(_end_now):
        listen(host, port, int(args.max_gib * (1 << 30)), lambda text: print(text, flush=True))
    return 0


def _end_now() -> NoReturn:
    """End the process at the second Ctrl-C, without waiting for anything to close."""
    os.write(sys.stderr.fileno(), b"pdconn bench transfer: interrupted twice, nothing is closed\n")
    os._exit(EXIT_INTERRUPTED)


def _measured(
    args: argparse.Namespace,
    remote: tuple[str, int] | None,
    cases: Sequence[tuple[str, Workload]],
) -> list[CaseResult]:
    rng = random.Random(args.seed)
    results = []
    with ListeningLender(*remote) if remote else LocalLender() as lender:
        for number, (path, workload) in enumerate(cases, 1):
            progress = ProgressLine(f"case {number} of {len(cases)}: ")
            with OpenCase(workload, PATHS[path], lender.control, mooncake=args.mooncake) as rig:
                method_results = take_rounds(rig, args.rounds, rng, progress.show_step)
                result = CaseResult(workload, path, tuple(method_results), rig.facts())
            progress.erase()
            results.append(result)
            if args.json != "-":
                print(result.text(), end="\n\n", flush=True)
    return results


def _cases(args: argparse.Namespace) -> list[tuple[str, Workload]]:
    if args.rounds < 1:
        raise BadOption("rounds", "at least 1", args.rounds)
    model = built_in(args.model)
    for path in _listed(args.path):
        if path not in PATHS:
            raise BadOption("path", ", ".join(PATHS), path)
    made = []
    for path, layout, block, ids, prompt, requests in itertools.product(
        _listed(args.path),
        _listed(args.layout) or [""],
        _listed(args.block) or [""],
        _listed(args.ids),
        _prompts(args.prompt),
        _numbers("concurrency", args.concurrency),
    ):
        prefill, decode = (
            _engine(option, text, layout, block, model)
            for option, text in (("--prefill", args.prefill), ("--decode", args.decode))
        )
        workload = Workload(prefill, decode, prompt, ids, requests, args.rank, args.seed)  # type: ignore[arg-type]
        workload.sources()  # raises for engines that cannot exchange KV
        made.append((path, workload))
    return made


def _engine(option: str, text: str, layout: str, block: str, model: ModelShape) -> EngineShape:
    parts = [text, layout and f"layout={layout}", block and f"block={block}"]
    try:
        return parse_engine(",".join(filter(None, parts)), model)
    except ShapeError as error:
        raise error.prefixed(f"{option} ") from error


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(field: str, text: str) -> list[int]:
    words = _listed(text)
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise BadOption(field, "whole numbers, separated by commas", text or "nothing")
    return [int(word) for word in words]


def _prompts(text: str) -> list[int]:
    try:
        found = [tokens(word) for word in _listed(text)]
    except argparse.ArgumentTypeError:
        found = []
    if not found:
        expected = "whole numbers such as 2048 or 128k (131072), separated by commas"
        raise BadOption("prompt", expected, text or "nothing")
    return found


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 1 << 16):
        raise BadOption("address", "HOST:PORT", text)
    return host.strip("[]"), int(port)
