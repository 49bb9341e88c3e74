"""A requested prefix, and the outcome.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.router.labels import LabelValue


class PullEnd(LabelValue):
    """The outcome of a pull: the label ``outcome`` of ``prefix_pulls_total``."""

    TAKEN = ("taken", "Prefill pulled the prefix.")
    UNUSED = (
        "unused",
        "Prefill computed it all the same: the ticket came too late, or a read failed.",
    )
    REFUSED = ("refused", "The holder does not hold it any more, or does not lend.")
    LATE = (
        "late",
        "The holder did not answer before computing became the better choice.",
    )
    FAILED = ("failed", "The holder, or prefill while it had the ticket, did not answer.")


@dataclass(frozen=True, slots=True)
class PrefixPull:
    """A pull of a prompt's prefix by prefill.

    Attributes:
        holder: the engine that lends.
        tokens: tokens of the prefix.
        saved: of these, tokens that prefill did not hold.
        took_s: from asking the holder until its ticket arrived, or the wait was abandoned.
        end: None while prefill has the ticket.
    """

    holder: str
    tokens: int
    saved: int
    took_s: float
    end: PullEnd | None = None
