"""What stores of several capacities save of a trace, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdconn.store.format.row import RowKind
from pdconn.tools.output.columns import Column, document, text_table
from pdconn.tools.output.units import binary_size, grouped, known
from pdconn.tools.plan.store.curve import Curve, CurvePoint

_Counted = Column[CurvePoint]

ENOUGH_POINTS = 1.0
"""The smallest capacity that hits at most so many points less than the best one is enough."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What was simulated.

    Attributes:
        requests, prompt_tokens: of the whole trace.
        lines, skipped: of the file; lines without a request.
        engine_tokens: of the engines' own cache.
        save: what the store saves.
        prefill_rate: tokens per second that prefill computes; None if unknown.
    """

    path: str
    requests: int
    prompt_tokens: int
    lines: int
    skipped: int
    engine_tokens: int
    save: str
    prefill_rate: float | None


@dataclass(frozen=True, slots=True)
class CurveReport:
    """A curve, and the trace that it is of."""

    curve: Curve
    trace: TraceSummary

    @property
    def enough(self) -> CurvePoint:
        """The point of the smallest capacity that is enough."""
        share = self.curve.hit_share
        best = max(share(point) for point in self.curve.points)
        return next(p for p in self.curve.points if 100 * (best - share(p)) <= ENOUGH_POINTS)

    def text(self, width: int | None = None) -> str:
        """Two lines, the table, and the capacity that is enough."""
        curve, trace = self.curve, self.trace
        skipped = f"; {trace.skipped:,} lines or events skipped" if trace.skipped else ""
        lines = [
            f"trace      {trace.path}: {trace.requests:,} requests, {trace.prompt_tokens:,} "
            f"prompt tokens{skipped}",
            *self._sampled(),
            f"engines    hold {100 * curve.held_share:.1f} % of them in their own cache",
            "",
            text_table(self._columns(), curve.points, width),
            "",
            f"enough     {binary_size(self.enough.capacity)}: within {ENOUGH_POINTS:g} point of "
            "the best one here",
        ]
        if trace.prefill_rate is None:
            lines.append("seconds    unknown: give --prefill-rate")
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Bytes, counts, shares and seconds, not rounded."""
        curve, trace = self.curve, self.trace
        return {
            "trace": trace.path,
            "lines": trace.lines,
            "skipped": trace.skipped,
            "requests": trace.requests,
            "prompt_tokens": trace.prompt_tokens,
            "simulated_requests": curve.requests,
            "simulated_prompt_tokens": curve.prompt_tokens,
            "engine_cache_tokens": trace.engine_tokens,
            "held_tokens": self._whole(curve.held_tokens),
            "held_share": curve.held_share,
            "save": trace.save,
            "prefill_tokens_per_s": trace.prefill_rate,
            "enough_bytes": self.enough.capacity,
            "capacities": [document(self._columns(), point) for point in curve.points],
        }

    def _sampled(self) -> list[str]:
        part = self.curve.part
        if part == 1:
            return []
        return [
            f"sample     {self.curve.requests:,} requests, on {100 * part:.2g} % of each capacity; "
            "the numbers are for all"
        ]

    def _whole(self, of_sample: float) -> int:
        """A number of the whole trace, from that of the simulated requests."""
        simulated = self.curve.prompt_tokens
        return round(of_sample * self.trace.prompt_tokens / simulated) if simulated else 0

    def _columns(self) -> tuple[Column[CurvePoint], ...]:
        share, whole = self.curve.hit_share, self._whole

        def seconds(point: CurvePoint) -> float | None:
            if point.saved_s is None or not self.curve.prompt_tokens:
                return None
            return point.saved_s * self.trace.prompt_tokens / self.curve.prompt_tokens

        def counted(heading: str | None, key: str, value: Callable[[CurvePoint], int]) -> _Counted:
            return Column(heading, key, lambda point: whole(value(point)), grouped)

        return (
            Column("capacity", "bytes", lambda point: point.capacity, binary_size),
            Column("% of tokens\nloaded", "hit_share", share, lambda part: f"{100 * part:.1f}"),
            counted("tokens\nloaded", "hit_tokens", lambda point: point.counts.hit_tokens),
            counted("loads", "hits", lambda point: point.counts.hits),
            Column("seconds\nsaved", "saved_s", seconds, known("{:,.0f}".format)),
            counted("rows\nsaved", "rows_saved", lambda point: point.counts.saved),
            counted("rows\nevicted", "rows_evicted", lambda point: point.counts.evicted),
            counted(None, "rows_skipped", lambda point: point.counts.skipped),
            counted(None, "fa_rows_loaded", lambda point: point.counts.loaded[RowKind.FA]),
            counted(None, "wa_rows_loaded", lambda point: point.counts.loaded[RowKind.WA]),
        )
