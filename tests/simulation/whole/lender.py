"""The lender of a whole engine in virtual time; as :class:`pdconn.lender.server.Lender`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pdconn.lender.sessions import (
    Abort,
    AbortAll,
    AbortUnclaimed,
    EngineCommand,
    LenderReport,
    LenderSessions,
    RevokeAll,
)
from pdconn.lifecycle.lease import FreedLease, LeaseOffer
from pdconn.protocol.messages import Welcome
from tests.simulation.serving import Serving
from tests.simulation.world import Machine, Wire, World


class SimLender:
    """Leases of one engine; commands reach them after a thread switch."""

    def __init__(self, world: World, machine: Machine, welcome: Welcome) -> None:
        self._world = world
        self._machine = machine
        self.sessions = LenderSessions(welcome)
        self._serving = Serving(world, machine, self.sessions, self._note)
        self._reports: list[LenderReport] = []

    def open(self, arrived: Callable[[], None]) -> Wire:
        """A reader dials."""
        return self._serving.open(arrived)

    def lend(self, request: str, ticket: bytes, ttl_s: float) -> None:
        self._post(LeaseOffer(request, ticket, ttl_s, self._machine.clock()))

    def abort_lease(self, request: str, *, if_unclaimed: bool = False) -> None:
        self._post(AbortUnclaimed(request) if if_unclaimed else Abort(request))

    def abort_all(self) -> None:
        self._post(AbortAll())

    def revoke_all(self) -> None:
        self._post(RevokeAll())

    def take_reports(self) -> list[LenderReport]:
        reports, self._reports = self._reports, []
        return reports

    def take_lease_counts(self) -> dict[str, int]:
        counts = dict(self.sessions.counts)
        self._world.counts.update(counts)
        self.sessions.counts = Counter()
        return counts

    def close(self) -> None:
        self._serving.end()

    def _note(self, ended: FreedLease) -> None:
        self._reports.append(ended)

    def _post(self, command: EngineCommand) -> None:
        self.sessions.apply_command(command, self._machine.clock())
        self._serving.turn()
