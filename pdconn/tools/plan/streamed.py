"""A pull that begins while prefill computes the prompt (``--streams``), and what shows of it.

Prefill computes the prompt in steps of ``chunk_tokens``.  Decode reads the blocks of full attention
that a step has filled as soon as that step is over and the read before has ended; windows, states
and the last partial block come with the ticket, after the last step::

    steps     ├────1────┼────2────┼───3───┤
    reads               ├──1──┤   ├──2──┤ ├──3 and the rest──┤
                                          └──── visible ─────┘

Each read takes its share of the time that :mod:`pdconn.tools.plan.forecast` predicts for the whole
pull.  The claim is granted before the last step, so two of the three round trips remain after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pdconn.tools.plan.forecast import Forecast
from pdconn.tools.plan.link import ROUND_TRIPS
from pdconn.tools.plan.plan_errors import ShapeError
from registration.references import AttentionKind

CHUNK_TOKENS = 8192
"""``max_num_batched_tokens`` of vLLM's API server on an H100 or H200 (0.32, 0.33)."""


@dataclass(frozen=True, slots=True)
class StreamedForecast:
    """One pull that follows prefill's request.

    Attributes:
        prefill_s: seconds that prefill computes.
        visible_s: seconds from prefill's last step to the end of the pull.
        early_bytes: bytes that all ranks have read when the last step is over.
        reads: reads after one another; each is of what was filled since the one before began.
    """

    prefill_rate: float
    chunk_tokens: int
    prefill_s: float
    visible_s: float
    early_bytes: int
    reads: int


def forecast_streamed(
    made: Forecast, prefill_rate: float, chunk_tokens: int = CHUNK_TOKENS
) -> StreamedForecast:
    """Predict what remains of a pull after prefill's last step.

    Args:
        made: the same pull after prefill has answered.
        prefill_rate: tokens per second that prefill computes.  It computes the whole prompt, as the
            forecast assumes.
        chunk_tokens: tokens of a step, if the engine computes nothing else.

    Raises:
        ShapeError: a rate or a chunk that is not above 0.
    """
    if not (math.isfinite(prefill_rate) and prefill_rate > 0):
        raise ShapeError("prefill-rate", "tokens per second, above 0", prefill_rate)
    if chunk_tokens < 1:
        raise ShapeError("chunk", "at least 1 token", chunk_tokens)
    full = [one for one in made.groups if one.group.kind is AttentionKind.FULL]
    full_s = sum(map(made.seconds_of, full))
    block = max((one.their_block_tokens for one in full), default=1)
    prefill_s = made.prompt_tokens / prefill_rate
    pulled_from = made.hit_tokens // block * block
    pulled = -(-(made.prompt_tokens - 1) // block) * block - pulled_from
    ended_s, read, reads, carried = 0.0, pulled_from, 0, 0.0
    for computed in _steps(made.prompt_tokens, chunk_tokens):
        written = computed // block * block
        if not full or written <= read:
            continue
        took_s, over_s = full_s * (written - read) / pulled, computed / prefill_rate
        reads += over_s >= ended_s  # else it is read with what the steps before have filled
        start_s = max(ended_s, over_s)
        carried += min(took_s, max(0.0, prefill_s - start_s))
        ended_s, read = start_s + took_s, written
    early_s = full_s * (read - pulled_from) / pulled
    rest_s = made.slowest.seconds - early_s
    last_s = max(ended_s, prefill_s) + rest_s + made.latency_s * (ROUND_TRIPS - 1) / ROUND_TRIPS
    nbytes = sum(one.cost.nbytes for one in full) * (carried / full_s if full_s else 0.0)
    visible_s = last_s - prefill_s
    return StreamedForecast(
        prefill_rate, chunk_tokens, prefill_s, visible_s, round(nbytes), reads + 1
    )


def _steps(prompt_tokens: int, chunk_tokens: int) -> Iterator[int]:
    """Tokens that are computed after each step but the last."""
    return iter(range(chunk_tokens, prompt_tokens, chunk_tokens))
