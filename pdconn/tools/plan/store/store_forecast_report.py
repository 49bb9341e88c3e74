"""A prompt in a store, as text and as JSON: ``pdconn plan --store``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdconn.tools.output.columns import Column, cells, document, headings
from pdconn.tools.plan.store.cost import LONGEST_TOKENS, StoreForecast

_MIB = 1 << 20


@dataclass(frozen=True)
class StoreForecastReport:
    """What is kept and loaded, and the length from which that pays off."""

    made: StoreForecast

    def text(self, width: int | None = None) -> str:
        """A few lines; ignores ``width``."""
        names, values = headings(_STORE), cells(_STORE, self.made)
        return "\n".join(f"{name:<11}{value}" for name, value in zip(names, values, strict=True))

    def document(self) -> dict[str, Any]:
        """Bytes, counts and seconds, not rounded."""
        return document(_STORE, self.made)


def _block(made: StoreForecast) -> int:
    return made.layout.block_tokens


def _per_token(made: StoreForecast) -> str:
    kept = made.prompt_tokens // _block(made) * _block(made)
    return f"{made.nbytes / kept / 1024:,.1f}" if kept else "0"


def _windows(made: StoreForecast) -> str:
    if made.layout.wa is None:
        return "none: the model has no windows and no states"
    if made.every is None:
        where = "at the last boundary"
    else:
        where = f"every {made.every * _block(made):,} tokens and at the last boundary"
    return (
        f"{made.wa_rows:,} rows of {_mib(made.wa_row_nbytes)}: {_mib(made.wa_nbytes)}, "
        f"{100 * made.wa_share:.0f} % of all; {where}"
    )


def _load(made: StoreForecast) -> str:
    if not made.boundary:
        return f"nothing: a hit is at least {_block(made):,} tokens and leaves one to compute"
    text = (
        f"{made.boundary:,} tokens: {_mib(made.load_nbytes)} at {made.rate / 1e9:g} GB/s, "
        f"{1e3 * made.load_s:,.1f} ms"
    )
    if made.recompute_s is not None:
        text += f"; {1e3 * made.recompute_s:,.1f} ms to compute them"
    return f"{text}\n{'staging':<11}{_staging(made)}"


def _staging(made: StoreForecast) -> str:
    """The prompt length for which a rank's staging suffices, and the staging for all of it."""
    there, needed = _mib(made.staging.given_nbytes), _mib(made.staging.needed_nbytes)
    if made.staging.needed_nbytes <= made.staging.given_nbytes:
        return f"{needed} a rank; {there} are enough"
    least = f"staging: {-(-made.staging.needed_nbytes // _MIB)}MiB"
    return f"{there} a rank carry {made.staging.tokens:,} tokens; all take {needed} ({least})"


def _break_even(made: StoreForecast) -> str:
    if made.prefill_rate is None:
        return "unknown: give --prefill-rate, the tokens per second that prefill computes"
    speed = f"at {made.prefill_rate:,.0f} tokens/s of prefill"
    if made.break_even is None:
        return f"none up to {LONGEST_TOKENS:,} tokens: computing is faster {speed}"
    return f"from {made.break_even:,} tokens on loading is faster, {speed}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.2f} MiB"


_STORE: tuple[Column[StoreForecast], ...] = (
    Column(None, "block_tokens", lambda made: made.layout.block_tokens),
    Column(
        "store",
        "prompt_tokens",
        lambda made: made,
        lambda made: f"a prompt of {made.prompt_tokens:,} tokens, rows of {_block(made):,}",
        lambda made: made.prompt_tokens,
    ),
    Column(None, "engine", lambda made: str(made.engine)),
    Column(None, "boundary", lambda made: made.boundary),
    Column(
        None,
        "window_every_blocks",
        lambda made: None if made.layout.wa is None else made.every,
    ),
    Column(
        "FA",
        "fa",
        lambda made: made,
        lambda made: f"{made.fa_rows:,} rows of {_mib(made.fa_row_nbytes)}: {_mib(made.fa_nbytes)}",
        lambda made: _rows_document(made.fa_rows, made.fa_row_nbytes, made.fa_nbytes),
    ),
    Column(
        "WA",
        "wa",
        lambda made: made,
        _windows,
        lambda made: _rows_document(made.wa_rows, made.wa_row_nbytes, made.wa_nbytes),
    ),
    Column(
        "together",
        "bytes",
        lambda made: made,
        lambda made: f"{_mib(made.nbytes)}, {_per_token(made)} KiB a token",
        lambda made: made.nbytes,
    ),
    Column(None, "wa_share", lambda made: made.wa_share),
    Column("load", "load_bytes", lambda made: made, _load, lambda made: made.load_nbytes),
    Column(None, "staging_bytes", lambda made: made.staging.needed_nbytes),
    Column(None, "staging_given_bytes", lambda made: made.staging.given_nbytes),
    Column(None, "staging_tokens", lambda made: made.staging.tokens),
    Column(None, "store_bytes_per_s", lambda made: made.rate),
    Column(None, "load_s", lambda made: made.load_s),
    Column(None, "prefill_tokens_per_s", lambda made: made.prefill_rate),
    Column(None, "recompute_s", lambda made: made.recompute_s),
    Column(
        "break-even",
        "break_even_tokens",
        lambda made: made,
        _break_even,
        lambda made: made.break_even,
    ),
)


def _rows_document(rows: int, row_nbytes: int, nbytes: int) -> dict[str, int]:
    return {"rows": rows, "row_bytes": row_nbytes, "bytes": nbytes}
