"""Checksums of what a lender lends, and the readers that wait for them.

Workers sum a request's blocks one step after it finished, so an ask may come before the
sums: it waits, until they are there or the lease has ended.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdconn.integrity.errors import NotSummed
from pdconn.integrity.lent import LentSums
from pdconn.protocol.messages import Prove, Proven, Unproven

MAX_WAITING = 4096
"""Asks that may wait for sums, of all visitors together."""

Visitor = TypeVar("Visitor")


@dataclass(slots=True)
class _Lent(Generic[Visitor]):
    """One lease: its ranks' sums, and asks for ranks that are still to come."""

    sums: dict[int, LentSums] = field(default_factory=dict)
    waiting: list[tuple[Visitor, Prove]] = field(default_factory=list)


class Proofs(Generic[Visitor]):
    """Sums by request and rank.

    Args:
        num_ranks: ranks of this lender.
        is_summing: whether its workers make sums at all.

    Memory: 8 bytes per sum (see :attr:`LentSums.nbytes`) of every lease that is held.
    """

    def __init__(self, num_ranks: int, is_summing: bool) -> None:
        self._num_ranks = num_ranks
        self._is_summing = is_summing
        self._lent: defaultdict[str, _Lent[Visitor]] = defaultdict(_Lent)
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._lent)

    def add(
        self, request: str, rank: int, sums: LentSums
    ) -> list[tuple[Visitor, Proven | Unproven]]:
        """A rank summed what ``request`` lends; answers to those that waited for it."""
        lent = self._lent[request]
        lent.sums[rank] = sums
        heard = [(who, prove) for who, prove in lent.waiting if prove.ask.rank == rank]
        lent.waiting = [waits for waits in lent.waiting if waits not in heard]
        self._num_waiting -= len(heard)
        return [(who, _proven(sums, prove)) for who, prove in heard]

    def ask(self, visitor: Visitor, prove: Prove) -> Proven | Unproven | None:
        """Answer a visitor that holds a claim, or None to answer it later.

        Raises:
            MessageError: a group, chunk, head or unit that we do not have.
        """
        if not self._is_summing:
            return _unproven(prove, "prefill keeps no checksums: set verify there too")
        if prove.ask.rank >= self._num_ranks:
            return _unproven(prove, f"rank: expected below {self._num_ranks}")
        lent = self._lent[prove.request]
        sums = lent.sums.get(prove.ask.rank)
        if sums is not None:
            return _proven(sums, prove)
        if self._num_waiting >= MAX_WAITING:
            return _unproven(prove, f"{MAX_WAITING} others wait for checksums")
        lent.waiting.append((visitor, prove))
        self._num_waiting += 1
        return None

    def forget(self, request: str) -> list[tuple[Visitor, Unproven]]:
        """A lease ended; answers to those that still waited."""
        lent = self._lent.pop(request, None)
        if lent is None:
            return []
        self._num_waiting -= len(lent.waiting)
        return [(who, _unproven(prove, "the lease has ended")) for who, prove in lent.waiting]


def _proven(sums: LentSums, prove: Prove) -> Proven | Unproven:
    try:
        return Proven(prove.number, prove.reader.pull, sums.answer(prove.ask))
    except NotSummed as error:
        return _unproven(prove, str(error))


def _unproven(prove: Prove, detail: str) -> Unproven:
    return Unproven(prove.number, prove.reader.pull, detail)
