"""Warnings about a pairing: the cause of a slow pull, and a faster alternative.

Causes are computed: one property at a time is changed (a side's layout, the block sizes) and the
pull is forecast again.  If it becomes faster, the property is a cause, and the warning gives the
factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

from pdconn.tools.plan.engine_shape import KERNEL_BLOCK_TOKENS, MAX_BLOCK_TOKENS, EngineShape
from pdconn.tools.plan.forecast import Forecast, forecast
from registration.references import AttentionKind

SMALL_RUN_NBYTES = 16 << 10
SLOW_SHARE = 1 / 3
_NOTABLE = 1.1


@dataclass(frozen=True, slots=True)
class Advice:
    """One warning: ``code`` is its kind for programs, ``text`` is the message."""

    code: str
    text: str


def advise(made: Forecast) -> tuple[Advice, ...]:
    """All warnings about ``made``."""
    return tuple(advice for rule in _RULES for advice in rule(made))


def _slow_runs(made: Forecast) -> Iterator[Advice]:
    """Many small runs whose descriptors cost more than a third of the time."""
    busiest = made.busiest
    if not is_slow(made):
        return
    share = busiest.runs * made.link.descriptor_s / made.seconds
    causes = list(_causes(made))
    cause = f"Cause: {'; '.join(causes)}. " if causes else ""
    yield Advice(
        "slow-runs",
        f"runs of {_nbytes(busiest.mean_run_nbytes)} on average: {share:.0%} of the time goes "
        f"to {busiest.runs:,} descriptors. {cause}{_remedy(made)}",
    )


def is_slow(made: Forecast) -> bool:
    """Whether descriptors of small runs dominate the time of the slowest decode rank."""
    cost = made.busiest.runs * made.link.descriptor_s
    small = 0 < made.busiest.mean_run_nbytes < SMALL_RUN_NBYTES
    return small and made.slowest.side == "decode" and cost > SLOW_SHARE * made.seconds


def _again(made: Forecast, prefill: EngineShape, decode: EngineShape) -> float:
    """Predicted seconds between two other engines, all else equal."""
    return forecast(
        prefill,
        decode,
        made.prompt_tokens,
        made.hit_tokens,
        made.link,
        prefill_link=made.prefill_link,
        ids=made.ids,
        seed=made.seed,
    ).seconds


def _causes(made: Forecast) -> Iterator[str]:
    """The causes of a slow pull: properties that alone make the best pairing slow."""
    prefill, decode = made.prefill, made.decode
    best = _equal_blocks(*_best_layouts(made))
    slow = _NOTABLE * _again(made, *best)
    for name, engine, changed in (
        ("prefill", prefill, (replace(best[0], layout=prefill.layout), best[1])),
        ("decode", decode, (best[0], replace(best[1], layout=decode.layout))),
    ):
        if _again(made, *changed) > slow:
            yield f"{name}'s layout {engine.layout} {_scattered(engine.layout)}"
    theirs, ours = prefill.attention_block_tokens, decode.attention_block_tokens
    if theirs != ours and _again(made, *_best_layouts(made)) > slow:
        yield (
            f"unequal blocks, theirs {theirs} and ours {ours} "
            "tokens, move in pieces of their common divisor"
        )
    if _again(made, replace(prefill, tp=decode.tp), decode) * _NOTABLE < made.seconds:
        heads = max((sort.heads for sort in prefill.model.attention), default=1)
        held, taken = (max(1, heads // engine.tp) for engine in (prefill, decode))
        larger = "prefill" if held > taken else "decode"
        yield (
            f"heads move in slices, {min(held, taken)} of the {max(held, taken)} on a rank "
            f"of {larger}"
        )


def _scattered(layout: str) -> str:
    """What a layout does to the bytes of one block.

    >>> _scattered("BLNHC")
    'keeps a head of each token apart'
    """
    if layout.index("N") < layout.index("H"):
        return "keeps a head of each token apart"
    if layout[0] == "L":
        return "keeps each layer of a block apart"
    return "keeps a head of each layer apart"


def _remedy(made: Forecast) -> str:
    """The change with the largest effect, and the effect."""
    found = [(_again(made, *engines), words) for words, *engines in _changes(made)]
    if not found:
        return ""
    seconds, words = min(found, key=lambda one: one[0])
    if seconds * _NOTABLE > made.seconds:
        return "No other layout or block size makes it much faster."
    return (
        f"With {words}: {_ms(seconds)} instead of {_ms(made.seconds)}, "
        f"{made.seconds / seconds:.1f} times faster."
    )


def _changes(made: Forecast) -> Iterator[tuple[str, EngineShape, EngineShape]]:
    """Simple changes first: a later one is preferred only if it is faster."""
    prefill, decode = made.prefill, made.decode
    best = _best_layouts(made)
    layout = best[1].layout
    theirs, ours = prefill.attention_block_tokens, decode.attention_block_tokens
    if (prefill, decode) != best:
        yield f"{layout} on both sides", *best
    if theirs != ours:
        size = _served(max(theirs, ours))
        yield f"blocks of {size} tokens on both sides", *_equal_blocks(prefill, decode)
        if (prefill, decode) != best:
            yield f"{layout} and blocks of {size} tokens on both sides", *_equal_blocks(*best)
    elif (prefill, decode) == best:
        short = Fraction(SMALL_RUN_NBYTES) / Fraction(made.busiest.mean_run_nbytes)
        size = _served(theirs)
        while size < theirs * short and size * 2 <= MAX_BLOCK_TOKENS:
            size *= 2
        larger = replace(prefill, block_tokens=size), replace(decode, block_tokens=size)
        yield f"blocks of {size} tokens on both sides", *larger


def _served(block_tokens: int) -> int:
    """The next block size that attention kernels support.

    >>> _served(16), _served(17)
    (16, 32)
    """
    return -(-block_tokens // KERNEL_BLOCK_TOKENS) * KERNEL_BLOCK_TOKENS


def _best_layouts(made: Forecast) -> tuple[EngineShape, EngineShape]:
    """Both engines in the layout with the fewest pieces."""
    return made.prefill.in_best_layout(), made.decode.in_best_layout()


def _equal_blocks(prefill: EngineShape, decode: EngineShape) -> tuple[EngineShape, EngineShape]:
    size = _served(max(prefill.attention_block_tokens, decode.attention_block_tokens))
    return replace(prefill, block_tokens=size), replace(decode, block_tokens=size)


def _partial_hit(made: Forecast) -> Iterator[Advice]:
    """A block that is cached in part is pulled from the start of its sub-block."""
    for group in made.groups:
        ours, hit = group.group.block_tokens, made.hit_tokens
        if group.group.kind is AttentionKind.FULL and hit % ours:
            again = hit % gcd(ours, group.their_block_tokens)
            yield Advice(
                "partial-hit",
                f"a hit of {hit} tokens ends inside a block of {ours} tokens: the last "
                f"{again} are pulled again, and vLLM itself only hits whole blocks",
            )
            return


def _idle_windows(made: Forecast) -> Iterator[Advice]:
    windows = [group.group.window for group in made.groups if group.group.window is not None]
    if windows and not made.total.saved_by_window:
        yield Advice(
            "idle-windows",
            f"windows of {max(windows)} tokens save nothing on a prompt of "
            f"{made.prompt_tokens} tokens: all of it lies inside them",
        )


def _replicas(made: Forecast) -> Iterator[Advice]:
    """A warning about heads that several decode ranks hold: they move once per rank."""
    tp = made.decode.tp
    heads = sorted({sort.heads for sort in made.decode.model.attention if sort.heads < tp})
    if heads:
        what = "one head (or latent)" if heads[0] == 1 else f"{heads[0]} heads"
        yield Advice(
            "replicated-heads",
            f"decode's {tp} tensor-parallel ranks keep {tp // heads[0]} copies of {what}: "
            f"the same bytes move {tp // heads[0]} times",
        )


def _busy_source(made: Forecast) -> Iterator[Advice]:
    """A warning about fan-out: a prefill rank sends more than any decode rank reads."""
    slowest = made.slowest
    if slowest.side == "prefill":
        sent = made.sent[slowest.rank]
        most = max(cost.nbytes for cost in made.received)
        yield Advice(
            "busy-source",
            f"prefill rank {slowest.rank} sends {sent / 1e6:,.1f} MB, {sent / most:.1f} times what "
            "any decode rank reads: a faster link there (--prefill-link), or more ranks on "
            "prefill, would make the pull faster",
        )


def _raised_blocks(made: Forecast) -> Iterator[Advice]:
    """A warning about blocks that vLLM enlarges so that a page of attention holds a state."""
    for side, engine in (("prefill", made.prefill), ("decode", made.decode)):
        raised, asked = engine.attention_block_tokens, engine.block_tokens
        if raised != asked:
            yield Advice(
                "raised-blocks",
                f"{side}'s blocks are of {raised} tokens, not {asked}: vLLM raises them until a "
                f"page of attention holds a state, here of {_nbytes(engine.state_nbytes)} a layer; "
                f"its prefix hits end at multiples of {raised} tokens",
            )


def _mostly_states(made: Forecast) -> Iterator[Advice]:
    """A warning about short prompts, whose states are most of the bytes."""
    if 2 * made.total.state > made.total.nbytes:
        share = made.total.state / made.total.nbytes
        yield Advice(
            "mostly-states",
            f"{share:.0%} of the bytes are states, which move whole for a prompt of any length "
            "and whatever is cached: short prompts gain least from being handed over",
        )


_RULES = (
    _slow_runs, _partial_hit, _idle_windows, _replicas, _busy_source, _raised_blocks,
    _mostly_states,
)  # fmt: skip


def _nbytes(number: float) -> str:
    return f"{number:,.0f} B" if number < 1024 else f"{number / 1024:,.1f} KiB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
