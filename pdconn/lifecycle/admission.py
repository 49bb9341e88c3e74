"""Admission control of a listener: which connections may stay, and how long.

Any host can open a connection.  A connection *stalls* while it waits for bytes of its peer (a
greeting, the rest of a request) or while the peer does not read its replies.  It is closed after
``stall_s``.  When too many connections stall at once, the oldest of them is closed.  One host
cannot use up all connections.

The side channel of prefill and the HTTP listener of the router use this class; each decides for
itself when a connection stalls.

Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of a listener.

    Attributes:
        connections: open at once; the listener lowers it to fit the process's file limit.
        per_host: open at once from one host.
        stalled: of the open ones, how many may stall at once.
        stall_s: seconds that one may stall.
        accept_pause_s: seconds without accept() after the system could not open a connection.
    """

    connections: int = 8192
    per_host: int = 2048
    stalled: int = 512
    stall_s: float = 10.0
    accept_pause_s: float = 0.5


class AdmissionControl(Generic[S]):
    """Counts sessions by host, and times those that stall.

    Attributes:
        deadline: when the first session may be overdue; infinity while none stalls.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._hosts: dict[S, str] = {}
        self._num_of_host: Counter[str] = Counter()
        self._stalled: dict[Hashable, OrderedDict[S, float]] = {}
        self.deadline = math.inf

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, session: S) -> bool:
        return session in self._hosts

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of connections is open."""
        return len(self._hosts) >= self._limits.connections

    @property
    def is_crowded(self) -> bool:
        """Whether the maximum number of sessions stalls; the next one closes another."""
        return sum(map(len, self._stalled.values())) >= self._limits.stalled

    @property
    def next_out(self) -> tuple[S, float] | None:
        """The session that is closed next, and since when it stalls; None if none stalls."""
        # The oldest one, of the most frequent kind: a flood of idle connections does not close
        # connections that stall for another reason, and delays others by less than a greeting.
        queue = max(self._stalled.values(), key=len, default=None)
        if not queue:
            return None
        session, until = next(iter(queue.items()))
        return session, until - self._limits.stall_s

    def refusal(self, host: str) -> str | None:
        """Why another connection from ``host`` is refused now, or None."""
        if self.is_full:
            return f"{self._limits.connections} connections are open"
        if self._num_of_host[host] >= self._limits.per_host:
            return f"{self._limits.per_host} connections from {host} are open"
        return None

    def admit(self, session: S, host: str, now: float, stalls: Hashable = True) -> S | None:
        """Add a session, which stalls at first; returns the session to close for it, or None."""
        self._hosts[session] = host
        self._num_of_host[host] += 1
        crowded_out = self.next_out if self.is_crowded else None
        self.note_stall(session, stalls, now)
        return None if crowded_out is None else crowded_out[0]

    def note_stall(self, session: S, stalls: Hashable, now: float) -> None:
        """Record whether an admitted session stalls now; its timer starts with the first call.

        ``stalls`` may name the reason, where a listener has several; falsy: it does not stall.
        """
        for kind, queue in self._stalled.items():
            if kind != stalls:
                queue.pop(session, None)
        if stalls and session in self._hosts:
            queue = self._stalled.setdefault(stalls, OrderedDict())
            queue.setdefault(session, now + self._limits.stall_s)
        self._note_deadline()

    def remove_session(self, session: S) -> None:
        """Remove a closed session.  Unknown sessions are ignored."""
        host = self._hosts.pop(session, None)
        if host is None:
            return
        self.note_stall(session, False, 0.0)
        self._num_of_host[host] -= 1
        if not self._num_of_host[host]:
            del self._num_of_host[host]

    def overdue(self, now: float) -> Iterator[S]:
        """Sessions that stall for too long.  Close each before taking the next."""
        for queue in list(self._stalled.values()):
            while queue:
                session, until = next(iter(queue.items()))
                if until > now:
                    break
                del queue[session]
                self._note_deadline()
                yield session

    def _note_deadline(self) -> None:
        firsts = (next(iter(queue.values()), math.inf) for queue in self._stalled.values())
        self.deadline = min(firsts, default=math.inf)
