"""One ticket for the answers of a best-of-n request.

vLLM makes a request of each answer of a best-of-n request (``n > 1``), and shows the client
the ticket of the child that finishes last.  Which one that is, and how many there are, the
engine does not know.  So the first child that finishes is lent, and its siblings, which have
the same prompt, return its ticket.
"""

from __future__ import annotations

from pdconn.protocol.ticket import Ticket
from pdconn.vllm.prompt import parent_of


class SharedTickets:
    """Tickets that the children of best-of-n requests share, while they are lent."""

    def __init__(self) -> None:
        self._tickets: dict[str, tuple[Ticket, float]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def find(self, request_id: str, prompt: str, now: float) -> Ticket | None:
        """The ticket of a sibling with the same prompt, unless it is too old to be shared."""
        parent = parent_of(request_id)
        if parent is None or parent not in self._tickets:
            return None
        ticket, until = self._tickets[parent]
        return ticket if ticket.prompt == prompt and now < until else None

    def add(self, ticket: Ticket, until: float) -> None:
        """Siblings that finish before ``until`` share ``ticket``."""
        parent = parent_of(ticket.request_id)
        if parent is not None:
            self._tickets[parent] = ticket, until

    def forget(self, request_id: str) -> None:
        """The lease of ``request_id`` has ended."""
        parent = parent_of(request_id)
        if parent in self._tickets and self._tickets[parent][0].request_id == request_id:
            del self._tickets[parent]
