"""``pdconn plan``: computes the cost of a pull between two engines, without engines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pdconn.planning.planning_errors import PlanningError
from pdconn.store.store_errors import StoreError
from pdconn.tools.cli.common_options import BadArgument, check_file, configure_json, publish, tokens
from pdconn.tools.cli.planned_fleet import configure_fleet, forecast_planned_fleet
from pdconn.tools.cli.stdout import terminal_width
from pdconn.tools.cli.store.planned_store import configure_store, forecast_stored
from pdconn.tools.cli.store.traced_store import configure_trace, forecast_traced
from pdconn.tools.plan.advice import advise
from pdconn.tools.plan.drawing.curve_picture import draw_curve
from pdconn.tools.plan.drawing.picture import draw
from pdconn.tools.plan.engine_shape import EngineShape, parse_engine
from pdconn.tools.plan.forecast import Forecast, forecast
from pdconn.tools.plan.forecast_report import ForecastReport
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.hf.kv_dtype import BESIDE
from pdconn.tools.plan.link import PRESETS, Link, parse_link
from pdconn.tools.plan.model_shape import KV_DTYPES, ModelShape, in_kv_dtype
from pdconn.tools.plan.plan_errors import ForecastError, ShapeError, UnreadableConfig
from pdconn.tools.plan.shapes import built_in
from pdconn.tools.plan.shapes_report import ShapesReport
from pdconn.tools.plan.streamed import CHUNK_TOKENS, StreamedForecast, forecast_streamed
from pdconn.tools.plan.tables import IDS

_EPILOG = """\
Runs the planner of real pulls on the shapes of two engines. Needs no vLLM, no GPU and
no model weights: a config.json, or a built-in shape (--list).

ENGINE is written as tp=4,pp=1,layout=BHLNC,block=16; defaults are tp=1,pp=1,block=16
and the layout that vLLM takes with pdconn: LBHNC, or LBNHC for MLA, whose one head
makes them the same. A layout is a memory order, outermost first, of L(ayers),
B(locks), H(eads), N (tokens of a block) and C(ontent). Some attention backends read
few layouts: name one with backend=FLEX_ATTENTION.

The last table has the same pull over every link that --link knows by name. A number
with a ~ is assumed: it was not measured. A request is a pull like this one; so many a
second is what the slowest rank's link carries.

examples:
  pdconn plan --model gemma-3-27b
  pdconn plan --model llama-3.1-70b --prefill tp=4 --decode tp=8,layout=BHLNC --prompt 32768
  pdconn plan --model gpt-oss-120b --dtype fp8 --link rdma-200
  pdconn plan --model ./my-model --hit 4096 --link shm --json=plan.json --svg plan.svg
  pdconn plan --model gemma-3-27b --decode tp=2 --store --prefill-rate 12000
  pdconn plan --model gemma-3-27b --store --trace trace.jsonl --prefill-rate 12000 --svg curve.svg
  pdconn plan --model llama-3.1-70b --prompt 32k --link 100Gb/s --stream --prefill-rate 9000
  pdconn plan --model llama-3.1-70b --prefill tp=4 --decode tp=4 --fleet 16 \
    --prefill-rate 9000 --step-ms 18 --ttft-target 2 --itl-target 0.022 \
    --load 10,6k,150 --load 7,1k,1500
  pdconn plan --list

