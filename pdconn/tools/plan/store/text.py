"""What ``pdconn plan --store`` prints."""

from __future__ import annotations

from pdconn.tools.plan.store.cost import LONGEST_TOKENS, StoreForecast

_MIB = 1 << 20


def render_store(made: StoreForecast) -> str:
    """A few lines: what is kept, what is loaded, and from where on that pays."""
    lines = [
        ("store", f"a prompt of {made.prompt_tokens:,} tokens, rows of {_block(made):,}"),
        ("FA", f"{made.fa_rows:,} rows of {_mib(made.fa_row_nbytes)}: {_mib(made.fa_nbytes)}"),
        ("WA", _windows(made)),
        ("together", f"{_mib(made.nbytes)}, {_per_token(made)} KiB a token"),
        ("load", _load(made)),
        ("break-even", _break_even(made)),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


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
    """How far a rank's staging carries this prompt, and what carries all of it."""
    there, needed = _mib(made.staging), _mib(made.staging_nbytes)
    if made.staging_nbytes <= made.staging:
        return f"{needed} a rank; {there} are enough"
    least = f"staging: {-(-made.staging_nbytes // _MIB)}MiB"
    return f"{there} a rank carry {made.staged_tokens:,} tokens; all take {needed} ({least})"


def _break_even(made: StoreForecast) -> str:
    if made.prefill_rate is None:
        return "unknown: give --prefill-rate, the tokens per second that prefill computes"
    speed = f"at {made.prefill_rate:,.0f} tokens/s of prefill"
    if made.break_even is None:
        return f"none up to {LONGEST_TOKENS:,} tokens: computing is faster {speed}"
    return f"from {made.break_even:,} tokens on loading is faster, {speed}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.2f} MiB"
