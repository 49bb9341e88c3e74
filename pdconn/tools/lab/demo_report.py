"""The results of the demo, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdconn.tools.output.columns import Column, document, text_table
from pdconn.tools.output.units import scaled


@dataclass(frozen=True)
class EarlyPart:
    """The part of a pull that lay behind prefill, while decode followed its request.

    Attributes:
        is_followed: whether decode followed.
        nbytes: bytes whose reads began before prefill had computed all.
        seconds: from decode's blocks until prefill had computed all.
    """

    is_followed: bool = False
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class DemoRow:
    """One prompt: bytes moved, times, and whether the answer is right.

    Bytes and descriptors are those of the whole pull; ``pull_s`` is from decode's blocks to their
    KV, ``early`` a part of it; ``handover_s`` is from prefill's answer to the first byte of
    decode's; ``mismatch`` is None if the answers agree.
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
    early: EarlyPart = EarlyPart()

    @property
    def visible_s(self) -> float:
        """Seconds of the pull after prefill had computed all."""
        return self.pull_s - self.early.seconds

    @property
    def gb_per_s(self) -> float:
        """GB pulled per second of transfer; 0 without a transfer."""
        moved = self.full_bytes + self.window_bytes
        return moved / self.transfer_s / 1e9 if self.transfer_s else 0.0


@dataclass(frozen=True)
class DemoReport:
    """One line per prompt; ``streams``: the text shows what lay behind prefill as well."""

    rows: Sequence[DemoRow]
    streams: bool = False

    def text(self, width: int | None = None) -> str:
        """The table, and below it what streams have hidden in all."""
        if not self.streams:
            return text_table([one for one in _DEMO if one not in _EARLY], self.rows, width)
        return f"{text_table(_DEMO, self.rows, width)}\n\n{_followed(self.rows)}"

    def document(self) -> list[dict[str, Any]]:
        """All rows, in bytes and seconds."""
        return [document(_DEMO, row) for row in self.rows]


def _followed(rows: Sequence[DemoRow]) -> str:
    """What streams have hidden, as a line."""
    pulled = [row for row in rows if row.pull_s]
    followed = [row for row in pulled if row.early.is_followed]
    counted = f"streams: {len(followed)} of {len(pulled)} pulls followed prefill"
    if not followed:
        return counted
    moved_mb = sum(row.full_bytes + row.window_bytes for row in followed) / 1e6
    early_mb = sum(row.early.nbytes for row in followed) / 1e6
    visible_ms, hidden_ms = (
        1e3 * sum(times_s)
        for times_s in zip(*((row.visible_s, row.early.seconds) for row in followed), strict=True)
    )
    return (
        f"{counted}: {early_mb:.3f} of {moved_mb:.3f} MB were read behind it; {hidden_ms:.1f} ms "
        f"of their time lay behind it, and {visible_ms:.1f} ms came after it"
    )


_mb, _ms = scaled(1e-6, ".3f"), scaled(1e3, ".2f")
_EARLY: tuple[Column[DemoRow], ...] = (
    Column("ms behind\nprefill", "hidden_s", lambda row: row.early.seconds, _ms),
    Column("ms after\nprefill", "visible_s", lambda row: row.visible_s, _ms),
    Column("MB behind\nprefill", "early_bytes", lambda row: row.early.nbytes, _mb),
)
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
    Column("pull\nms", "pull_s", lambda row: row.pull_s, _ms),
    *_EARLY,
    Column(None, "is_followed", lambda row: row.early.is_followed),
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
