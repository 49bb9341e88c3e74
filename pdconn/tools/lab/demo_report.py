"""The results of the demo, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdconn.tools.output.columns import Column, document, text_table
from pdconn.tools.output.units import scaled


@dataclass(frozen=True)
class DemoRow:
    """One prompt: bytes moved, times, and whether the answer is right.

    Bytes and descriptors are those of the whole pull; ``handover_s`` is from sending the request to
    decode to the first byte of its answer; ``mismatch`` is None if the answers agree.
    """

    label: str
    prompt_tokens: int
    full_bytes: int
    window_bytes: int
    saved_by_window_bytes: int
    saved_by_hits_bytes: int
    descriptors: int
    pull_s: float
    transfer_s: float
    handover_s: float
    mismatch: str | None

    @property
    def gb_per_s(self) -> float:
        """GB pulled per second of transfer; 0 without a transfer."""
        moved = self.full_bytes + self.window_bytes
        return moved / self.transfer_s / 1e9 if self.transfer_s else 0.0


@dataclass(frozen=True)
class DemoReport:
    """One line per prompt."""

    rows: Sequence[DemoRow]

    def text(self, width: int | None = None) -> str:
        """The table."""
        return text_table(_DEMO, self.rows, width)

    def document(self) -> list[dict[str, Any]]:
        """All rows, in bytes and seconds."""
        return [document(_DEMO, row) for row in self.rows]


_mb = scaled(1e-6, ".3f")
_DEMO: tuple[Column[DemoRow], ...] = (
    Column(None, "label", lambda row: row.label),
    Column("prompt\ntokens", "prompt_tokens", lambda row: row.prompt_tokens),
    Column("full attn\nMB pulled", "full_bytes", lambda row: row.full_bytes, _mb),
    Column("windows\nMB pulled", "window_bytes", lambda row: row.window_bytes, _mb),
    Column(
        "MB not moved:\nwindows",
        "saved_by_window_bytes",
        lambda row: row.saved_by_window_bytes,
        _mb,
    ),
    Column(
        "MB not moved:\nprefix hits",
        "saved_by_hits_bytes",
        lambda row: row.saved_by_hits_bytes,
        _mb,
    ),
    Column("descrip-\ntors", "descriptors", lambda row: row.descriptors),
    Column("pull\nms", "pull_s", lambda row: row.pull_s, scaled(1e3, ".2f")),
    Column(None, "transfer_s", lambda row: row.transfer_s),
    Column("GB/s", None, lambda row: row.gb_per_s, "{:.2f}".format),
    Column("handover\nms", "handover_s", lambda row: row.handover_s, scaled(1e3, ".1f")),
    Column(
        "same as\nalone",
        "mismatch",
        lambda row: row.mismatch,
        lambda mismatch: "yes" if mismatch is None else "NO",
    ),
    Column(None, "gb_per_s", lambda row: row.gb_per_s),
)
