"""Checksums of what a lender lends, and the readers that wait for them.

Workers sum a request's blocks one step after it has finished, so a checksum request may arrive
before the sums.  It waits until they are there, or until the lease has ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdconn.integrity.lent import LentSums, NotSummed
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import Checksum, ChecksumRequest, ChecksumUnavailable, Reader

MAX_ASKS = 4
"""Per reader and rank; one is enough, unless a reader has thousands of shares."""

_ENDED = "the lease has ended"

S = TypeVar("S")
Waiting = tuple[S, ChecksumRequest]


@dataclass(frozen=True, slots=True)
class RankSums:
    """Worker ``rank``'s sums of what ``request`` lends; None if it has failed to make them."""

    request: str
    rank: int
    sums: LentSums | None


@dataclass(slots=True)
class _LeaseSums(Generic[S]):
    """One lease: sums by rank, requests for ranks that have no sums yet, and their count."""

    sums: dict[int, LentSums | None] = field(default_factory=dict)
    waiting: defaultdict[int, list[Waiting[S]]] = field(default_factory=lambda: defaultdict(list))
    asks: Counter[tuple[Reader, int]] = field(default_factory=Counter)


class ChecksumResponder(Generic[S]):
    """Sums by request and rank, and the sessions to answer.

    Args:
        num_ranks: ranks of this lender.
        is_summing: whether its workers make sums.
        max_waiting: requests that may wait, of all sessions together.

    Memory: 8 bytes per sum (see :attr:`LentSums.nbytes`) of every lease that has not ended.
    """

    def __init__(self, num_ranks: int, is_summing: bool, max_waiting: int) -> None:
        self._num_ranks = num_ranks
        self._is_summing = is_summing
        self._leases: defaultdict[str, _LeaseSums[S]] = defaultdict(_LeaseSums)
        self._ready: deque[Waiting[S]] = deque()
        self._max_waiting = max_waiting
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def has_work(self) -> bool:
        """Whether an answer can be made."""
        return bool(self._ready)

    def add_rank_sums(self, made: RankSums) -> None:
        """Add the sums of one rank, and make the answers that wait for them possible."""
        lease = self._leases[made.request]
        lease.sums[made.rank] = made.sums
        self._ready += lease.waiting.pop(made.rank, [])

    def ask_checksum(self, session: S, request: ChecksumRequest) -> ChecksumUnavailable | None:
        """Queue the request of a session that holds a claim.

        Returns:
            Why it is not answered; None if :meth:`make_answer` answers it.
        """
        if not self._is_summing:
            return _unavailable(request, "prefill keeps no checksums: set verify there too")
        rank = request.ask.rank
        if rank >= self._num_ranks:
            return _unavailable(request, f"rank: expected below {self._num_ranks}, got {rank}")
        if self._num_waiting >= self._max_waiting:
            return _unavailable(request, f"{self._max_waiting} others wait for checksums")
        lease = self._leases[request.request]
        if lease.asks[request.reader, rank] >= MAX_ASKS:
            return _unavailable(request, f"rank {rank} was asked {MAX_ASKS} times already")
        lease.asks[request.reader, rank] += 1
        self._num_waiting += 1
        if rank in lease.sums:
            self._ready.append((session, request))
        else:
            lease.waiting[rank].append((session, request))
        return None

    def make_answer(self) -> tuple[S, Checksum | ChecksumUnavailable] | None:
        """Make one answer; None when there is none to make."""
        # One at a time, since an answer adds up thousands of sums: the caller handles renewals
        # between two of them.
        if not self._ready:
            return None
        session, request = self._ready.popleft()
        self._num_waiting -= 1
        lease = self._leases.get(request.request)
        if lease is None:
            return session, _unavailable(request, _ENDED)
        return session, _answer(lease.sums[request.ask.rank], request)

    def forget_lease(self, request: str) -> list[tuple[S, ChecksumUnavailable]]:
        """Drop the sums of a lease that has ended; returns answers for sessions that wait."""
        lease = self._leases.pop(request, None)
        if lease is None:
            return []
        unanswered = [waiting for of_rank in lease.waiting.values() for waiting in of_rank]
        self._num_waiting -= len(unanswered)
        return [(session, _unavailable(asked, _ENDED)) for session, asked in unanswered]


def _answer(sums: LentSums | None, request: ChecksumRequest) -> Checksum | ChecksumUnavailable:
    if sums is None:
        return _unavailable(request, "prefill failed to make its checksums")
    try:
        return Checksum(request.number, request.reader.pull, sums.answer(request.ask))
    except (NotSummed, MessageError) as error:
        return _unavailable(request, str(error))


def _unavailable(request: ChecksumRequest, detail: str) -> ChecksumUnavailable:
    return ChecksumUnavailable(request.number, request.reader.pull, detail)
