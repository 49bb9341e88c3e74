"""The result of a run: as a table, as a JSON document, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdconn.tools.bench.transfer.methods import Method
from pdconn.tools.bench.transfer.rounds import MethodResult
from pdconn.tools.bench.transfer.workload import Workload
from pdconn.tools.lab.table import table

_HEADINGS = [
    "", "runs", "KiB\nper run", "plan\nms", "post\nms", "all, p50\nms", "all, p99\nms", "GB/s",
    "of raw", "CPU s/GB\nours", "CPU s/GB\ntheirs",
]  # fmt: skip

_STYLES = {Method.PDCONN: "-o", Method.LAYERED: "--s", Method.RAW: ":"}


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


def draw(cases: Sequence[CaseResult], path: Path) -> None:
    """Plot throughput against block size, a panel per path and order of block ids.

    The suffix of ``path`` selects the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((case.path, case.workload.ids) for case in cases))
    layouts = list(dict.fromkeys(case.workload.decode.layout for case in cases))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4.2), squeeze=False, sharey=True
    )
    for axis, (over, ids) in zip(axes[0], panels, strict=True):
        here = [case for case in cases if (case.path, case.workload.ids) == (over, ids)]
        for number, layout in enumerate(layouts):
            of_layout = [case for case in here if case.workload.decode.layout == layout]
            for method, style in _STYLES.items():
                points = sorted((block_nbytes(case), _speed(case, method)) for case in of_layout)
                if points:
                    axis.plot(
                        [nbytes / 1024 for nbytes, _ in points],
                        [speed / 1e9 for _, speed in points],
                        style,
                        color=f"C{number}",
                        label=f"{layout} {method}",
                    )
        axis.set_xscale("log", base=2)
        axis.set_xlabel("KiB per block")
        axis.set_title(f"{over}, {ids} ids")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GB/s")
    axes[0][0].set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def block_nbytes(case: CaseResult) -> int:
    """Bytes of one block of decode's widest group, all its layers."""
    return max(group.block_nbytes for group in case.workload.ours().groups)


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


def _speed(case: CaseResult, method: Method) -> float:
    return next(result.bytes_per_s for result in case.methods if result.method is method)
