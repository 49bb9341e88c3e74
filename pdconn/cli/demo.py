"""``pdconn demo``: prefill, decode and the proxy here, checked against one engine alone."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pdconn.lab.demo import DemoPlan, DemoRow, draw, run_demo
from pdconn.lab.errors import LabError
from pdconn.lab.table import table

_EPILOG = """\
Starts one prefill and one decode vLLM engine and the proxy on this machine, sends
prompts of several lengths, and compares every answer with that of one engine alone:
tokens must be equal, and log-probabilities within --tolerance.

Without --model it writes a tiny hybrid model (full attention and sliding windows)
with random weights. --model takes any model that vLLM serves.

examples:
  pdconn demo
  pdconn demo --layout BLHNC --json demo.json
  pdconn demo --gpu --model google/gemma-3-1b-it --tolerance 0.05

exit codes:
  0  every answer agrees
  1  an answer differs, or a process could not be started (the end of its log is shown)
  2  bad options
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
        "--max-tokens", type=int, default=16, help="tokens of each answer (default: %(default)s)"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=4096,
        help="tokens of prompt and answer together (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, help="port of the proxy (default: any free one)")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(".work/demo"),
        help="folder of logs and model (default: %(default)s)",
    )
    parser.add_argument(
        "--picture", type=Path, help="file of the picture (default: demo.png in --directory)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    parser.add_argument(
        "--break-it",
        action="store_true",
        help="flip one byte of every pull: the check must fail",
    )
    parser.add_argument("engine_args", nargs="*", help="after --: further arguments of all engines")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all answers agree."""
    args.directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    try:
        rows = run_demo(_plan(args), say)
    except LabError as error:
        print(f"pdconn demo: {error}", file=sys.stderr)
        return 1
    print(render(rows))
    picture = args.picture or args.directory / "demo.png"
    _draw(rows, picture)
    if args.json is not None:
        args.json.write_text(json.dumps([row.to_json() for row in rows], indent=2) + "\n")
    wrong = [row for row in rows if row.mismatch is not None]
    for row in wrong:
        print(f"{row.label}: {row.mismatch}", file=sys.stderr)
    verdict = "all agree with" if not wrong else f"{len(wrong)} differ from"
    print(f"\n{len(rows)} answers: {verdict} one engine alone")
    return 1 if wrong else 0


def render(rows: list[DemoRow]) -> str:
    """The table."""
    headings = [
        "prompt\ntokens", "full attn\nMB pulled", "windows\nMB pulled", "MB not moved:\nwindows",
        "MB not moved:\nprefix hits", "descrip-\ntors", "pull\nms", "GB/s", "handover\nms",
        "same as\nalone",
    ]  # fmt: skip
    return table(
        headings,
        [
            [
                str(row.prompt_tokens),
                f"{row.full_bytes / 1e6:.3f}",
                f"{row.window_bytes / 1e6:.3f}",
                f"{row.saved_by_window_bytes / 1e6:.3f}",
                f"{row.saved_by_hits_bytes / 1e6:.3f}",
                str(row.descriptors),
                f"{1e3 * row.pull_s:.2f}",
                f"{row.gb_per_s:.2f}",
                f"{1e3 * row.handover_s:.1f}",
                "yes" if row.mismatch is None else "NO",
            ]
            for row in rows
        ],
    )


def _plan(args: argparse.Namespace) -> DemoPlan:
    from pdconn.lab.model import TINY, write_model

    model: str | Path = args.model or write_model(args.directory)
    on_cpu = not args.gpu
    return DemoPlan(
        model=model,
        directory=args.directory,
        vocab=TINY.vocab if args.model is None else 20_000,
        device="cpu" if on_cpu else "gpu",
        layout=args.layout or ("BHLNC" if on_cpu else None),
        max_tokens=args.max_tokens,
        max_model_len=args.max_model_len,
        tolerance=args.tolerance,
        port=args.port,
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
