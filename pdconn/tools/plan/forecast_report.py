"""A forecast as text and as JSON.  The document has bytes, counts and seconds, not rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from pdconn.tools.output.columns import Column, cells, document, headings, of_part
from pdconn.tools.output.table import table
from pdconn.tools.output.units import grouped, scaled
from pdconn.tools.plan.advice import Advice
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.fleet.fleet_forecast import FleetForecast
from pdconn.tools.plan.fleet.fleet_forecast_report import FleetForecastReport
from pdconn.tools.plan.forecast import Cost, Forecast, GroupForecast
from pdconn.tools.plan.link import PRESETS, ROUND_TRIPS, Link
from pdconn.tools.plan.model_shape import ModelShape
from pdconn.tools.plan.store.cost import StoreForecast
from pdconn.tools.plan.store.curve_report import CurveReport
from pdconn.tools.plan.store.store_forecast_report import StoreForecastReport
from pdconn.tools.plan.streamed import StreamedForecast
from registration.references import AttentionKind

_COST: tuple[Column[Cost], ...] = (
    Column(None, "bytes", lambda cost: cost.nbytes),
    Column("runs", "runs", lambda cost: cost.runs, grouped),
    Column("MB", None, lambda cost: cost.nbytes, scaled(1e-6, ",.3f")),
    Column(
        "KiB\nper run",
        "mean_run_bytes",
        lambda cost: cost.mean_run_nbytes,
        scaled(1 / 1024, ",.1f"),
    ),
    Column(None, "state_bytes", lambda cost: cost.state),
    Column(
        "MB not moved:\nwindows",
        "saved_by_window_bytes",
        lambda cost: cost.saved_by_window,
        scaled(1e-6, ",.3f"),
    ),
    Column(
        "MB not moved:\nprefix hits",
        "saved_by_hits_bytes",
        lambda cost: cost.saved_by_hits,
        scaled(1e-6, ",.3f"),
    ),
)


@dataclass(frozen=True)
class ForecastReport:
    """A pull between two engines, and the cost of its prompt in a store if requested."""

    made: Forecast
    advice: Sequence[Advice]
    stored: StoreForecast | None = None
    streamed: StreamedForecast | None = None
    curve: CurveReport | None = None
    fleet: FleetForecast | None = None

    def text(self, width: int | None = None) -> str:
        """The tables, the totals and the warnings."""
        made = self.made
        verdict = _verdict(made)
        if self.streamed is not None:
            verdict += f"\n{_streamed(made, self.streamed)}"
        parts = [_header(made), _groups(made, width), verdict, _menu(made, width)]
        parts += [f"warning ({one.code}): {one.text}" for one in self.advice]
        text = "\n\n".join(part if width is None else _folded(part, width) for part in parts)
        if self.stored is not None:
            text = f"{text}\n\n{StoreForecastReport(self.stored).text(width)}"
        if self.curve is not None:
            text = f"{text}\n\n{self.curve.text(width)}"
        if self.fleet is None:
            return text
        ratios = FleetForecastReport(self.fleet).text(width)
        return f"{text}\n\n{ratios if width is None else _folded(ratios, width)}"

    def document(self) -> dict[str, Any]:
        """``total`` is the sum of ``groups`` and of ``ranks``."""
        made = self.made
        found = {
            "model": made.decode.model.name,
            "kv": kv_document(made.decode.model),
            "prompt_tokens": made.prompt_tokens,
            "hit_tokens": made.hit_tokens,
            "pulled_until": made.prompt_tokens - 1,
            "ids": made.ids,
            "prefill": _engine_document(made.prefill),
            "decode": _engine_document(made.decode),
            "link": document(_LINK, made.link),
            "prefill_link": document(_LINK, made.prefill_link),
            "groups": [document(_group_columns(made), group) for group in made.groups],
            "ranks": [_cost_document(cost, made.link) for cost in made.received],
            "sent_bytes": list(made.sent),
            "total": {**document(_COST, made.total), "clipping": made.total.clipping},
            "busiest": {"rank": made.busiest_rank, **_cost_document(made.busiest, made.link)},
            "seconds": made.seconds,
            "latency_s": made.latency_s,
            "requests_per_s": made.requests_per_s,
            "links": [
                {**document(_LINK, over.link), **document(_OVER, over)} for over in _menu_of(made)
            ],
            "slowest": {"side": made.slowest.side, "rank": made.slowest.rank},
            "warnings": [{"code": one.code, "text": one.text} for one in self.advice],
        }
        if self.streamed is not None:
            found["streamed"] = document(_STREAMED, self.streamed)
        if self.stored is not None:
            found["store"] = StoreForecastReport(self.stored).document()
        if self.curve is not None:
            found["store_curve"] = self.curve.document()
        if self.fleet is not None:
            found["fleet"] = FleetForecastReport(self.fleet).document()
        return found


def kv_document(model: ModelShape) -> dict[str, Any]:
    """Bytes per token of the whole model; ``state_bytes`` per request."""
    nbytes = model.token_bytes
    return {
        "dtype": model.kv_dtype,
        "resolved_dtype": model.stored_as,
        "bytes_per_token": nbytes.full + nbytes.windows,
        "full_attention_bytes_per_token": nbytes.full,
        "window_bytes_per_token": nbytes.windows,
        "state_bytes": nbytes.states,
    }


def _engine_document(engine: EngineShape) -> dict[str, Any]:
    return {
        "tp": engine.tp,
        "pp": engine.pp,
        "layout": engine.layout,
        "block_tokens": engine.block_tokens,
    }


def _cost_document(cost: Cost, link: Link) -> dict[str, Any]:
    return {**document(_COST, cost), "seconds": cost.pull_seconds(link)}


# --- KV cache groups ----------------------------------------------------------------------


def _group_columns(made: Forecast) -> list[Column[GroupForecast]]:
    return [
        *_GROUP,
        *of_part(_COST, lambda one: one.cost),
        Column(
            None,
            "busiest",
            lambda one: one.busiest,
            write=lambda busiest: _cost_document(busiest, made.link),
        ),
        Column("ms", "seconds", made.seconds_of, scaled(1e3, ",.3f")),
    ]


def _kind(kind: AttentionKind) -> str:
    """The kind's name; vLLM names every state after one kind of them."""
    return "state" if kind is AttentionKind.STATE else str(kind).removesuffix("_attention")


