"""Moves bytes between registered memories, one-sidedly.

``transport.nixl`` is the backend for real engines, ``transport.ucx`` the one for
machines where NIXL does not load, ``transport.choose`` picks between them.
``transport.inprocess`` is an in-process one with scriptable faults,
``transport.testing`` the contract that all pass and that a backend of yours can
be held to.
"""

from transport.base import Transport
from transport.errors import (
    BackendFailure,
    BadAddress,
    BadSpans,
    OutOfBounds,
    PeerLost,
    PeerUnknown,
    TransportClosed,
    TransportError,
    TransportUnavailable,
)
from transport.types import (
    HOST,
    Device,
    Memory,
    PeerId,
    ReadId,
    ReadStats,
    Settled,
    Spans,
)

__all__ = [
    "HOST",
    "BackendFailure",
    "BadAddress",
    "BadSpans",
    "Device",
    "Memory",
    "OutOfBounds",
    "PeerId",
    "PeerLost",
    "PeerUnknown",
    "ReadId",
    "ReadStats",
    "Settled",
    "Spans",
    "Transport",
    "TransportClosed",
    "TransportError",
    "TransportUnavailable",
]
