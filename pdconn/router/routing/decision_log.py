"""The last decisions with their outcomes, but without the requests: those hold bodies."""

from __future__ import annotations

from collections.abc import Iterator

from pdconn.router.routing.policy import Decision
from pdconn.router.routing.routed_request import PENDING, Outcome

MOST_DECISIONS = 512
MOST_HASHES = 1_000_000

Logged = tuple[Decision, Outcome]


class DecisionLog:
    """The last decisions by request id, bounded by number and by the block hashes they keep."""

    def __init__(self, most: int = MOST_DECISIONS, most_hashes: int = MOST_HASHES) -> None:
        self._most = most
        self._most_hashes = most_hashes
        self._entries: dict[str, Logged] = {}
        self._num_hashes = 0

    def add_decision(self, decision: Decision) -> None:
        """Add a decision; drops the oldest beyond the limits."""
        self._drop(decision.request_id)
        self._entries[decision.request_id] = decision, PENDING
        self._num_hashes += decision.num_hashes
        while len(self._entries) > self._most or self._num_hashes > self._most_hashes:
            self._drop(next(iter(self._entries)))

    def end_decision(self, decision: Decision, outcome: Outcome) -> None:
        """Set the outcome of a decision, if it is still kept; replaces an earlier one."""
        entry = self._entries.get(decision.request_id)
        if entry is not None and entry[0] is decision:
            self._entries[decision.request_id] = decision, outcome

    def find_decision(self, request_id: str) -> Logged | None:
        """The decision for a request, if it is kept."""
        return self._entries.get(request_id)

    def newest(self) -> Iterator[Logged]:
        """Newest first."""
        return reversed(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._num_hashes -= entry[0].num_hashes
