"""A decode engine that follows requests while prefill computes them.

It has no ticket: it gives a request blocks when its ranks ask for them, and reads what prefill
announces.
"""

from __future__ import annotations

from pdconn.protocol.early import EarlyTicket
from pdconn.puller.commands import ClaimOutcome, ClaimTicket
from tests.simulation.awaiting import AwaitingDecode
from tests.simulation.decode import Request


class FollowingDecode(AwaitingDecode):
    """An engine that is asked at the same time as prefill."""

    def arrive_early(self, number: int, early: EarlyTicket) -> None:
        """A request comes with an early ticket."""
        name = f"{self.name}/{number}/{self._pulls}"
        self._pulls += 1
        self.requests[name] = Request(number, None)
        self.granted[name] = set()
        for rank in self.ranks:
            rank.pulls.apply_command(ClaimTicket(name, name, early, is_awaited=True))
            rank.turn()
        if self.world.chance(self.world.chances.cancel):
            self.world.at(self.world.rng.expovariate(5.0), lambda: self._cancel(name))

    def _hear(self, told: ClaimOutcome) -> None:
        request = self.requests.get(told.request)
        if request is None or told.ticket is None:
            super()._hear(told)
            return
        request.ticket = told.ticket
        self.world.counts["early" if not told.ticket.blocks else "complete"] += 1
        # A rank tells of its grant, and again when the ticket is complete.
        if told.rank not in self.granted.get(told.request, ()):
            super()._hear(told)
