"""What the engine asks of the puller: one record per command, made once and passed on whole.

::

    Pulling ── a step's metadata ──► PdWorker ── Puller.post ──► Pulls.apply
"""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import Ticket


@dataclass(frozen=True, slots=True)
class ClaimTicket:
    """Claim what ``ticket`` names for ``request``, and renew the claim, under the id ``pull``.

    Posted as soon as the request is known, so that waiting in the engine's queue costs
    nothing and greeting a new peer overlaps with it.

    Attributes:
        is_awaited: whether the engine waits for the claim before it gives the request blocks:
            each rank tells then whether it was granted, and whether it was lost since.
    """

    request: str
    pull: str
    ticket: Ticket
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """The request has blocks: read what ``need`` names into them, then report it."""

    request: str
    need: Need


@dataclass(frozen=True, slots=True)
class FailPull:
    """Report the request as failed: its ticket is wrong, as ``reason`` says."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Give the claim up.  A read that was asked for is still reported, once it is safe."""

    request: str


@dataclass(frozen=True, slots=True)
class AbandonPull:
    """Report the request as failed now: a read that runs is left behind, and its blocks too."""

    request: str


@dataclass(frozen=True, slots=True)
class CompareAnew:
    """Our weights have changed: lenders must agree with ``traits`` before a pull uses them."""

    traits: dict[str, str]


Command = ClaimTicket | ReadBlocks | FailPull | CancelPull | AbandonPull | CompareAnew
