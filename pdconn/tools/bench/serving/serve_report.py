"""The report of a run, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdconn.tools.bench.serving.replies import CompleteReply, Reply, TurnResult
from pdconn.tools.bench.serving.summary import (
    AnswerCheck,
    Bounds,
    Spread,
    Summary,
    check,
    summarise,
)
from pdconn.tools.bench.serving.turns import RunPlan
from pdconn.tools.output.columns import Column, document, text_table
from pdconn.tools.output.units import known, scaled


def _spread_columns(
    name: str, heading: str, read: Callable[[Summary], Spread | None]
) -> list[Column[Summary]]:
    """Median and 99th percentile: two columns, and one JSON object."""
    return [
        Column(
            f"{heading}\np50 ms", None, read, known(lambda spread: f"{1e3 * spread.p50_s:,.1f}")
        ),
        Column("\np99 ms", None, read, known(lambda spread: f"{1e3 * spread.p99_s:,.1f}")),
        Column(None, name, read, write=lambda spread: spread and asdict(spread)),
    ]


_SUMMARY: tuple[Column[Summary], ...] = (
    Column("", "contestant", lambda one: one.contestant),
    Column("requests", "requests", lambda one: one.requests),
    Column(None, "failed", lambda one: one.failed),
    Column(None, "wrong", lambda one: one.wrong),
    *_spread_columns("ttft", "TTFT", lambda one: one.ttft),
    *_spread_columns("itl", "ITL", lambda one: one.itl),
    *_spread_columns("handover", "handover", lambda one: one.handover),
    Column("within\nbounds", "met", lambda one: one.met),
    Column(None, "seconds", lambda one: one.seconds),
    Column("goodput\nper s", "goodput_per_s", lambda one: one.goodput, scaled(1, ".2f")),
    Column("all\nper s", "throughput_per_s", lambda one: one.throughput, scaled(1, ".2f")),
    Column("failed", None, lambda one: one.failed),
    Column("wrong", None, lambda one: one.wrong),
)

#: Above this share of other programs the report contains a remark.
NOTED = 0.1


@dataclass(frozen=True, slots=True)
class ServeReport:
    """One run: machine, time, plan, turns, and summary."""

    manifest: Mapping[str, object]
    plan: RunPlan
    bounds: Bounds
    turns: tuple[TurnResult, ...]
    reference: str
    answers: AnswerCheck
    summaries: tuple[Summary, ...]

    @classmethod
    def of_turns(
        cls,
        plan: RunPlan,
        bounds: Bounds,
        turns: Sequence[TurnResult],
        names: Sequence[str],
        reference: str,
        *,
        manifest: Mapping[str, object],
    ) -> ServeReport:
        """Summarise ``turns`` for ``names``; answers of ``reference`` count as right."""
        answers = check(turns, reference)
        summaries = tuple(summarise(name, turns, answers, bounds) for name in names)
        return cls(manifest, plan, bounds, tuple(turns), reference, answers, summaries)

    @property
    def is_good(self) -> bool:
        """Whether every request was answered as by the reference."""
        return not any(summary.failed or summary.wrong for summary in self.summaries)

    def text(self, width: int | None = None) -> str:
        """A heading, one row per contestant, and remarks on the answers."""
        plan, bounds = self.plan, self.bounds
        pace = (
            f"{plan.concurrency} at a time"
            if plan.rate is None
            else f"{plan.rate:g} a second at random times"
        )
        title = (
            f"{plan.prompt_tokens:,} tokens of prompt, {plan.output_tokens} of answer, {pace}, "
            f"{plan.rounds} rounds of {plan.requests}; bounds: {1e3 * bounds.ttft_s:g} ms to the "
            f"first token, {1e3 * bounds.itl_s:g} ms per token after it"
        )
        found = text_table(_SUMMARY, self.summaries, width)
        return "\n\n".join([title, found, "\n".join(_remarks(self))])

    def document(self) -> dict[str, Any]:
        """All results; times in seconds, those of a reply since its due time or sending."""
        return {
            "manifest": self.manifest,
            "plan": asdict(self.plan),
            "bounds": asdict(self.bounds),
            "reference": self.reference,
            "unchecked": len(self.answers.unchecked),
            "contestants": [document(_SUMMARY, one) for one in self.summaries],
            "turns": [self._turn_document(turn) for turn in self.turns],
        }

    def _turn_document(self, turn: TurnResult) -> dict[str, Any]:
        wrong = {
            one.prompt: one.difference
            for one in self.answers.wrong
            if (one.round_number, one.contestant) == (turn.round_number, turn.contestant)
        }
        began_s = turn.replies[0].began_s if turn.replies else 0.0
        return {
            "round": turn.round_number,
            "contestant": turn.contestant,
            "seconds": turn.seconds,
            "others": turn.others,
            "replies": [_reply(one, began_s, wrong.get(one.prompt)) for one in turn.replies],
        }


def _remarks(report: ServeReport) -> Iterator[str]:
    answers = sum(one.requests - one.failed for one in report.summaries)
    wrong, unchecked = len(report.answers.wrong), len(report.answers.unchecked)
    verdict = f"{wrong} differ from those of" if wrong else "none differs from that of"
    yield f"{answers} answers: {verdict} {report.reference}"
    if unchecked:
        yield f"{unchecked} could not be compared: {report.reference} did not answer their prompts"
    loaded = [turn for turn in report.turns if turn.others is not None and turn.others > NOTED]
    if loaded:
        worst = max(loaded, key=lambda turn: turn.others or 0.0)
        yield (
            f"other programs used more than {NOTED:.0%} of this machine in {len(loaded)} of "
            f"{len(report.turns)} turns, at most {worst.others:.0%} "
            f"({worst.contestant}, round {worst.round_number})"
        )


def _reply(reply: Reply, turn_began_s: float, difference: str | None) -> dict[str, Any]:
    began = {"prompt": reply.prompt, "began_s": reply.began_s - turn_began_s}
    if not isinstance(reply, CompleteReply):
        return {**began, "failed": reply.reason}
    return {
        **began,
        "arrivals_s": [at_s - reply.began_s for at_s in reply.arrivals_s],
        "tokens": reply.num_tokens,
        "handover_s": reply.handover_s,
        "wrong": difference,
    }
