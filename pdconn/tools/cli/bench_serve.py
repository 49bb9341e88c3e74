"""``pdconn bench serve``: its options, and the contestants that they select."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pdconn.tools.bench.bench_errors import BadOption, BenchError
from pdconn.tools.bench.manifest import manifest
from pdconn.tools.bench.serving.contestants import Target, running_contestants
from pdconn.tools.bench.serving.lineup import CONNECTORS, CORES
from pdconn.tools.bench.serving.replies import TurnResult
from pdconn.tools.bench.serving.serve_report import ServeReport
from pdconn.tools.bench.serving.summary import Bounds
from pdconn.tools.bench.serving.turns import RunPlan, measure
from pdconn.tools.cli.common_options import BadArgument, check_file, configure_json, publish, tokens
from pdconn.tools.lab.demo_run import check_dependencies
from pdconn.tools.lab.lab_errors import LabError
from pdconn.tools.lab.model import SPECS, write_model
from pdconn.tools.lab.spec import SERVED_NAME, EngineSpec
from pdconn.tools.lab.starting import StartingEngines
from pdconn.tools.output.progress_line import LogStep

SINGLE = "single"
_CONTESTANTS = (SINGLE, *CONNECTORS)
_MODEL = "handover"

_EPILOG = """\
Contestants are measured in turns, each round in a different order, with the same prompts
(random token ids, temperature 0) at the same times.  Outside its turn a contestant is
frozen.  The report has medians and 99th percentiles of:

  TTFT       from the request (its due time under --rate) to the first token
  ITL        between chunks of an answer, over all answers
  handover   from the end of prefill's answer to the first byte of decode's, as
             pdconn proxy reports it for each request on its admin pages (of a target:
             NAME=URL,admin=URL); - where it is not reported
  goodput    requests a second that are complete, right, within --ttft-bound and, on
             average per token after the first, within --itl-bound

Every answer is compared with the reference's: the single engine's, or that of the first
contestant.  Two tokens of nearly equal probability may swap where a service batches
differently; the lab's models have almost no such tokens.

Without --target, engines are started on this machine, without a GPU: a prefill and a
decode engine behind pdconn proxy for each connector, and one engine by itself (single).
Their model is small and random.  This takes minutes, and 1.6 GiB per engine.

  in-tree        vLLM's NixlConnector as it comes: NIXL's progress thread spins, which takes
                 a core from the model where there are only two
  in-tree-tuned  the same with that thread at rest, as in pdconn; done by a plugin of this
                 benchmark, which loads it into these engines alone
  in-tree-push   vLLM's NixlPushConnector.  pdconn proxy asks decode once prefill has
                 answered; vLLM's own proxy for it asks both at once, which hides more
  pdconn-streams as pdconn; pdconn proxy asks both engines at once (--streams on)

examples:
  pdconn bench serve
  pdconn bench serve --contestants pdconn,single --prompt 3000 --rate 2 --json out.json
  pdconn bench serve --target one=http://10.0.0.9:8000 --target pd=http://10.0.0.1:8000 \\
      --prompt 2000 --output 200 --requests 100 --rate 5 --ttft-bound 300 --itl-bound 30

exit codes:
  0    measured, and every answer was complete and equal to the reference's
  1    an answer was wrong, a request failed, a contestant did not start or answer, or
       standard output was closed before the result
  2    invalid options
  130  interrupted by Ctrl-C
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    contestants = parser.add_mutually_exclusive_group()
    contestants.add_argument(
        "--contestants",
        default="pdconn,in-tree,single",
        metavar="NAME,...",
        help=f"contestants to start: {', '.join(_CONTESTANTS)} (%(default)s)",
    )
    contestants.add_argument(
        "--target",
        action="append",
        metavar="NAME=URL[,admin=URL]",
        help="measure a service that runs; may be repeated, the first is the reference",
    )
    add(
        "--model",
        metavar="NAME",
        help="of targets: its name there (the first of /v1/models); "
        f"else one of {', '.join(SPECS)} ({_MODEL})",
    )
    add("--prompt", type=tokens, default=1000, metavar="TOKENS", help="k: times 1024 (%(default)s)")
    add("--output", type=tokens, default=32, metavar="TOKENS", help="per answer (%(default)s)")
    add("--requests", type=int, default=8, metavar="N", help="requests of each turn (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each contestant (%(default)s)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate",
        type=float,
        metavar="PER_S",
        help="requests per second, at random times (Poisson)",
    )
    pace.add_argument(
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="clients that each send their next request when the last is answered (%(default)s)",
    )
    add("--ttft-bound", type=float, default=500.0, metavar="MS", help="(%(default)g)")
    add("--itl-bound", type=float, default=50.0, metavar="MS", help="(%(default)g)")
    add(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="timeout of a request (%(default)g)",
    )
    add("--seed", type=int, default=0, help="seed of prompts and of --rate's times (%(default)s)")
    configure_json(parser)
    add("--cores", choices=CORES, default="apart", help="how engines share the cores (%(default)s)")
    add(
        "--directory",
        type=Path,
        default=Path(".work/serve"),
        help="for models and logs (%(default)s)",
    )


