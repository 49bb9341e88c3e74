"""Checksums of what a lender lends, and the readers that wait for them.

Workers sum a request's blocks one step after it finished, so an ask may come before the
sums: it waits, until they are there or the lease has ended.  An answer adds up thousands of
sums, so it is made when :meth:`ChecksumResponder.work` is called, one at a time: a caller that
alternates it with other work keeps renewals prompt.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdconn.integrity.errors import NotSummed
from pdconn.integrity.lent import LentSums
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import Checksum, ChecksumRequest, ChecksumUnavailable, Reader

MAX_WAITING = 1024
"""Asks that may wait, of all visitors together; some 20 kB each at the most."""

MAX_ASKS = 4
"""Of one reader for one rank; honest ones need one, unless they have thousands of shares."""

Visitor = TypeVar("Visitor")
Waiting = tuple[Visitor, ChecksumRequest]


@dataclass(slots=True)
class _Lent(Generic[Visitor]):
    """One lease: its ranks' sums, asks for ranks that are still to come, and their count."""

    sums: dict[int, LentSums | None] = field(default_factory=dict)
    waiting: defaultdict[int, list[Waiting[Visitor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    asks: Counter[tuple[Reader, int]] = field(default_factory=Counter)


class ChecksumResponder(Generic[Visitor]):
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
        self._ready: deque[Waiting[Visitor]] = deque()
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._lent)

    @property
    def has_work(self) -> bool:
        """Whether an answer can be made."""
        return bool(self._ready)

    def add(self, request: str, rank: int, sums: LentSums | None) -> None:
        """A rank summed what ``request`` lends, or could not."""
        lent = self._lent[request]
        lent.sums[rank] = sums
        self._ready += lent.waiting.pop(rank, [])

    def ask(self, visitor: Visitor, prove: ChecksumRequest) -> ChecksumUnavailable | None:
        """A visitor that holds a claim asks; None says that the answer comes later."""
        if not self._is_summing:
            return _unproven(prove, "prefill keeps no checksums: set verify there too")
        rank = prove.ask.rank
        if rank >= self._num_ranks:
            return _unproven(prove, f"rank: expected below {self._num_ranks}, got {rank}")
        if self._num_waiting >= MAX_WAITING:
            return _unproven(prove, f"{MAX_WAITING} others wait for checksums")
        lent = self._lent[prove.request]
        if lent.asks[prove.reader, rank] >= MAX_ASKS:
            return _unproven(prove, f"rank {rank} was asked {MAX_ASKS} times already")
        lent.asks[prove.reader, rank] += 1
        self._num_waiting += 1
        if rank in lent.sums:
            self._ready.append((visitor, prove))
        else:
            lent.waiting[rank].append((visitor, prove))
        return None

    def work(self) -> tuple[Visitor, Checksum | ChecksumUnavailable] | None:
        """Make one answer; None when there is none to make."""
        if not self._ready:
            return None
        visitor, prove = self._ready.popleft()
        self._num_waiting -= 1
        lent = self._lent.get(prove.request)
        if lent is None:
            return visitor, _unproven(prove, "the lease has ended")
        return visitor, _answer(lent.sums[prove.ask.rank], prove)

    def forget(self, request: str) -> list[tuple[Visitor, ChecksumUnavailable]]:
        """A lease ended; answers to those that still waited for its sums."""
        lent = self._lent.pop(request, None)
        if lent is None:
            return []
        over = [waiting for of_rank in lent.waiting.values() for waiting in of_rank]
        self._num_waiting -= len(over)
        return [(visitor, _unproven(prove, "the lease has ended")) for visitor, prove in over]


def _answer(sums: LentSums | None, prove: ChecksumRequest) -> Checksum | ChecksumUnavailable:
    if sums is None:
        return _unproven(prove, "prefill failed to make its checksums")
    try:
        return Checksum(prove.number, prove.reader.pull, sums.answer(prove.ask))
    except (NotSummed, MessageError) as error:
        return _unproven(prove, str(error))


def _unproven(prove: ChecksumRequest, detail: str) -> ChecksumUnavailable:
    return ChecksumUnavailable(prove.number, prove.reader.pull, detail)
