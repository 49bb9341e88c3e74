"""What can go wrong when bytes move, in one hierarchy.

Backends map their own exceptions to these at the edge, so that nothing above
the transport needs to import nixl or ucxx.
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of everything a transport raises or settles a read with."""


class BadSpans(TransportError, ValueError):
    """Our own request makes no sense: wrong dtype, shape, length or address."""


class OutOfBounds(TransportError):
    """A span reaches outside memory that was registered, on either side."""


class BadAddress(TransportError):
    """The bytes a peer gave as its address cannot be used to reach it."""


class PeerUnknown(TransportError):
    """The peer was never connected, or is disconnected by now."""


class PeerLost(TransportError):
    """The peer went away; reads in flight from it have failed."""


class BackendFailure(TransportError):
    """The backend refused or failed for a reason of its own."""


class TransportUnavailable(TransportError):
    """The backend cannot run here: a missing library, plugin or device."""


class TransportClosed(TransportError):
    """The transport was closed before this call."""
