"""Streams of a lender: requests that readers follow while the engine computes them.

::

    Follow ──► parked ──opened by the engine──► open ──grown──► open ──completed──► until the lease
                  └──────── in time, or refused                  └──closed──► refused        ends

A stream opens when its request enters the engine.  A reader that comes before that is parked for a
while; one that comes later is sent everything that was announced.  What is announced stays where it
is: a position is announced once on each connection of a reader.

Pure: the caller grants claims, and sends what is returned.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdconn.lifecycle.lease import LeaseOffer
from pdconn.protocol.messages import (
    Completed,
    Follow,
    Grown,
    GrownBlocks,
    Opened,
    Reader,
    RefusalReason,
    StreamReply,
)
from pdconn.protocol.ticket import Ticket

PARK_S = 20.0
"""How long a reader is parked: prefill's front end tokenizes, and its engine may be in a step."""

MAX_PARKED = 4096
"""Parked readers of one lender; some 300 bytes each."""
MAX_PARKED_OF_ONE = MAX_PARKED // 8
"""Of one session."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StreamOffer:
    """The engine computes ``request``, and readers that know ``stream`` may follow it.

    Attributes:
        num_tokens: tokens that will be lent.
        prompt: digest of the prompt.
        adapter: digest of its adapter's files.
        ttl_s: seconds that claims hold.
        at: when it was opened, in seconds of the lender's clock.
    """

    request: str
    stream: str
    num_tokens: int
    prompt: str
    adapter: str
    ttl_s: float
    at: float

    @property
    def lease(self) -> LeaseOffer:
        """The lease that grows with it."""
        return LeaseOffer(self.request, None, self.ttl_s, self.at)


@dataclass(frozen=True, slots=True)
class StreamGrowth:
    """More blocks of ``request`` are written, and stay as they are while it is lent.

    Without blocks: the engine begins to compute it.
    """

    request: str
    blocks: tuple[GrownBlocks, ...]


@dataclass(frozen=True, slots=True)
class StreamCompletion:
    """The request of an open stream is lent by ``ticket``, unless its lease has ended."""

    offer: LeaseOffer
    ticket: Ticket


@dataclass(slots=True)
class _Stream(Generic[S]):
    """An open stream: what was announced, and its readers.

    ``grown``: the first position, and the ids from there on, of each group.
    """

    offer: StreamOffer
    has_begun: bool = False
    grown: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    completed: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    readers: dict[Reader, S] = field(default_factory=dict)

    def opened(self, pull: str) -> Opened:
        """What the stream is."""
        offer = self.offer
        header = offer.request, offer.num_tokens, offer.prompt, offer.adapter
        return Opened(offer.stream, pull, *header)

    def announced(self, pull: str) -> list[StreamReply]:
        """Everything that was announced of it."""
        request = self.offer.request
        if self.completed is not None:
            return [Completed(request, pull, self.completed)]
        if not self.has_begun:
            return []
        # A list of each group, not of each step: a reader accepts so many lists as groups.
        lists = (GrownBlocks(of, first, tuple(ids)) for of, (first, ids) in self.grown.items())
        return [Grown(request, pull, tuple(lists))]


class StreamTable(Generic[S]):
    """Open streams, and parked readers of others, by session.

    Args:
        remember: ended streams that are kept by name, so that a late reader is refused at once; and
            readers that have left before their stream was opened.

    Memory of an open stream: 8 bytes for each block that was announced.
    """

    def __init__(self, remember: int = 4096) -> None:
        self._streams: dict[str, _Stream[S]] = {}
        self._of_request: dict[str, str] = {}
        self._ended: OrderedDict[str, tuple[RefusalReason, str]] = OrderedDict()
        self._remember = remember
        self._parked: dict[str, dict[Reader, tuple[S, Follow]]] = {}
        self._left: OrderedDict[str, set[Reader]] = OrderedDict()
        self._num_left = 0
        self._num_parked = 0
        self._parked_of: Counter[S] = Counter()
        # When the wait of a reader is over; it may be over already.
        self._until: list[tuple[float, int, Follow]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Open streams and parked readers; 0 when all is quiet."""
        return len(self._streams) + self._num_parked

    def open_stream(self, offer: StreamOffer) -> list[tuple[S, Follow]]:
        """Open a stream; returns its parked readers, to be granted or refused.

        A name that is in use, or was, opens nothing: nobody can follow the request.
        """
        if offer.stream in self._streams or offer.stream in self._ended:
            return []
        self._streams[offer.stream] = _Stream(offer)
        self._of_request[offer.request] = offer.stream
        return self._take_parked(offer.stream)

    def leave_stream(self, name: str, reader: Reader) -> None:
        """As :meth:`remove_reader`; that a parked one has left is remembered."""
        if reader in self._parked.get(name, ()):
            left = self._left.setdefault(name, set())
            self._num_left += reader not in left
            left.add(reader)
            while self._num_left > self._remember:
                self._num_left -= len(self._left.popitem(last=False)[1])
        self.remove_reader(name, reader)

    def take_left(self, stream: str) -> set[Reader]:
        """Readers that were parked, and have left before their stream was opened."""
        left = self._left.pop(stream, set())
        self._num_left -= len(left)
        return left

    def request_of(self, stream: str) -> str | None:
        """The request of an open stream."""
        found = self._streams.get(stream)
        return None if found is None else found.offer.request

    def request_of_ended(self, stream: str) -> str | None:
        """The request of a stream that has ended."""
        return self._ended[stream][1] if stream in self._ended else None

    def why_ended(self, stream: str) -> RefusalReason | None:
        """Why a stream has ended; None if it has not, or was never seen."""
        return self._ended[stream][0] if stream in self._ended else None

    def add_reader(
        self, session: S, reader: Reader, stream: str
    ) -> tuple[Opened, list[StreamReply]]:
        """A reader was granted its claim; returns what it has missed.

        That is everything, unless it was granted its claim on this connection before: what was sent
        there has arrived, or the connection is lost.
        """
        found = self._streams[stream]
        is_known = found.readers.get(reader) is session
        found.readers[reader] = session
        return found.opened(reader.pull), [] if is_known else found.announced(reader.pull)

    def is_growing(self, request: str) -> bool:
        """Whether ``request`` has a stream that is not complete."""
        stream = self._of_request.get(request)
        return stream is not None and self._streams[stream].completed is None

    def growing(self) -> list[str]:
        """Requests whose streams are not complete."""
        return [
            request
            for request, stream in self._of_request.items()
            if self._streams[stream].completed is None
        ]

    def park_reader(self, session: S, message: Follow, now: float) -> bool:
        """Let a reader wait for its stream, as it has asked last; False if too many wait."""
        self.remove_reader(message.stream, message.reader)
        of_one = self._parked_of.get(session, 0)
        if self._num_parked >= MAX_PARKED or of_one >= MAX_PARKED_OF_ONE:
            return False
        if len(self._until) >= 2 * MAX_PARKED:
            self._until = [each for each in self._until if self._is_parked(each[2])]
            heapq.heapify(self._until)
        self._parked.setdefault(message.stream, {})[message.reader] = session, message
        self._num_parked += 1
        self._parked_of[session] += 1
        heapq.heappush(self._until, (now + PARK_S, next(self._numbers), message))
        return True

    def grow(self, growth: StreamGrowth) -> Iterator[tuple[S, StreamReply]]:
        """Announce blocks of a stream; returns what its readers are sent."""
        found = self._find(growth.request)
        if found is None or found.completed is not None:
            return
        found.has_begun = True
        for more in growth.blocks:
            first, known = found.grown.setdefault(more.group, (more.first, []))
            known += more.ids[first + len(known) - more.first :]
        for reader, session in found.readers.items():
            yield session, Grown(growth.request, reader.pull, growth.blocks)

    def complete(self, completion: StreamCompletion) -> Iterator[tuple[S, StreamReply]]:
        """Complete a stream; returns what its readers are sent."""
        request = completion.offer.request
        found = self._find(request)
        if found is None:
            return
        found.completed = tuple((group.first, group.ids) for group in completion.ticket.blocks)
        found.grown.clear()
        for reader, session in found.readers.items():
            yield session, Completed(request, reader.pull, found.completed)

    def remove_reader(self, name: str, reader: Reader) -> None:
        """A reader follows no more; ``name`` is its request, or its stream while it is parked."""
        found = self._find(name)
        if found is not None:
            found.readers.pop(reader, None)
        elif (waiting := self._parked.get(name)) is not None and reader in waiting:
            self._forget_parked(waiting.pop(reader)[0])
            if not waiting:
                del self._parked[name]

    def close_stream(self, request: str, why: RefusalReason) -> list[tuple[S, Reader]]:
        """End a stream whose lease ends; returns readers to be refused: it was not complete."""
        stream = self._of_request.pop(request, None)
        if stream is None:
            return []
        found = self._streams.pop(stream)
        self._ended[stream] = why, request
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)
        return [] if found.completed is not None else [(s, r) for r, s in found.readers.items()]

    def take_overdue(self, now: float) -> list[tuple[S, Follow]]:
        """Take the readers that were parked for too long."""
        overdue = []
        while self._until and self._until[0][0] <= now:
            _, _, message = heapq.heappop(self._until)
            if self._is_parked(message):
                overdue.append(self._parked[message.stream][message.reader])
                self.remove_reader(message.stream, message.reader)
        return overdue

    def next_deadline(self) -> float:
        """When :meth:`take_overdue` is due."""
        return self._until[0][0] if self._parked else math.inf

    def _find(self, request: str) -> _Stream[S] | None:
        stream = self._of_request.get(request)
        return None if stream is None else self._streams[stream]

    def _take_parked(self, stream: str) -> list[tuple[S, Follow]]:
        taken = list(self._parked.pop(stream, {}).values())
        for session, _ in taken:
            self._forget_parked(session)
        return taken

    def _is_parked(self, message: Follow) -> bool:
        """Whether the reader waits as it asked in ``message``."""
        waiting = self._parked.get(message.stream, {}).get(message.reader)
        return waiting is not None and waiting[1] is message

    def _forget_parked(self, session: S) -> None:
        self._num_parked -= 1
        self._parked_of[session] -= 1
        if not self._parked_of[session]:
            del self._parked_of[session]
