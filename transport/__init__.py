"""One-sided reads between registered memories: the reader copies, the lender takes no part.

::

    base            the interface: register, address, connect, read, poll, close
    types, errors   what it takes and returns, and what can go wrong
    nixl/           the transport for real engines, over NIXL
    ucx/            over UCX alone, for machines where NIXL does not load
    faulty          wraps another transport and injects faults (fault_schedule draws them)
    choose          picks NIXL or UCX, as configured and as available
    address         the checksummed envelope around a backend's address
    regions         what is registered, and whether spans stay inside it
    streams         points in a GPU's work, to wait for before memory is written
    hugepages       huge pages under host memory, and the warning where they are small
    closing         ``with`` blocks for everything that has ``close()``
    testing/        the contract that every transport passes, as tests to inherit, and a
                    transport within one process, with faults on demand

How to add a transport is in ``docs/api.md``.  Nothing above a transport needs to change.
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
