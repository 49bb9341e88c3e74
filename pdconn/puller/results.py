"""What the puller measures and reports."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pdconn.planning.plan import Moved
from transport import ReadStats


@dataclass(frozen=True, slots=True)
class PullRecord:
    """One rank's pull, once it was received.  Times in seconds.

    ``claim_s`` runs from first hearing of the request to the granted claim,
    ``plan_s`` is the planning, ``plan_wait_s`` what of it came after the claim was
    granted, ``post_s`` and ``transfer_s`` are the slowest of its reads, ``total_s``
    runs from the engine's wish to the report.
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


@dataclass(slots=True)
class Measured:
    """Times and sizes of a pull as they become known; clock readings in seconds."""

    held: float
    asked: float = 0.0
    granted: float = 0.0
    plan_s: float = 0.0
    plan_began: float = 0.0
    moved: Moved = field(default_factory=Moved)
    num_descriptors: int = 0
    post_s: float = 0.0
    transfer_s: float = 0.0

    def planned(self, moved: Moved, began: float, ended: float) -> None:
        """The plan was made from ``began`` to ``ended``."""
        self.moved, self.plan_began, self.plan_s = moved, began, ended - began

    def add(self, stats: ReadStats) -> None:
        """One of the reads settled."""
        self.num_descriptors += stats.num_descriptors
        self.post_s = max(self.post_s, stats.post_s)
        self.transfer_s = max(self.transfer_s, stats.transfer_s)

    def record(self, request: str, now: float) -> PullRecord:
        """The pull was received at ``now``."""
        return PullRecord(
            request,
            self.moved,
            self.num_descriptors,
            self.granted - self.held,
            self.plan_s,
            self.plan_s if 0 < self.granted <= self.plan_began else 0.0,
            self.post_s,
            self.transfer_s,
            now - self.asked,
        )


@dataclass(frozen=True, slots=True)
class FailedPull:
    """``request`` was not pulled, because of ``reason``.

    ``quarantined``: a read can still write to its blocks, until it is reported released.
    """

    request: str
    reason: str
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing can write to the blocks of a quarantined ``request`` any more."""

    request: str


Report = PullRecord | FailedPull | Released


@dataclass(frozen=True, slots=True)
class PullResults:
    """What happened since the engine last asked.

    Attributes:
        records: pulls that were received.
        failed: pulls that were not.
        released: requests whose quarantine is over.
    """

    records: tuple[PullRecord, ...]
    failed: tuple[FailedPull, ...]
    released: tuple[str, ...]

    @classmethod
    def of(cls, outbox: deque[Report]) -> PullResults:
        """Empty ``outbox``, which another thread may be filling."""
        reports = [outbox.popleft() for _ in range(len(outbox))]
        return cls(
            tuple(report for report in reports if isinstance(report, PullRecord)),
            tuple(report for report in reports if isinstance(report, FailedPull)),
            tuple(report.request for report in reports if isinstance(report, Released)),
        )

    @property
    def received(self) -> tuple[str, ...]:
        """Requests that were received."""
        return tuple(record.request for record in self.records)


NO_NEWS = PullResults((), (), ())
"""Most steps of an engine end without any."""