def _ranks(ranks: tuple[int, ...]) -> str:
    """``0-3`` for consecutive ranks."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) or "-"


_GROUP: tuple[Column[GroupForecast], ...] = (
    Column("group", "group", lambda one: one.number),
    Column("kind", "kind", lambda one: one.group.kind, _kind, str),
    Column("window", "window", lambda one: one.group.window, lambda window: str(window or "-")),
    Column("layers", "layers", lambda one: one.group.num_layers),
    Column("block\ntheirs", "their_block_tokens", lambda one: one.their_block_tokens),
    Column("block\nours", "our_block_tokens", lambda one: one.group.block_tokens),
    Column("prefill\nranks read", "sources", lambda one: one.sources, _ranks, list),
)


def _groups(made: Forecast, width: int | None) -> str:
    """One line per group, and the sums."""
    columns = _group_columns(made)
    rows = [cells(columns, one) for one in made.groups]
    blank = [""] * (len(headings(_GROUP)) - 1)
    ranks = made.decode.ranks
    total = "all" if ranks == 1 else f"all {ranks} ranks"
    rows.append([total, *blank, *cells(_COST, made.total), f"{1e3 * made.seconds:,.3f}"])
    if ranks > 1:
        rows.append([f"rank {made.busiest_rank}", *blank, *cells(_COST, made.busiest), ""])
    return table(headings(columns), rows, width)


# --- links --------------------------------------------------------------------------------

_LINK: tuple[Column[Link], ...] = (
    Column("link", "name", lambda link: link.name),
    Column(
        "GB/s\na rank",
        "bytes_per_s",
        lambda link: link,
        lambda link: _marked(link, "bytes_per_s", f"{link.bytes_per_s / 1e9:,.4g}"),
        lambda link: link.bytes_per_s,
    ),
    Column(
        "us\na run",
        "descriptor_s",
        lambda link: link,
        lambda link: _marked(link, "descriptor_s", f"{link.descriptor_s * 1e6:g}"),
        lambda link: link.descriptor_s,
    ),
    Column(
        "round trip\nus",
        "round_trip_s",
        lambda link: link,
        lambda link: (
            _marked(link, "round_trip_s", f"{link.round_trip_s * 1e6:g}")
            if link.round_trip_s
            else "-"
        ),
        lambda link: link.round_trip_s,
    ),
    Column(None, "source", lambda link: link.source),
    Column(None, "assumed", lambda link: sorted(link.assumed)),
)
_OVER: tuple[Column[Forecast], ...] = (
    Column("ms", "seconds", lambda over: over.seconds, scaled(1e3, ",.2f")),
    Column(
        "requests\na second", "requests_per_s", lambda over: over.requests_per_s, scaled(1, ",.1f")
    ),
    Column(
        "set by",
        "slowest",
        lambda over: over.slowest,
        lambda slowest: f"{slowest.side} rank {slowest.rank}",
        lambda slowest: {"side": slowest.side, "rank": slowest.rank},
    ),
)


def _menu_of(made: Forecast) -> list[Forecast]:
    """The same pull over every named link, on both sides."""
    return [made.over(link) for link in PRESETS]


def _menu(made: Forecast, width: int | None) -> str:
    """One line per named link; ``~`` marks assumed numbers."""
    rows = [[*cells(_LINK, over.link), *cells(_OVER, over)] for over in _menu_of(made)]
    found = table([*headings(_LINK), *headings(_OVER)], rows, width)
    return f"{found}\n\n~ assumed, not measured"


def _marked(link: Link, field: str, number: str) -> str:
    return f"~{number}" if field in link.assumed else number


# --- lines of text ------------------------------------------------------------------------


def _folded(text: str, width: int) -> str:
    """Prose folded at ``width``; tables already fit."""
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
        f"{_kv_line(made.decode.model)}\n"
        f"{_links(made)}"
    )


def _kv_line(model: ModelShape) -> str:
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


_STREAMED: tuple[Column[StreamedForecast], ...] = (
    Column(None, "prefill_rate", lambda one: one.prefill_rate),
    Column(None, "chunk_tokens", lambda one: one.chunk_tokens),
    Column(None, "prefill_seconds", lambda one: one.prefill_s),
    Column(None, "visible_seconds", lambda one: one.visible_s),
    Column(None, "early_bytes", lambda one: one.early_bytes),
    Column(None, "reads", lambda one: one.reads),
)


def _streamed(made: Forecast, streamed: StreamedForecast) -> str:
    early = streamed.early_bytes / made.total.nbytes
    return (
        f"followed: {1e3 * streamed.visible_s:,.2f} ms of it after prefill's last step; prefill "
        f"computes for {streamed.prefill_s:,.2f} s, and {early:.0%} of the bytes are read meanwhile"
    )


def _verdict(made: Forecast) -> str:
    clipped = made.total.clipping
    saved = f"; windows save a factor of {clipped:.1f}" if clipped > 1 else ""
    state = made.total.state
    of_states = f"; {state / 1e6:,.3f} MB are states, for a prompt of any length" if state else ""
    by = f"{made.slowest.side} rank {made.slowest.rank}"
    rate = f"; {made.requests_per_s:,.1f} such requests a second"
    return f"predicted: {1e3 * made.seconds:,.2f} ms, set by {by}{rate}{saved}{of_states}"
