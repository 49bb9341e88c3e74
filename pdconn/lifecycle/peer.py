"""A peer: one boot of one lender, as seen by a decode rank.

::

    UNKNOWN ──dialled──► GREETING ──welcomed──► READY
                            │                     │
                            └───────closed────────┴──► CLOSED

Everything that a peer sends is checked before anything is stored for it, so a peer is either READY
with a complete pairing, or CLOSED with a reason.
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
"""All transitions of a peer; any other event is an error of the caller."""
