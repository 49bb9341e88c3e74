"""All leases of one lender: found by request, freed exactly once.

The table also remembers how the last few thousand leases ended, so that the refusal
of a late claim says *why*.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from pdconn.lifecycle.lease import Denied, Freed, Grant, Lease, LeaseOffer, refusal_after
from pdconn.protocol.messages import Reader, RefusalReason


@dataclass(frozen=True, slots=True)
class FreedLease:
    """The engine may reuse the blocks of ``request``."""

    request: str
    why: Freed


class LeaseTable:
    """Leases by request id.

    Args:
        remember: how many ended leases are kept by name (about 100 bytes each).
    """

    def __init__(self, remember: int = 4096) -> None:
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, Freed] = OrderedDict()
        self._remember = remember
        self._timers: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def lend(self, offer: LeaseOffer) -> None:
        """Open a lease.

        Raises:
            ValueError: the request has a lease already.
        """
        if offer.request in self._leases:
            raise ValueError(f"request {offer.request!r} has a lease already")
        self._ended.pop(offer.request, None)
        lease = self._leases[offer.request] = Lease(offer)
        heapq.heappush(self._timers, (lease.deadline, offer.request))

    def claim(self, request: str, reader: Reader, ticket: bytes, now: float) -> Grant | Denied:
        """Answer a claim; see :meth:`Lease.claim`."""
        lease = self._leases.get(request)
        return self._refuse_unknown(request) if lease is None else lease.claim(reader, ticket, now)

    def is_lent(self, request: str) -> bool:
        """Whether the lease of ``request`` has not ended."""
        return request in self._leases

    def is_claimed(self, request: str, reader: Reader, now: float) -> bool:
        """Whether this reader holds a claim that has not expired."""
        lease = self._leases.get(request)
        return lease is not None and lease.is_claimed(reader, now)

    def renew(self, request: str, reader: Reader, now: float) -> Grant | Denied:
        """Answer a renewal; see :meth:`Lease.renew`."""
        lease = self._leases.get(request)
        return self._refuse_unknown(request) if lease is None else lease.renew(reader, now)

    def confirm(
        self, request: str, reader: Reader, ticket: bytes, now: float
    ) -> tuple[Denied | None, list[FreedLease]]:
        """Answer a confirmation, see :meth:`Lease.confirm`, and free what it was the last of."""
        lease = self._leases.get(request)
        if lease is None:
            return self._refuse_unknown(request), []
        denied = lease.confirm(reader, ticket, now)
        return denied, [] if denied else self._settle(request, lease)

    def done(self, request: str, reader: Reader, ticket: bytes, now: float) -> list[FreedLease]:
        """A reader is done; unknown requests are ignored, since a done may repeat."""
        lease = self._leases.get(request)
        if lease is None:
            return []
        lease.done(reader, ticket, now)
        return self._settle(request, lease)

    def abort(self, request: str, now: float) -> list[FreedLease]:
        """Take the blocks back as soon as no claim on them holds."""
        lease = self._leases.get(request)
        if lease is None:
            return []
        lease.abort(now)
        return self._settle(request, lease)

    def abort_unclaimed(self, request: str, now: float) -> list[FreedLease]:
        """As :meth:`abort`, unless a rank has claimed it."""
        lease = self._leases.get(request)
        return [] if lease is None or not lease.is_unclaimed else self.abort(request, now)

    def abort_all(self, now: float) -> list[FreedLease]:
        """As :meth:`abort`, for every lease."""
        return [freed for request in list(self._leases) for freed in self.abort(request, now)]

    def revoke_all(self) -> list[FreedLease]:
        """Free every lease now, claimed or not; see :meth:`Lease.revoke`."""
        freed: list[FreedLease] = []
        for request, lease in list(self._leases.items()):
            lease.revoke()
            freed += self._settle(request, lease)
        return freed

    def tick(self, now: float) -> list[FreedLease]:
        """Free what has expired at ``now``.  Cost grows with due timers, not with leases."""
        freed: list[FreedLease] = []
        while self._timers and self._timers[0][0] <= now:
            _, request = heapq.heappop(self._timers)
            lease = self._leases.get(request)
            if lease is None:
                continue
            lease.tick(now)
            freed += self._settle(request, lease, timer_spent=True)
        return freed

    def next_deadline(self) -> float | None:
        """When ``tick`` should run next, or None when nothing is lent."""
        while self._timers and self._timers[0][1] not in self._leases:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _settle(self, request: str, lease: Lease, timer_spent: bool = False) -> list[FreedLease]:
        freed = lease.freed
        if freed is None:
            if timer_spent or lease.next_deadline() < lease.deadline:
                heapq.heappush(self._timers, (lease.next_deadline(), request))
            return []
        del self._leases[request]
        self._ended[request] = freed
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)
        return [FreedLease(request, freed)]

    def _refuse_unknown(self, request: str) -> Denied:
        ended = self._ended.get(request)
        if ended is None:
            return Denied(RefusalReason.UNKNOWN, "nothing is lent under this request")
        return Denied(refusal_after(ended), "the lease has ended")
