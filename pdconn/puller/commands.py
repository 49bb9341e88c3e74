"""What the engine asks of the puller, and what it reports: records, made once and passed on whole.

::

    Pulling ── a step's metadata ──► PdWorker ── Puller.post ──► Pulls.apply_command
            ◄── get_transfer_results ── Puller.collect ◄── Pulls.reports
"""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.planning.plan import Moved, Need
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


@dataclass(frozen=True, slots=True)
class PullRecord:
    """One rank's pull, once it was received.  Times in seconds.

    ``claim_s`` runs from first hearing of the request to the granted claim,
    ``plan_s`` is the planning, ``plan_wait_s`` what of it came after the claim was
    granted, ``post_s`` and ``transfer_s`` are the slowest of its reads, ``total_s``
    runs from the engine's ReadBlocks to the report, and ``age_s`` from first hearing of
    the request to it.  ``begins`` is the plan's.
    """

    request: str
    moved: Moved
    num_descriptors: int
    claim_s: float
    plan_s: float
    plan_wait_s: float
    post_s: float
    transfer_s: float
    total_s: float
    age_s: float
    begins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FailedPull:
    """``request`` was not pulled, because of ``reason``.

    ``quarantined``: a read can still write to its blocks, until :class:`Released` follows.
    """

    request: str
    reason: str
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing can write to the blocks of a quarantined ``request`` any more."""

    request: str


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """What came of an awaited claim at ``rank``: it was granted, or there is a ``problem``.

    A claim that was granted and is lost before its blocks are known is told a second time.
    """

    request: str
    pull: str
    rank: int
    problem: str | None = None


Report = PullRecord | FailedPull | Released | ClaimOutcome
