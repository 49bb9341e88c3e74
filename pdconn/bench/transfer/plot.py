"""Throughput against block size, a panel per path and order of block ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdconn.bench.transfer.methods import Method
from pdconn.bench.transfer.report import CaseResult

_STYLES = {Method.PDCONN: "-o", Method.LAYERED: "--s", Method.RAW: ":"}


def draw(cases: Sequence[CaseResult], path: Path) -> None:
    """Write a plot of ``cases``; the suffix of ``path`` selects the format."""
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
