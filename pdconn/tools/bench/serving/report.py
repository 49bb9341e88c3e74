"""The result of a run, as a table and as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from pdconn.tools.lab.table import table

_HEADINGS = [
    "", "requests", "TTFT\np50 ms", "\np99 ms", "ITL\np50 ms", "\np99 ms", "handover\np50 ms",
    "\np99 ms", "within\nbounds", "goodput\nper s", "all\nper s", "failed", "wrong",
]  # fmt: skip

#: If other programs use more of the machine than this, the report says so.
NOTED = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """One run: its plan, its turns, and their summary."""

    plan: RunPlan
    bounds: Bounds
    turns: tuple[TurnResult, ...]
    reference: str
    answers: AnswerCheck
    summaries: tuple[Summary, ...]

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        bounds: Bounds,
        turns: Sequence[TurnResult],
        names: Sequence[str],
        reference: str,
    ) -> Report:
        """Summarise ``turns`` for ``names``; ``reference``'s answers count as right."""
        answers = check(turns, reference)
        summaries = tuple(summarise(name, turns, answers, bounds) for name in names)
        return cls(plan, bounds, tuple(turns), reference, answers, summaries)

    @property
    def is_good(self) -> bool:
        """Whether every request was answered, and as by the reference."""
        return not any(summary.failed or summary.wrong for summary in self.summaries)


def render(report: Report) -> str:
    """A heading, a row per contestant, and remarks on the answers."""
    plan, bounds = report.plan, report.bounds
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
    rows = [_row(summary) for summary in report.summaries]
    return "\n\n".join([title, table(_HEADINGS, rows), "\n".join(_remarks(report))])


def to_json(report: Report, manifest: dict[str, object]) -> dict[str, Any]:
    """All results; times in seconds, those of a reply from when it was due or sent."""
    wrong = {
        (one.round_number, one.contestant, one.prompt): one.difference
        for one in report.answers.wrong
    }
    return {
        "manifest": manifest,
        "plan": asdict(report.plan),
        "bounds": asdict(report.bounds),
        "reference": report.reference,
        "unchecked": len(report.answers.unchecked),
        "contestants": [
            {**asdict(one), "goodput_per_s": one.goodput, "throughput_per_s": one.throughput}
            for one in report.summaries
        ],
        "turns": [
            {
                "round": turn.round_number,
                "contestant": turn.contestant,
                "seconds": turn.seconds,
                "others": turn.others,
                "replies": [
                    _reply(
                        reply,
                        turn.replies[0].began_s,
                        wrong.get((turn.round_number, turn.contestant, reply.prompt)),
                    )
                    for reply in turn.replies
                ],
            }
            for turn in report.turns
        ],
    }


def _row(one: Summary) -> list[str]:
    return [
        one.contestant,
        str(one.requests),
        *_in_ms(one.ttft),
        *_in_ms(one.itl),
        *_in_ms(one.handover),
        str(one.met),
        f"{one.goodput:.2f}",
        f"{one.throughput:.2f}",
        str(one.failed),
        str(one.wrong),
    ]


def _in_ms(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return f"{1e3 * spread.p50_s:,.1f}", f"{1e3 * spread.p99_s:,.1f}"


def _remarks(report: Report) -> Iterator[str]:
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
