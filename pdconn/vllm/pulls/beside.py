"""What pulls know of other sources: the store beside them, and how fast each lender is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from pdconn.lifecycle.sources import Bandwidth
from pdconn.planning.plan import Need
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.ticket import Ticket
from pdconn.puller.peers import PeerKey
from pdconn.store.engine.beside import BesideOffer, PullOutlook

_REMEMBERED = 256


class BesideStore(Protocol):
    """The store of an engine, as its pulls see it."""

    def offer_beside(self, request: Any, pull: PullOutlook) -> BesideOffer | None:
        """What it can load beside a pull of ``request``; None to ask again at a later step."""
        ...

    def join_pull(self, request: Any, need: Need, pull: PullOutlook) -> Need | None:
        """Load what was offered of ``need``, which is described; returns what it loads."""
        ...


class LenderBandwidths:
    """Bytes per second of one rank's pulls, by lender.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lenders: OrderedDict[PeerKey, Bandwidth] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lenders)

    def of(self, ticket: Ticket | EarlyTicket | None) -> float | None:
        """Of the lender of a ticket; None if nothing was read from it of late."""
        known = None if ticket is None else self._lenders.get(PeerKey.from_ticket(ticket))
        return None if known is None else known.bytes_per_s(self._clock())

    def learn_read(self, ticket: Ticket | EarlyTicket | None, nbytes: int, seconds: float) -> None:
        """A rank has read so many bytes with a ticket."""
        if ticket is None:
            return
        key = PeerKey.from_ticket(ticket)
        self._lenders.setdefault(key, Bandwidth()).learn_read(nbytes, seconds, self._clock())
        self._lenders.move_to_end(key)
        while len(self._lenders) > _REMEMBERED:
            self._lenders.popitem(last=False)
