"""A fleet's ratios as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdconn.tools.output.table import table
from pdconn.tools.plan.fleet.fleet_forecast import FleetForecast, RatioGoodput

SHOWN = 12
"""Rows of the table: around the best ratios."""


@dataclass(frozen=True, slots=True)
class FleetForecastReport:
    """What each ratio of prefill and decode engines serves within the targets."""

    made: FleetForecast

    def text(self, width: int | None = None) -> str:
        """The table of ratios, the best ones, and what following gives."""
        made = self.made
        return "\n\n".join((self._header(), self._table(width), "\n".join(self._best(made))))

    def _header(self) -> str:
        question, rates = self.made.question, self.made.rates
        phases = "\n".join(
            f"phase {number}: {one.requests_per_s:g} requests/s of {one.prompt_tokens:,} and "
            f"{one.answer_tokens:,} tokens for {one.seconds:g} s"
            for number, one in enumerate(question.phases, start=1)
        )
        targets = question.targets
        return (
            f"A fleet of {question.engines} engines, simulated, on this load:\n{phases}\n"
            f"targets: first token in {targets.ttft_s:g} s, {1e3 * targets.itl_s:g} ms between "
            f"tokens\nan engine prefills {rates.prefill_tokens_per_s:,.0f} tokens/s; a step "
            f"takes "
            f"{1e3 * rates.step_s:g} ms and {1e3 * rates.stream_s:.3g} ms more for each further "
            f"stream, up to {rates.most_streams}; a pull {1e3 * rates.pull_s:.3g} ms"
        )

    def _table(self, width: int | None) -> str:
        made = self.made
        phases = range(len(made.question.phases))
        best = [made.best_of(phase).prefill for phase in phases] + [made.best_single.prefill]
        near = sorted(made.ratios, key=lambda one: min(abs(one.prefill - n) for n in best))
        shown = sorted(near[:SHOWN], key=lambda one: one.prefill)
        heads = ["prefill", "decode", *(f"phase {n + 1}\nwithin targets" for n in phases), "all"]
        rows = [
            [
                str(one.prefill),
                str(made.question.engines - one.prefill),
                *(f"{share:.1%}" for share in one.shares),
                f"{made.share_of(one):.1%}",
            ]
            for one in shown
        ]
        return table(heads, rows, width)

    def _best(self, made: FleetForecast) -> list[str]:
        lines = []
        for number, phase in enumerate(made.question.phases):
            best = made.best_of(number)
            good = best.shares[number] * phase.requests_per_s
            lines.append(
                f"phase {number + 1}: {self._ratio(best)}, {good:.3g} of "
                f"{phase.requests_per_s:g} requests/s within targets"
            )
        single = made.best_single
        lines.append(f"one ratio for all: {self._ratio(single)}, {made.share_of(single):.1%}")
        lines.append(
            f"roles that follow the load (pdconn proxy --roles follow): {made.followed_share:.1%}, "
            f"changes: {len(made.followed.moves)}, at most one a "
            f"{made.question.targets.period_s:g} s"
        )
        return lines

    def _ratio(self, one: RatioGoodput) -> str:
        return f"{one.prefill} prefill and {self.made.question.engines - one.prefill} decode"

    def document(self) -> dict[str, Any]:
        """Shares are of requests; goodput is in requests per second."""
        made = self.made
        question, rates = made.question, made.rates
        return {
            "engines": question.engines,
            "ttft_target_s": question.targets.ttft_s,
            "itl_target_s": question.targets.itl_s,
            "rates": {
                "prefill_tokens_per_s": rates.prefill_tokens_per_s,
                "step_s": rates.step_s,
                "stream_s": rates.stream_s,
                "most_streams": rates.most_streams,
                "pull_s": rates.pull_s,
            },
            "phases": [self._phase_document(number) for number in range(len(question.phases))],
            "ratios": [
                {
                    "prefill": one.prefill,
                    "decode": question.engines - one.prefill,
                    "shares": list(one.shares),
                    "share": made.share_of(one),
                }
                for one in made.ratios
            ],
            "best_single": {
                "prefill": made.best_single.prefill,
                "share": made.share_of(made.best_single),
            },
            "followed": {
                "share": made.followed_share,
                "shares": [one.good / max(1, one.offered) for one in made.followed.phases],
                "changes": len(made.followed.moves),
                "unended": made.followed.unended,
            },
        }

    def _phase_document(self, number: int) -> dict[str, Any]:
        made = self.made
        phase, best = made.question.phases[number], made.best_of(number)
        return {
            "seconds": phase.seconds,
            "requests_per_s": phase.requests_per_s,
            "prompt_tokens": phase.prompt_tokens,
            "answer_tokens": phase.answer_tokens,
            "best_prefill": best.prefill,
            "best_share": best.shares[number],
            "goodput_per_s": best.shares[number] * phase.requests_per_s,
        }
