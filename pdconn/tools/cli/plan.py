"""``pdconn plan``: what a pull between two engines costs, computed without engines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from pdconn.planning.errors import PlanningError
from pdconn.store.errors import StoreError
from pdconn.tools.cli.options import BadArgument, check_file, configure_json, publish_json, tokens
from pdconn.tools.cli.output import terminal_width
from pdconn.tools.cli.store.planned import configure_store, forecast_stored
from pdconn.tools.lab.table import table
from pdconn.tools.plan.advice import Advice, advise
from pdconn.tools.plan.drawing.picture import draw
from pdconn.tools.plan.engine import EngineShape, parse_engine
from pdconn.tools.plan.errors import ForecastError, ShapeError, UnreadableConfig
from pdconn.tools.plan.forecast import Cost, Forecast, forecast
from pdconn.tools.plan.hf.config import model_shape
from pdconn.tools.plan.hf.families import FAMILIES
from pdconn.tools.plan.hf.kv_dtype import BESIDE
from pdconn.tools.plan.link import PRESETS, ROUND_TRIPS, Link, parse_link
from pdconn.tools.plan.model import KV_DTYPES, ModelShape, in_kv_dtype
from pdconn.tools.plan.report import listing, to_json
from pdconn.tools.plan.shapes import SHAPES, built_in
from pdconn.tools.plan.store.cost import store_document
from pdconn.tools.plan.store.text import render_store
from pdconn.tools.plan.tables import IDS
from registration.references import AttentionKind

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
        help=f"of keys and values: auto (the model's), {', '.join(KV_DTYPES)} (default: "
        "%(default)s)",
    )
    _configure_links(parser)
    parser.add_argument(
        "--ids", choices=IDS, default="random",
        help="order of a request's block ids (default: %(default)s)",
    )  # fmt: skip
    configure_store(parser.add_argument_group("a store"))
    configure_json(parser)
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw one block and its descriptors as SVG"
    )
    parser.add_argument(
        "--group",
        type=int,
        default=0,
        help="KV cache group of decode that --svg draws (default: %(default)s)",
    )


def _list(where: str | None) -> int:
    """The built-in shapes and the families: as JSON to ``where``, or as a table."""
    if publish_json(where, listing()):
        print(_listing(terminal_width()))
    return 0


def _configure_links(parser: argparse.ArgumentParser) -> None:
    presets = ", ".join(preset.name for preset in PRESETS)
    parser.add_argument(
        "--link",
        default="400Gb/s",
        help=f"of each rank: {presets}, or a speed like 50GB/s (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-link", metavar="LINK", help="of each prefill rank (default: as --link)"
    )
    parser.add_argument(
        "--descriptor-us", type=float, help="microseconds for each descriptor (default: the link's)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the forecast."""
    try:
        check_file("--svg", args.svg)
        check_file("--json", args.json)
        if args.list:
            return _list(args.json)
        made = _forecast(args)
        stored = forecast_stored(args, made.decode)
        advice = advise(made)
        svg = draw(made.prefill, made.decode, args.group) if args.svg else ""
        found = to_json(made, advice)
        if stored is not None:
            found["store"] = store_document(stored)
        if args.svg:
            args.svg.write_text(svg, encoding="utf-8")
        prints_text = publish_json(args.json, found)
    except (BadArgument, ForecastError, PlanningError, StoreError, OSError) as error:
        print(f"pdconn plan: {error}", file=sys.stderr)
        return 2
    if prints_text:
        print(render(made, advice, terminal_width()))
        if stored is not None:
            print(f"\n{render_store(stored)}")
    return 0


def render(made: Forecast, advice: tuple[Advice, ...], width: int | None = None) -> str:
    """The table, the totals and the warnings, in lines of ``width`` characters if it is given."""
    headings = [
        "group", "kind", "window", "layers", "block\ntheirs", "block\nours", "prefill\nranks read",
        "runs", "MB", "KiB\nper run", "MB not moved:\nwindows", "MB not moved:\nprefix hits", "ms",
    ]  # fmt: skip
    rows = [
        [
            str(one.number),
            _kind(one.group.kind),
            str(one.group.window or "-"),
            str(one.group.num_layers),
            str(one.their_block_tokens),
            str(one.group.block_tokens),
            _numbers(one.sources),
            *_amounts(one.cost),
            f"{1e3 * made.seconds_of(one):,.3f}",
        ]
        for one in made.groups
    ]
    ranks = made.decode.ranks
    total = "all" if ranks == 1 else f"all {ranks} ranks"
    rows.append([total, *[""] * 6, *_amounts(made.total), f"{1e3 * made.seconds:,.3f}"])
    if ranks > 1:
        one_rank = [f"rank {made.busiest_rank}", *[""] * 6, *_amounts(made.busiest), ""]
        rows.append(one_rank)
    parts = [_header(made), table(headings, rows, width), _verdict(made), _menu(made, width)]
    parts += [f"warning ({one.code}): {one.text}" for one in advice]
    return "\n\n".join(part if width is None else _folded(part, width) for part in parts)


def _folded(text: str, width: int) -> str:
    """Lines of prose that are too long are continued; those of tables fit already."""
    lines = text.split("\n")
    return "\n".join(
        fill(line, width, subsequent_indent="  ") if len(line) > width else line for line in lines
    )


def _header(made: Forecast) -> str:
    held = f", {made.hit_tokens:,} of them cached" if made.hit_tokens else ""
    return (
        f"{made.decode.model.name}: a prompt of {made.prompt_tokens:,} tokens{held}; "
        f"decode recomputes the last\n"
        f"prefill  {made.prefill}\n"
        f"decode   {made.decode}\n"
        f"{_kv(made.decode.model)}\n"
        f"{_links(made)}"
    )


