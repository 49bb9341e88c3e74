"""What the scheduler's half tells the workers' half in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import Ticket


@dataclass(slots=True)
class Orders:
    """One step's orders, carried out in this order.

    Attributes:
        doomed: requests to report failed, with the reason.
        holds: requests that arrived with a ticket: request, pull id, ticket.
        pulls: requests that got blocks.
        cancels: held requests that want nothing any more.
    """

    doomed: list[tuple[str, str]] = field(default_factory=list)
    holds: list[tuple[str, str, Ticket]] = field(default_factory=list)
    pulls: list[tuple[str, Need]] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
