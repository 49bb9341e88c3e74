"""What the puller reports to the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdconn.planning.plan import Moved


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


@dataclass(frozen=True, slots=True)
class PullResults:
    """What happened since the engine last asked.

    Attributes:
        records: pulls that were received.
        failed: pulls that were not.
        released: requests whose quarantine is over.
        claims: awaited claims that were granted, refused or lost.
    """

    records: tuple[PullRecord, ...]
    failed: tuple[FailedPull, ...]
    released: tuple[str, ...]
    claims: tuple[ClaimOutcome, ...] = ()

    @classmethod
    def of(cls, reports: Iterable[Report]) -> PullResults:
        """Sort ``reports`` by what they say."""
        reports = list(reports)
        return cls(
            tuple(report for report in reports if isinstance(report, PullRecord)),
            tuple(report for report in reports if isinstance(report, FailedPull)),
            tuple(report.request for report in reports if isinstance(report, Released)),
            tuple(report for report in reports if isinstance(report, ClaimOutcome)),
        )

    @property
    def received(self) -> tuple[str, ...]:
        """Requests that were received."""
        return tuple(record.request for record in self.records)


NO_RESULTS = PullResults((), (), ())
"""Of most steps of an engine."""