exit codes:
  0  planned, with or without warnings
  2  bad options, a model that cannot be read, or engines that cannot exchange KV
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn plan``."""
    parser.epilog = _EPILOG
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="NAME|DIR|FILE", help="a built-in shape, or a config.json or its folder"
    )
    what.add_argument(
        "--list", action="store_true", help="list the built-in shapes, and families of config.json"
    )
    parser.add_argument(
        "--prefill", default="", metavar="ENGINE", help="the prefill engine, e.g. tp=4"
    )
    parser.add_argument(
        "--decode", default="", metavar="ENGINE", help="the decode engine, e.g. tp=2"
    )
    parser.add_argument(
        "--prompt",
        type=tokens,
        default=8192,
        help="tokens of the prompt, e.g. 32k (default: %(default)s)",
    )
    parser.add_argument(
        "--hit", type=tokens, default=0, help="tokens that decode has cached (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help=f"type of keys and values: auto (the model's), {', '.join(KV_DTYPES)} (default: "
        "%(default)s)",
    )
    _configure_links(parser)
    parser.add_argument(
        "--ids", choices=IDS, default="random",
        help="order of a request's block ids (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--stream",
        action="store_true",
        help="what is left of the pull after prefill's last step if decode follows the request "
        "(pdconn proxy --streams on); needs --prefill-rate",
    )
    parser.add_argument(
        "--chunk", type=tokens, default=CHUNK_TOKENS, metavar="TOKENS",
        help="max_num_batched_tokens of prefill, for --stream and --trace (default: %(default)s)",
    )  # fmt: skip
    store = parser.add_argument_group("a store")
    configure_store(store)
    configure_trace(store)
    configure_fleet(parser.add_argument_group("a fleet"))
    configure_json(parser)
    _configure_picture(parser)


def _configure_picture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw one block and its descriptors as SVG, "
        "or with --trace the share of tokens that a store loads over its capacity",
    )
    parser.add_argument(
        "--group",
        type=int,
        default=0,
        help="KV cache group of decode that --svg draws (default: %(default)s)",
    )


def _configure_links(parser: argparse.ArgumentParser) -> None:
    presets = ", ".join(preset.name for preset in PRESETS)
    parser.add_argument(
        "--link",
        default="400Gb/s",
        help=f"link of each rank: {presets}, or a speed like 50GB/s (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-link", metavar="LINK", help="link of each prefill rank (default: as --link)"
    )
    parser.add_argument(
        "--descriptor-us", type=float, help="microseconds for each descriptor (default: the link's)"
    )


def run_command(args: argparse.Namespace) -> int:
    """Print the forecast."""
    try:
        check_file("--svg", args.svg)
        check_file("--json", args.json)
        if args.list:
            publish(ShapesReport(), args.json, terminal_width())
            return 0
        made = _forecast(args)
        stored, curve = forecast_stored(args, made.decode), forecast_traced(args, made.decode)
        report = ForecastReport(
            made,
            advise(made),
            stored,
            _forecast_streamed(args, made),
            curve,
            fleet=forecast_planned_fleet(args, made),
        )
        if args.svg:
            if curve is None:
                svg = draw(made.prefill, made.decode, args.group)
            else:
                title = f"A store for {made.decode.model.name}: {args.trace.name}"
                svg = draw_curve(curve.curve, title)
            args.svg.write_text(svg, encoding="utf-8")
        publish(report, args.json, terminal_width())
    except (BadArgument, ForecastError, PlanningError, StoreError, OSError) as error:
        print(f"pdconn plan: {error}", file=sys.stderr)
        return 2
    return 0


def _forecast(args: argparse.Namespace) -> Forecast:
    model = _model(args.model, args.dtype)
    return forecast(
        _engine("--prefill", args.prefill, model),
        _engine("--decode", args.decode, model),
        args.prompt,
        args.hit,
        parse_link(args.link, args.descriptor_us),
        prefill_link=_prefill_link(args.prefill_link),
        ids=args.ids,
    )


def _forecast_streamed(args: argparse.Namespace, made: Forecast) -> StreamedForecast | None:
    if not args.stream:
        return None
    if args.prefill_rate is None:
        raise BadArgument("--prefill-rate", "tokens per second, for --stream", "nothing")
    return forecast_streamed(made, args.prefill_rate, args.chunk)


def _prefill_link(text: str | None) -> Link | None:
    try:
        return None if text is None else parse_link(text)
    except ShapeError as error:
        raise error.prefixed("prefill-") from error


def _engine(option: str, text: str, model: ModelShape) -> EngineShape:
    try:
        return parse_engine(text, model)
    except ShapeError as error:
        raise error.prefixed(f"{option} ") from error


def _model(given: str, dtype: str) -> ModelShape:
    """Read the model from a file or folder if it exists, else take a built-in shape."""
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    elif not path.is_file():
        return in_kv_dtype(built_in(given), dtype)
    config, beside = _json(path), path.with_name(BESIDE)
    is_folders = path.name == "config.json"
    name = path.resolve().parent.name if is_folders else path.stem
    # vLLM reads it from the folder: beside another file it may belong to another model.
    quantization = _json(beside) if is_folders and beside.is_file() else None
    try:
        return model_shape(config, name, quantization, dtype)
    except ShapeError as error:
        raise error.prefixed(f"{path} ") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnreadableConfig(str(path), "JSON", error) from error
