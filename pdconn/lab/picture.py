"""The demo as a picture: bytes that moved, bytes that did not, and handover times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdconn.lab.demo import DemoRow

_SERIES = (
    ("full_bytes", "full attention, pulled", "#1f5fa8"),
    ("window_bytes", "windows, pulled", "#56a3e8"),
    ("saved_by_window_bytes", "not moved: outside every window", "#d9d9d9"),
    ("saved_by_hits_bytes", "not moved: decode had it", "#efe3b0"),
)


def draw(rows: Sequence[DemoRow], path: Path) -> None:
    """Write a PNG of the table's bytes and times."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{row.prompt_tokens}" for row in rows]
    places = range(len(rows))
    figure, (bytes_axes, time_axes) = plt.subplots(1, 2, figsize=(12, 4.5))
    bottom = [0.0] * len(rows)
    for field, label, colour in _SERIES:
        heights = [getattr(row, field) / 1e6 for row in rows]
        bytes_axes.bar(places, heights, bottom=bottom, label=label, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    bytes_axes.set_ylabel("MB per request")
    bytes_axes.set_title("KV of a prompt: what moved and what did not")
    bytes_axes.legend(fontsize=8)
    handover = [1e3 * row.handover_s for row in rows]
    pull = [1e3 * row.pull_s for row in rows]
    time_axes.bar(places, handover, color="#c8c8c8", label="handover: asked to first byte")
    time_axes.bar(places, pull, color="#1f5fa8", label="of it, the pull")
    time_axes.set_ylabel("ms")
    time_axes.set_title("Handover from prefill to decode")
    time_axes.legend(fontsize=8)
    for axes in (bytes_axes, time_axes):
        axes.set_xticks(list(places), names, rotation=45)
        axes.set_xlabel("prompt tokens (the last two were asked before)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
