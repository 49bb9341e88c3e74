"""What the scheduler's half tells the workers' half in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdconn.integrity.sums import Terms
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList, Ticket


@dataclass(slots=True)
class Orders:
    """One step's orders, carried out in this order.

    Attributes:
        doomed: requests to report failed, with the reason.
        holds: requests that arrived with a ticket: request, pull id, ticket.
        pulls: requests that got blocks.
        cancels: held requests that want nothing any more.
        sums: finished requests whose lent blocks are to be summed: terms, lent blocks.
    """

    doomed: list[tuple[str, str]] = field(default_factory=list)
    holds: list[tuple[str, str, Ticket]] = field(default_factory=list)
    pulls: list[tuple[str, Need]] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    sums: list[tuple[Terms, tuple[BlockList, ...]]] = field(default_factory=list)
