"""A decode engine that gives a request blocks only when every rank was granted its claim.

As an engine with a store does: if a claim fails, or is lost before there are blocks, the other
ranks' claims are given up, and the request is served from elsewhere.
"""

from __future__ import annotations

from typing import Any

from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import ClaimOutcome, ClaimTicket
from pdconn.puller.thread import PullResults
from tests.simulation.decode import Decode, DecodeRank, Request


class AwaitingDecode(Decode):
    """An engine whose ranks tell what comes of their claims.

    Attributes:
        granted: by request that has no blocks: the ranks that told a grant.
        lost: requests with a claim that failed.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.granted: dict[str, set[int]] = {}
        self.lost: set[str] = set()

    def arrive(self, number: int, ticket: Ticket) -> None:
        """A request comes with a ticket; it gets blocks once all ranks hold their claims."""
        name = f"{self.name}/{number}/{self._pulls}"
        self._pulls += 1
        self.requests[name] = Request(number, ticket)
        self.granted[name] = set()
        for rank in self.ranks:
            rank.pulls.apply_command(ClaimTicket(name, name, ticket, is_awaited=True))
            rank.turn()
        if self.world.chance(self.world.chances.cancel):
            self.world.at(self.world.rng.expovariate(5.0), lambda: self._cancel(name))

    def reported(self, rank: DecodeRank, outcome: PullResults) -> None:
        """A rank told of claims, or its pulls ended."""
        for told in outcome.claims:
            self._hear(told)
        super().reported(rank, outcome)

    def _hear(self, told: ClaimOutcome) -> None:
        name = told.request
        if name not in self.granted or name in self.lost:
            return
        if told.problem is not None:
            self.lost.add(name)
            self.world.counts["asked elsewhere"] += 1
            self.world.at(self.world.lag(), lambda: self._cancel(name))
            return
        assert told.rank not in self.granted[name], f"{name} was granted twice at {told.rank}"
        self.granted[name].add(told.rank)
        if len(self.granted[name]) == len(self.ranks):
            self.world.at(self.world.lag() * 10, lambda: self._schedule(name))

    def _schedule(self, name: str) -> None:
        if name in self.lost or name not in self.requests:
            return
        super()._schedule(name)
        request = self.requests.get(name)
        if request is None or request.blocks:
            self.world.counts["promised"] += 1
            self.granted.pop(name, None)

    def _cancel(self, name: str) -> None:
        super()._cancel(name)
        self.granted.pop(name, None)
        self.lost.discard(name)
