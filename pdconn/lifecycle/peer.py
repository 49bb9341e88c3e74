"""A peer: one boot of one lender, as a decode rank knows it.

::

    UNKNOWN ──dialled──► GREETING ──welcomed──► READY
                            │                     │
                            └───────closed────────┴──► CLOSED

Everything that the peer said is checked before anything is kept for it, so a peer
is READY with a whole plan or it is CLOSED with a reason.
"""

from __future__ import annotations

from enum import StrEnum


class PeerState(StrEnum):
    """Where a peer stands."""

    UNKNOWN = "unknown"
    GREETING = "greeting"
    READY = "ready"
    CLOSED = "closed"


TRANSITIONS: dict[tuple[PeerState, str], PeerState] = {
    (PeerState.UNKNOWN, "dialled"): PeerState.GREETING,
    (PeerState.GREETING, "welcomed"): PeerState.READY,
    (PeerState.GREETING, "closed"): PeerState.CLOSED,
    (PeerState.READY, "closed"): PeerState.CLOSED,
}
"""The whole life of a peer; anything else is a mistake of the caller."""


def after(state: PeerState, event: str) -> PeerState:
    """The state that ``event`` leads to.

    Raises:
        ValueError: the event makes no sense in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a {state} peer cannot be {event}") from None
