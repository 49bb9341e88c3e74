"""``pdconn demo``: runs prefill, decode and the proxy here, and checks them against one engine."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import threading
import time
from pathlib import Path

from pdconn.planning.layouts import LAYOUTS
from pdconn.router.proxy_config import STREAMS
from pdconn.tools.cli.common_options import (
    BadArgument,
    check_file,
    check_picture,
    configure_json,
    publish,
    tokens,
)
from pdconn.tools.lab.demo_report import DemoReport, DemoRow
from pdconn.tools.lab.demo_run import (
    MORE,
    DemoAddresses,
    DemoPlan,
    check_dependencies,
    curl,
    draw,
    run_demo,
)
from pdconn.tools.lab.lab_errors import LabError
from pdconn.tools.lab.model import TINY, write_model
from pdconn.tools.openai.completions import BrokenAnswer

_EPILOG = """\
Starts three vLLM engines (prefill, decode, and one alone) and the proxy on this machine,
sends prompts of several lengths through the proxy and to the engine alone, and compares
the answers: tokens must be equal, and log-probabilities within --tolerance.

Without --model it writes a tiny hybrid model (full attention and sliding windows)
with random weights. --model takes any model that vLLM serves.

With --streams on the report and the picture show how much of each pull lay behind prefill,
waits for its next step included, and what came after it.

The proxy's live page shows requests, engines and every decision while the demo runs;
with --keep it all goes on running after the check, until Ctrl-C.

examples:
  pdconn demo
  pdconn demo --keep
  pdconn demo --streams on
  pdconn demo --layout BLHNC --json=demo.json
  pdconn demo --gpu --model google/gemma-3-1b-it --tolerance 0.05

exit codes:
  0    every answer agrees
  1    an answer differs, a process could not be started (the end of its log is shown), or
       standard output was closed before the verdict
  2    bad options
  130  interrupted by Ctrl-C, but with --keep after the check: as the check ended
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn demo``."""
    parser.epilog = _EPILOG
    parser.add_argument("--model", help="a model's directory or name (default: write a tiny one)")
    parser.add_argument("--gpu", action="store_true", help="run the engines on a GPU")
    parser.add_argument(
        "--layout", help="KV layout of both engines, e.g. LBHNC (default: BHLNC on a CPU)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        help="largest difference of log-probabilities, in nats (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=tokens, default=16, help="tokens of each answer (default: %(default)s)"
    )
    parser.add_argument(
        "--max-model-len",
        type=tokens,
        default=4096,
        help="tokens of prompt and answer together (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, help="port of the proxy (default: any free one)")
    parser.add_argument(
        STREAMS.flag, choices=STREAMS.choices, default=STREAMS.default, help=STREAMS.explained
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(".work/demo"),
        help="folder of logs and model (default: %(default)s)",
    )
    parser.add_argument(
        "--picture", type=Path, help="file of the picture (default: demo.png in --directory)"
    )
    configure_json(parser)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave engines and proxy running until Ctrl-C or SIGTERM",
    )
    parser.add_argument(
        "--break-it",
        action="store_true",
        help="flip one byte of every pull: the check must fail",
    )
    parser.add_argument("engine_args", nargs="*", help="after --: further arguments of all engines")


def run_command(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all answers agree."""
    try:
        _check(args)
    except BadArgument as error:
        print(f"pdconn demo: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()

    def log_step(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    codes = []

    def ended(rows: list[DemoRow], served: DemoAddresses) -> None:
        publish(DemoReport(rows, args.streams == "on"), args.json)
        aside = sys.stderr if args.json == "-" else sys.stdout
        with contextlib.redirect_stdout(aside):
            codes.append(_report(args, rows))
            print(_addresses(served, keeps=args.keep), flush=True)
        if args.keep:
            wait_for_ctrl_c()

    try:
        check_dependencies()
        args.directory.mkdir(parents=True, exist_ok=True)
        run_demo(_plan(args), log_step, ended)
    except (LabError, BrokenAnswer, OSError) as error:
        print(f"pdconn demo: {error}", file=sys.stderr)
        return 1
    return codes[0]


def wait_for_ctrl_c() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _addresses(served: DemoAddresses, *, keeps: bool) -> str:
    """The last line: the address of the live page."""
    if not keeps:
        return f"live page: was {served.admin_url}/ (--keep leaves it running)"
    return (
        f"live page: {served.admin_url}/ (API: {served.url}/v1; Ctrl-C stops everything)\n"
        f"try it:    {curl(served.url)}"
    )


def _report(args: argparse.Namespace, rows: list[DemoRow]) -> int:
    """Print the verdict and draw the picture; returns the exit code."""
    picture = args.picture or args.directory / "demo.png"
    _draw(rows, picture)
    wrong = [row for row in rows if row.mismatch is not None]
    for row in wrong:
        print(f"{row.label}: {row.mismatch}", file=sys.stderr)
    verdict = "all agree with" if not wrong else f"{len(wrong)} differ from"
    print(f"\n{len(rows)} answers: {verdict} one engine alone")
    return 1 if wrong else 0


def _check(args: argparse.Namespace) -> None:
    """Check all options before three engines start, which takes minutes.

    Raises:
        BadArgument: an option is invalid.
    """
    if args.layout is not None and args.layout.upper() not in LAYOUTS:
        raise BadArgument("--layout", f"one of {', '.join(LAYOUTS)}", args.layout)
    if args.model is not None:
        _check_model(args.model)
    if args.max_tokens < 1:
        raise BadArgument("--max-tokens", "at least 1", args.max_tokens)
    least = 1 + MORE + args.max_tokens
    most = math.inf if args.model else TINY.max_positions
    if not least <= args.max_model_len <= most:
        bound = f"at least {least}" if args.model else f"{least} to {most}, which the model has"
        raise BadArgument("--max-model-len", bound, args.max_model_len)
    if not 0 <= args.tolerance < math.inf:
        raise BadArgument("--tolerance", "nats, at least 0", args.tolerance)
    if args.port is not None and not 0 < args.port < 1 << 16:
        raise BadArgument("--port", "1 to 65535", args.port)
    check_file("--json", args.json)
    check_picture("--picture", args.picture)


def _check_model(model: str) -> None:
    """Check that a folder holds a model, and that a path exists; other names are a hub's."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise BadArgument("--model", "a folder with a config.json", model)
    if not path.exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise BadArgument("--model", "a folder that exists, or a name such as OWNER/NAME", model)


def _plan(args: argparse.Namespace) -> DemoPlan:
    model: str | Path = args.model or write_model(args.directory)
    on_cpu = not args.gpu
    return DemoPlan(
        model=model,
        directory=args.directory,
        vocab=TINY.vocab if args.model is None else 20_000,
        device="cpu" if on_cpu else "gpu",
        layout=args.layout.upper() if args.layout else "BHLNC" if on_cpu else None,
        max_tokens=args.max_tokens,
        max_model_len=args.max_model_len,
        tolerance=args.tolerance,
        port=args.port,
        streams=args.streams == "on",
        args=tuple(args.engine_args),
        decode_extra_config={"debug_faults": {"reads": {"corrupt": 1.0}}} if args.break_it else {},
    )


def _draw(rows: list[DemoRow], path: Path) -> None:
    try:
        draw(rows, path)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
        return
    print(f"\npicture: {path}")