def run_command(args: argparse.Namespace) -> int:
    """Measure all contestants and report; returns 0, 1 or 2 as in ``--help``."""
    began = time.monotonic()

    def log_step(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    try:
        plan, bounds = _plan(args), _bounds(args)
        targets = _targets(args.target or ())
        names = [one.name for one in targets] or _names(args.contestants)
        if not targets:
            _check_lab(args, plan)
        check_file("json", args.json)
    except (BadOption, BadArgument) as error:
        print(f"pdconn bench serve: {error}", file=sys.stderr)
        return 2
    try:
        if targets:
            turns = measure(targets, plan, log_step, watch=False)
        else:
            turns = _measured_here(args, names, plan, log_step)
        reference = SINGLE if SINGLE in names and not targets else names[0]
        report = ServeReport.of_turns(plan, bounds, turns, names, reference, manifest=manifest())
        _publish(args.json, report)
    except (BenchError, LabError, OSError) as error:
        print(f"pdconn bench serve: {error}", file=sys.stderr)
        return 1
    return 0 if report.is_good else 1


def _measured_here(
    args: argparse.Namespace, names: Sequence[str], plan: RunPlan, log_step: LogStep
) -> list[TurnResult]:
    check_dependencies()
    model = write_model(args.directory / "models", SPECS[args.model or _MODEL])
    directory = args.directory / "run"
    log_step(f"starting {', '.join(names)}; logs are in {directory}")
    progress = StartingEngines(log_step, 10)
    with running_contestants(names, model, args.cores, directory, progress.show) as contestants:
        for engine in (engine for one in contestants for engine in one.engines):
            log_step(f"{engine.spec.name} ready after {engine.boot_s or 0.0:.0f} s")
        turns = measure(contestants, plan, log_step, watch=True)
        log_step("stopping")
    return turns


def _publish(file: str | None, report: ServeReport) -> None:
    for one in report.answers.wrong:
        print(
            f"round {one.round_number}, prompt {one.prompt}: {one.contestant}: {one.difference}",
            file=sys.stderr,
        )
    publish(report, file)


def _plan(args: argparse.Namespace) -> RunPlan:
    return RunPlan(
        args.prompt,
        args.output,
        args.requests,
        args.rounds,
        args.rate,
        args.concurrency,
        args.seed,
        args.timeout,
        args.model if args.target else SERVED_NAME,
    )


def _bounds(args: argparse.Namespace) -> Bounds:
    for field, value in (("ttft-bound", args.ttft_bound), ("itl-bound", args.itl_bound)):
        if not 0 < value < float("inf"):
            raise BadOption(field, "more than 0 ms", value)
    return Bounds(args.ttft_bound / 1e3, args.itl_bound / 1e3)


def _targets(words: Sequence[str]) -> list[Target]:
    targets: list[Target] = []
    for word in words:
        name, found, urls = word.partition("=")
        url, comma, admin = urls.partition(",admin=")
        if not (found and name and _is_url(url) and (not comma or _is_url(admin))):
            raise BadOption("target", "NAME=http://HOST:PORT[,admin=http://HOST:PORT]", word)
        if name in [one.name for one in targets]:
            raise BadOption("target", "a name for each", f"{name} twice")
        targets.append(Target(name, url, admin.rstrip("/") if comma else None))
    return targets


def _is_url(word: str) -> bool:
    try:
        parts = urlsplit(word)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in _CONTESTANTS:
            raise BadOption("contestants", ", ".join(_CONTESTANTS), name)
    if not names or len(set(names)) != len(names):
        raise BadOption("contestants", "at least one, each once", text or "nothing")
    return names


def _check_lab(args: argparse.Namespace, plan: RunPlan) -> None:
    if args.model is not None and args.model not in SPECS:
        raise BadOption("model", f"{', '.join(SPECS)}, or a --target that serves it", args.model)
    longest = EngineSpec.max_model_len
    if plan.prompt_tokens + plan.output_tokens > longest:
        asked = f"{plan.prompt_tokens} + {plan.output_tokens}"
        raise BadOption("prompt and output", f"at most {longest} tokens together", asked)
