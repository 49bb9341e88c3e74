"""The result of a run, as a table and as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdconn.bench.transfer.rounds import MethodResult
from pdconn.bench.transfer.workload import Workload
from pdconn.lab.table import table

_HEADINGS = [
    "", "runs", "KiB\nper run", "plan\nms", "post\nms", "all, p50\nms", "all, p99\nms", "GB/s",
    "of raw", "CPU s/GB\nours", "CPU s/GB\ntheirs",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One workload over one path; ``facts`` describe both transports."""

    workload: Workload
    path: str
    methods: tuple[MethodResult, ...]
    facts: dict[str, dict[str, str]]

    @property
    def title(self) -> str:
        """The case in one line."""
        workload = self.workload
        what = f"{workload.requests} x " if workload.requests > 1 else ""
        ids = {"runs": "ids in runs of 8"}.get(workload.ids, f"{workload.ids} ids")
        return (
            f"{workload.decode.model.name}, {what}{workload.prompt_tokens:,} tokens, {ids}, "
            f"{self.path}: {workload.prefill} -> {workload.decode}"
            + (f", rank {workload.rank}" if workload.decode.ranks > 1 else "")
        )


def render(case: CaseResult) -> str:
    """A heading, a row per method, and how concurrent pulls affect each other."""
    rows = [_row(result) for result in case.methods]
    nbytes = case.methods[0].nbytes
    parts = [f"{case.title}\n{nbytes / 1e6:,.1f} MB", table(_HEADINGS, rows)]
    ours = case.methods[0]
    if ours.of_alone is not None and ours.slowest_pull is not None:
        parts.append(
            f"{case.workload.requests} pulls at once: {ours.of_alone:.2f} of one pull's "
            f"throughput, the slowest took {ours.slowest_pull:.2f} times the median"
        )
    return "\n\n".join(parts)


def to_json(cases: Sequence[CaseResult], manifest: dict[str, object]) -> dict[str, Any]:
    """All results; times in seconds, throughput in bytes per second."""
    return {
        "manifest": manifest,
        "cases": [
            {
                "model": case.workload.decode.model.name,
                "prefill": str(case.workload.prefill),
                "decode": str(case.workload.decode),
                "layout": case.workload.decode.layout,
                "block_tokens": case.workload.decode.block_tokens,
                "prompt_tokens": case.workload.prompt_tokens,
                "ids": case.workload.ids,
                "requests": case.workload.requests,
                "rank": case.workload.rank,
                "path": case.path,
                "lines": [_to_json(result) for result in case.methods],
                "transports": case.facts,
            }
            for case in cases
        ],
    }


def _to_json(result: MethodResult) -> dict[str, Any]:
    fields = asdict(result)
    return {"line": fields.pop("method"), **fields}


def _row(result: MethodResult) -> list[str]:
    return [
        str(result.method),
        f"{result.runs:,}",
        f"{result.nbytes / result.runs / 1024:,.1f}",
        f"{1e3 * result.plan_s:,.2f}" if result.plan_s else "-",
        f"{1e3 * result.post_s:,.2f}" if result.post_s else "-",
        f"{1e3 * result.wall_p50_s:,.2f}",
        f"{1e3 * result.wall_p99_s:,.2f}",
        f"{result.bytes_per_s / 1e9:.2f}",
        "-" if result.of_raw is None else f"{result.of_raw:.3f}",
        f"{result.reader_cpu_s_per_gb:.3f}",
        f"{result.lender_cpu_s_per_gb:.3f}",
    ]
