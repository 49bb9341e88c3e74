"""A request in work at a decode rank, and when it must be looked at."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from pdconn.lifecycle.pull import Pull
from pdconn.planning.plan import Need, Plan
from pdconn.protocol.messages import Reader
from pdconn.protocol.ticket import Ticket
from pdconn.puller.peers import Peer
from pdconn.puller.proving import Verification
from pdconn.puller.results import Measured


@dataclass(slots=True, eq=False)
class Entry:
    """A request: its machine, whose it is, and what is in flight for it.

    ``digest`` is the ticket's; ``plan`` may be why there is none; ``alarm`` is when it
    will be ticked, or sooner.
    """

    request: str
    reader: Reader
    ticket: Ticket
    digest: bytes
    machine: Pull
    peer: Peer
    measured: Measured
    need: Need | None = None
    plan: Plan | str | None = None
    proof: Verification | None = None
    reading: int = 0
    error: str | None = None
    alarm: float | None = None


class Alarms:
    """When which entry is to be ticked.

    An entry has one alarm that counts, and it may ring too early: what was put off is set
    anew when it rings, which costs less than to find it before.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, entry: Entry) -> None:
        """Let the entry's alarm ring at its machine's deadline, or sooner."""
        deadline = entry.machine.next_deadline()
        if deadline is not None and (entry.alarm is None or deadline < entry.alarm):
            heapq.heappush(self._heap, (deadline, entry.request))
            entry.alarm = deadline

    def next_deadline(self) -> float | None:
        """When the first one rings."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[str]:
        """Requests whose alarm rings, each once; some of them may be over."""
        due: dict[str, None] = {}
        while self._heap and self._heap[0][0] <= now:
            due[heapq.heappop(self._heap)[1]] = None
        return list(due)
