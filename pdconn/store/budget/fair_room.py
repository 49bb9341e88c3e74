"""Whose rows are saved while there is not room for all: fair shares of the allowance.  Pure.

Rows that find no room are not saved, so whoever asks most would get it all.  Instead each tenant
that asks gets a credit: bytes that come into the room are split evenly among those tenants, and
only a tenant's own credit, and what is nobody's, has room for its rows::

    room      |#### a's ####|#### b's ####|   free   |
    a floods, b asks at times: a uses its credit and what is free, and is skipped; b finds room

A credit grows to an even share of the room and a row; what comes then is split among the others, or
free.  So nothing is skipped that no other tenant has a claim to, and each of n tenants that keep
asking gets at least 1/n of what comes, within a row (two rows where the room holds less than a row
of each: then credits grow row by row, in turn).

A tenant asks as long as its last row was at most :data:`ASKS_S` ago.  For those that have asked
before, a quarter of the usual room is left free to come back to.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

ASKS_S = 2.0
"""A tenant keeps its credit for so long after a row."""
RETURNS_S = 60.0
"""Room is left for a tenant that has asked within so many seconds and does not ask now."""
RETURN_SHARE = 4
"""It is this fraction of the largest room of late."""
HALF_S = 10.0
"""That falls to half in this time, as the allowance itself does."""
MOST_TENANTS = 256
"""Tenants that are remembered; those that have not asked for longest are forgotten."""


@dataclass(slots=True)
class _Tenant:
    """A tenant that asks, or has asked.

    Attributes:
        asked_at: when it last asked, in seconds.
        credit: bytes of the room that are its own.
    """

    asked_at: float
    credit: int = 0


class FairRoom:
    """Decides which rows are admitted to a room of bytes that others fill and empty.

    Example:
        >>> room = FairRoom()
        >>> [room.admits(b"a", 4, room=12, now=0.0), room.admits(b"b", 4, room=8, now=0.0)]
        [True, True]
        >>> [room.admits(b"a", 4, room=left, now=0.1) for left in (12, 8, 4)]
        [True, True, False]
        >>> room.admits(b"b", 4, room=4, now=0.1)
        True
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()
        self._turns: OrderedDict[bytes, int] = OrderedDict()
        self._room = self._row = self._rest = 0
        self._usual, self._at = 0.0, 0.0

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._tenants)

    def admits(self, tenant: bytes, nbytes: int, room: int, now: float) -> bool:
        """Whether a row finds room.  If it does, the caller takes its bytes from the room.

        Args:
            tenant: whose row it is.
            nbytes: of the row.
            room: bytes that are there now.
            now: seconds that never go back.
        """
        self._row = max(self._row, nbytes)
        came = room - self._room
        self._usual = max(room, self._usual * 0.5 ** ((now - self._at) / HALF_S))
        self._at = now
        is_new = self._ask(tenant, now)
        if is_new:
            self._lower_to(max(room // len(self._turns), self._row))
        self._fit(room)
        # Bytes that came before the tenant asked are the others'.
        if came > 0:
            self._split(came, room, without=tenant if is_new else None)
        asking, free = self._tenants[tenant], max(0, room - self._owned() - self._rest)
        if is_new:
            asking.credit = min(free, max(room // len(self._turns), self._row))
        else:
            free = max(0, free - self._kept())
        is_admitted = nbytes <= min(room, asking.credit + (0 if is_new else free))
        if is_admitted:
            asking.credit = max(0, asking.credit - nbytes)
        self._room = room - nbytes if is_admitted else room
        return is_admitted

    def _ask(self, tenant: bytes, now: float) -> bool:
        """Note that the tenant asks; whether it did not ask before."""
        is_new = tenant not in self._turns
        known = self._tenants.setdefault(tenant, _Tenant(now))
        known.asked_at = now
        self._tenants.move_to_end(tenant)
        self._turns.setdefault(tenant, 0)
        for other, each in list(self._tenants.items()):
            idle_s = now - each.asked_at
            if idle_s <= ASKS_S and len(self._tenants) <= MOST_TENANTS:
                break
            each.credit = 0
            self._turns.pop(other, None)
            if idle_s > RETURNS_S or len(self._tenants) > MOST_TENANTS:
                del self._tenants[other]
        return is_new

    def _kept(self) -> int:
        """Bytes that are left for tenants that may come back."""
        may_return = len(self._tenants) > len(self._turns)
        return int(self._usual / RETURN_SHARE) if may_return else 0

    def _most(self, room: int) -> int:
        """The largest credit: an even share of the room, and a row that was too large for it."""
        return max(room - self._kept(), 0) // len(self._turns) + self._row

    def _owned(self) -> int:
        return sum(self._tenants[tenant].credit for tenant in self._turns)

    def _lower_to(self, most: int) -> None:
        """Free what is above an even share: there is another tenant."""
        for tenant in self._turns:
            self._tenants[tenant].credit = min(self._tenants[tenant].credit, most)

    def _fit(self, room: int) -> None:
        """Lower credits to what is there: others may have taken of the room."""
        lacking = self._owned() - max(room, 0)
        while lacking > 0:
            largest = max((self._tenants[tenant] for tenant in self._turns), key=_credit)
            taken = min(lacking, max(1, largest.credit // 2))
            largest.credit -= taken
            lacking -= taken

    def _split(self, came: int, room: int, without: bytes | None) -> None:
        """Split what came among those whose credit can grow; the rest is free."""
        most = self._most(room)
        quantum = self._row if len(self._turns) * self._row > room else 1
        came, self._rest = min(came + self._rest, room - self._owned()), 0
        while came > 0:
            growing = [
                tenant
                for tenant in self._turns
                if tenant != without and self._tenants[tenant].credit < most
            ]
            if not growing:
                return
            rounds = came // (quantum * len(growing))
            if not rounds and quantum == 1:
                self._rest = came  # less than a byte for each: it is split with what comes next
                return
            if rounds:
                for tenant in growing:
                    came -= self._grow(tenant, rounds * quantum, most)
            else:
                came -= self._grow_first(growing[0], min(came, quantum), quantum, most)

    def _grow(self, tenant: bytes, nbytes: int, most: int) -> int:
        """Add to a credit; returns how much."""
        known = self._tenants[tenant]
        grown = min(nbytes, most - known.credit)
        known.credit += grown
        return grown

    def _grow_first(self, tenant: bytes, nbytes: int, quantum: int, most: int) -> int:
        """Go on with the turn of the first tenant, which ends once it has got a quantum."""
        grown = self._grow(tenant, min(nbytes, quantum - self._turns[tenant]), most)
        self._turns[tenant] += grown
        if self._turns[tenant] >= quantum or self._tenants[tenant].credit >= most:
            self._turns[tenant] = 0
            self._turns.move_to_end(tenant)
        return grown


def _credit(tenant: _Tenant) -> int:
    return tenant.credit
