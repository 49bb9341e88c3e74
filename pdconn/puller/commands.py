"""Commands of the engine to the puller, and the puller's reports.

::

    Pulling ── a step's metadata ──► PdWorker ── Puller.post_command ──► Pulls.apply_command
            ◄── get_transfer_results ── Puller.take_results ◄── Pulls.reports
"""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.lifecycle.turns import Urgency
from pdconn.planning.plan import Moved, Need
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.ticket import Ticket


@dataclass(frozen=True, slots=True)
class ClaimTicket:
    """Claim the lease of ``ticket`` for ``request`` under the id ``pull``, and renew the claim.

    With an early ticket, follow the request that it names.

    Posted as soon as the request is known, so that greeting a new peer overlaps with the time in
    the engine's queue.

    Attributes:
        is_awaited: whether the engine waits for the claim before it gives the request blocks.
            Each rank then reports that the claim was granted, and that it was lost.
    """

    request: str
    pull: str
    ticket: Ticket | EarlyTicket
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Read ``need`` into the request's blocks, then report it.

    Attributes:
        beside: what a store loads of the same blocks meanwhile; None without one.  Nothing is
            reported before :class:`EndBeside`, since until then the store may write.
        urgency: PREFETCH if nobody waits for the request.
        tenant: the label of the request's tenant; none for those of nobody in particular.
    """

    request: str
    need: Need
    beside: Need | None = None
    urgency: Urgency = Urgency.PULL
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class EndBeside:
    """The store has ended: ``loaded``, a part of ``beside``, is there, and the rest must be read.

    Attributes:
        loaded: from the beginning of what each group lacks; of no group if nothing was loaded.
    """

    request: str
    loaded: Need


@dataclass(frozen=True, slots=True)
class FailPull:
    """Report the request as failed, because of ``reason``: its ticket is invalid."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Give up the claim.  After :class:`ReadBlocks` the pull is reported once it settles."""

    request: str


@dataclass(frozen=True, slots=True)
class AbandonPull:
    """Report the request as failed now; its blocks are quarantined if a read is in flight."""

    request: str


@dataclass(frozen=True, slots=True)
class CompareAnew:
    """Our weights have changed: compare lenders with ``traits`` before a pull uses them."""

    traits: dict[str, str]


Command = ClaimTicket | ReadBlocks | EndBeside | FailPull | CancelPull | AbandonPull | CompareAnew


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRecord:
    """One rank's pull, once it was received.  Times in seconds.

    Attributes:
        claim_s: from the request's arrival at the puller to the granted claim.
        plan_s: of planning.
        plan_wait_s: the part of it after the claim was granted.
        post_s, transfer_s: of the slowest of its reads.
        total_s: from the engine's ReadBlocks to the report.
        age_s: from the request's arrival at the puller to the report.
        begins: of the plan.
        early_s: of a request that was followed, from the engine's ReadBlocks to its completion.
        early_nbytes: bytes whose reads were posted by then.
        visible_s: from the completion, or from ReadBlocks if that was later, to the report.
        num_blocks: of ours that it filled.
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
    visible_s: float
    begins: tuple[tuple[int, int], ...] = ()
    early_s: float = 0.0
    early_nbytes: int = 0
    num_blocks: int = 0
    is_followed: bool = False


CANCELLED = "cancelled"
"""Why a pull failed that its engine has given up."""


@dataclass(frozen=True, slots=True)
class FailedPull:
    """``request`` was not pulled, because of ``reason``.

    ``quarantined``: a read can still write to its blocks, until :class:`Released` follows.
    """

    request: str
    reason: str
    quarantined: bool = False

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing went wrong: the engine has given it up, as when a client has left."""
        return self.reason == CANCELLED


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing can write to the blocks of a quarantined ``request`` any longer."""

    request: str


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """The outcome of an awaited claim at ``rank``: it was granted, or there is a ``problem``.

    A claim that is lost after it was granted, before its blocks are known, is reported again.

    Attributes:
        ticket: of the request that an early ticket names; without blocks until it is complete.
    """

    request: str
    pull: str
    rank: int
    problem: str | None = None
    ticket: Ticket | None = None

    @property
    def is_final(self) -> bool:
        """Whether no other outcome is expected: the ticket is complete, or there is a problem."""
        return self.problem is not None or self.ticket is None or bool(self.ticket.blocks)


@dataclass(frozen=True, slots=True)
class ExpectedPull:
    """At ``rank`` nothing is reported of a pull for ``in_s`` seconds: its lender still computes.

    An estimate; any other report of the pull may come before.
    """

    request: str
    pull: str
    rank: int
    in_s: float


Report = PullRecord | FailedPull | Released | ClaimOutcome | ExpectedPull
