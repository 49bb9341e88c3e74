"""The report of a run: as text, as JSON, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdconn.tools.bench.transfer.methods import Method
from pdconn.tools.bench.transfer.rounds import MethodResult
from pdconn.tools.bench.transfer.workload import Workload
from pdconn.tools.output.columns import Column, document, text_table
from pdconn.tools.output.units import grouped, known, scaled


def _nonzero_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}" if seconds else "-"


_METHOD: tuple[Column[MethodResult], ...] = (
    Column("", "line", lambda one: one.method),
    Column(None, "nbytes", lambda one: one.nbytes),
    Column("runs", "runs", lambda one: one.runs, grouped),
    Column("KiB\nper run", None, lambda one: one.nbytes / one.runs, scaled(1 / 1024, ",.1f")),
    Column(None, "wall_p50_s", lambda one: one.times.wall_p50_s),
    Column(None, "wall_p99_s", lambda one: one.times.wall_p99_s),
    Column("plan\nms", "plan_s", lambda one: one.times.plan_s, _nonzero_ms),
    Column("post\nms", "post_s", lambda one: one.times.post_s, _nonzero_ms),
    Column("all, p50\nms", None, lambda one: one.times.wall_p50_s, scaled(1e3, ",.2f")),
    Column("all, p99\nms", None, lambda one: one.times.wall_p99_s, scaled(1e3, ",.2f")),
    Column("GB/s", "bytes_per_s", lambda one: one.bytes_per_s, scaled(1e-9, ".2f")),
    Column("of raw", "of_raw", lambda one: one.of_raw, known("{:.3f}".format)),
    Column(None, "of_alone", lambda one: one.of_alone),
    Column(None, "slowest_pull", lambda one: one.slowest_pull),
    Column(
        "CPU s/GB\nours",
        "reader_cpu_s_per_gb",
        lambda one: one.cpu.reader_s_per_gb,
        "{:.3f}".format,
    ),
    Column(
        "CPU s/GB\ntheirs",
        "lender_cpu_s_per_gb",
        lambda one: one.cpu.lender_s_per_gb,
        "{:.3f}".format,
    ),
    Column(None, "walls_s", lambda one: one.times.walls_s),
)

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

    def text(self, width: int | None = None) -> str:
        """A heading, one row per method, and the effect of concurrent pulls on each other."""
        ours = self.methods[0]
        heading = f"{self.title}\n{ours.nbytes / 1e6:,.1f} MB"
        parts = [heading, text_table(_METHOD, self.methods, width)]
        if ours.of_alone is not None and ours.slowest_pull is not None:
            parts.append(
                f"{self.workload.requests} pulls at once: {ours.of_alone:.2f} of one pull's "
                f"throughput, the slowest took {ours.slowest_pull:.2f} times the median"
            )
        return "\n\n".join(parts)

    def document(self) -> dict[str, Any]:
        """The case as JSON; times in seconds, throughput in bytes per second."""
        return document(_CASE, self)


_CASE: tuple[Column[CaseResult], ...] = (
    Column(None, "model", lambda case: case.workload.decode.model.name),
    Column(None, "prefill", lambda case: str(case.workload.prefill)),
    Column(None, "decode", lambda case: str(case.workload.decode)),
    Column(None, "layout", lambda case: case.workload.decode.layout),
    Column(None, "block_tokens", lambda case: case.workload.decode.block_tokens),
    Column(None, "prompt_tokens", lambda case: case.workload.prompt_tokens),
    Column(None, "ids", lambda case: case.workload.ids),
    Column(None, "requests", lambda case: case.workload.requests),
    Column(None, "rank", lambda case: case.workload.rank),
    Column(None, "path", lambda case: case.path),
    Column(None, "lines", lambda case: [document(_METHOD, one) for one in case.methods]),
    Column(None, "transports", lambda case: case.facts),
)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """All cases of a run."""

    cases: Sequence[CaseResult]
    manifest: Mapping[str, object]

    def text(self, width: int | None = None) -> str:
        """The cases, one below the other."""
        return "\n\n".join(case.text(width) for case in self.cases)

    def document(self) -> dict[str, Any]:
        """All cases, with the machine and the versions."""
        return {
            "manifest": self.manifest,
            "cases": [case.document() for case in self.cases],
        }


def draw(cases: Sequence[CaseResult], path: Path) -> None:
    """Plot throughput against block size, one panel per path and order of block ids.

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


def _speed(case: CaseResult, method: Method) -> float:
    return next(result.bytes_per_s for result in case.methods if result.method is method)