def _kv(model: ModelShape) -> str:
    """Bytes of the whole model's cache."""
    nbytes, size = model.token_bytes, model.item_nbytes
    parts = [f"{nbytes.full + nbytes.windows:,.10g} bytes a token"]
    if nbytes.windows and nbytes.full:
        shares = f"{nbytes.full:,.10g} in full attention, {nbytes.windows:,.10g} in windows"
        parts[0] += f" ({shares})"
    if nbytes.states:
        parts.append(f"{nbytes.states:,} bytes of states a request")
    numbers = "rows of the model's own format" if size is None else f"{8 * size} bits a number"
    if model.asked_by:
        numbers += f" ({model.stored_as}, as {model.asked_by} asks)"
    return f"KV       {'; '.join([*parts, f'{model.kv_dtype}: {numbers}'])}"


def _menu(made: Forecast, width: int | None) -> str:
    """The same pull over every link that has a name; a ``~`` marks what is assumed."""
    headings = [
        "link", "GB/s\na rank", "us\na run", "round trip\nus", "ms", "requests\na second", "set by",
    ]  # fmt: skip
    rows = []
    for link in PRESETS:
        over = made.over(link)
        rows.append([
            link.name,
            _marked(link, "bytes_per_s", f"{link.bytes_per_s / 1e9:,.4g}"),
            _marked(link, "descriptor_s", f"{link.descriptor_s * 1e6:g}"),
            _marked(link, "round_trip_s", f"{link.round_trip_s * 1e6:g}")
            if link.round_trip_s
            else "-",
            f"{1e3 * over.seconds:,.2f}",
            f"{over.requests_per_s:,.1f}",
            f"{over.slowest.side} rank {over.slowest.rank}",
        ])  # fmt: skip
    return f"{table(headings, rows, width)}\n\n~ assumed, not measured"


def _marked(link: Link, field: str, number: str) -> str:
    return f"~{number}" if field in link.assumed else number


def _links(made: Forecast) -> str:
    link, theirs = made.link, made.prefill_link
    run = f"{link.descriptor_s * 1e6:g} us a run"
    if made.latency_s:
        run += f", {made.latency_s * 1e6:g} us for {ROUND_TRIPS} round trips"
    if theirs == link:
        return (
            f"link     {link.name}: {link.bytes_per_s / 1e9:g} GB/s a rank, {run} ({link.source})"
        )
    return (
        f"links    prefill {theirs.name}: {theirs.bytes_per_s / 1e9:g} GB/s a rank; "
        f"decode {link.name}: {link.bytes_per_s / 1e9:g} GB/s a rank, {run} ({link.source})"
    )


def _verdict(made: Forecast) -> str:
    clipped = made.total.clipping
    saved = f"; windows save a factor of {clipped:.1f}" if clipped > 1 else ""
    state = made.total.state
    of_states = f"; {state / 1e6:,.3f} MB are states, for a prompt of any length" if state else ""
    slowest = made.slowest
    by = f"{slowest.side} rank {slowest.rank}"
    rate = f"; {made.requests_per_s:,.1f} such requests a second"
    return f"predicted: {1e3 * made.seconds:,.2f} ms, set by {by}{rate}{saved}{of_states}"


def _amounts(cost: Cost) -> list[str]:
    return [
        f"{cost.runs:,}",
        f"{cost.nbytes / 1e6:,.3f}",
        f"{cost.mean_run_nbytes / 1024:,.1f}",
        f"{cost.saved_by_window / 1e6:,.3f}",
        f"{cost.saved_by_hits / 1e6:,.3f}",
    ]


def _kind(kind: AttentionKind) -> str:
    """The kind's name; vLLM calls every state by one sort of them."""
    return "state" if kind is AttentionKind.STATE else str(kind).removesuffix("_attention")


def _numbers(ranks: tuple[int, ...]) -> str:
    """``0-3`` for consecutive ranks."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) or "-"


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


def _prefill_link(text: str | None) -> Link | None:
    try:
        return None if text is None else parse_link(text)
    except ShapeError as error:
        raise error.of("prefill-") from error


def _engine(option: str, text: str, model: ModelShape) -> EngineShape:
    try:
        return parse_engine(text, model)
    except ShapeError as error:
        raise error.of(f"{option} ") from error


def _model(given: str, dtype: str) -> ModelShape:
    """From a file or folder if it exists, else a built-in shape."""
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    elif not path.is_file():
        return in_kv_dtype(built_in(given), dtype)
    config, beside = _json(path), path.with_name(BESIDE)
    is_folders = path.name == "config.json"
    name = path.resolve().parent.name if is_folders else path.stem
    # vLLM reads it of the folder: beside another file it may belong to another model.
    quantization = _json(beside) if is_folders and beside.is_file() else None
    try:
        return model_shape(config, name, quantization, dtype)
    except ShapeError as error:
        raise error.of(f"{path} ") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnreadableConfig(str(path), "JSON", error) from error


def _listing(width: int | None) -> str:
    rows = [
        [
            shape.name,
            str(len(sort.layers)),
            str(sort.kind).removesuffix("_attention"),
            str(sort.window or "-"),
            str(sort.heads),
            str(sort.row_nbytes),
            str(sort.row_tokens),
            str(sort.block_tokens or "-"),
        ]
        for shape in SHAPES
        for sort in shape.attention
    ]
    headings = [
        "model", "layers", "kind", "window", "KV heads", "bytes a row\nand head", "tokens\na row",
        "block\n(fixed)",
    ]  # fmt: skip
    families = f"a config.json is read if its model_type is one of {', '.join(FAMILIES)}"
    return f"{table(headings, rows, width)}\n\n{fill(families, min(100, width or 100))}"
