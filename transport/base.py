"""The interface that every transport implements.

It is small on purpose: register memory once, exchange addresses, post reads, poll them.
A read cannot be cancelled, because no RDMA stack guarantees that a cancelled read writes nothing
more (a released NIXL READ does write, as the contract's tests show); a caller can only wait for it.

A transport belongs to one thread at a time.  ``read`` may copy before it returns, so it is never
called on an engine's thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from transport.closing import Closing
from transport.types import Memory, PeerId, ReadId, Settled, Spans


class Transport(Closing):
    """Moves bytes from peers' registered memory into ours, one-sidedly."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name, as in configuration: ``nixl``, ``ucx`` or ``memory``."""

    @abstractmethod
    def register(self, memories: Sequence[Memory]) -> None:
        """Pin ``memories`` so that peers can read them and reads can land in them.

        One region is pinned per memory.  Overlapping memories are an error.

        Raises:
            BadSpans: two memories overlap.
            BackendFailure: the backend refused a region.
        """

    @abstractmethod
    def address(self) -> bytes:
        """What a peer needs to connect to us and to read the memory registered so far."""

    @abstractmethod
    def connect(self, address: bytes) -> PeerId:
        """Make the peer at ``address`` readable.  Idempotent.

        Raises:
            BadAddress: the bytes are not an address of this backend.
        """

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer.  Unknown peers are ignored; its reads settle as ``PeerLost``."""

    @abstractmethod
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        """Start copying ``spans`` from ``peer``; may block while it copies.

        Empty spans settle at once.  Runtime failures do not raise here but settle the read, so
        that callers handle them in one place.

        Raises:
            PeerUnknown: ``peer`` is not connected.
            TransportClosed: after ``close``.
        """

    @abstractmethod
    def poll(self, read: ReadId) -> Settled | None:
        """How the read has ended, or None while it can still write.

        A read is forgotten once its ``Settled`` was returned.

        Raises:
            KeyError: ``read`` was never posted, or its ``Settled`` was returned before.
        """

    @property
    def poll_pause_s(self) -> float:
        """The least pause between polls that does not slow down the reads in flight, in seconds."""
        return 0.0

    def check(self) -> None:
        """Raise if the backend's own threads have died.  Cheap; may be called on any thread.

        Raises:
            BackendFailure: they have died: neither our reads nor our peers' reads will end.
        """

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Facts for logs: library versions, and the transports and settings in use."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect from all peers, unregister and release everything.  Idempotent.

        Once it has returned nothing is written, and every read is forgotten.

        Raises:
            BackendFailure: a read can still write.  Memory stays registered and
                must stay allocated; poll the reads, or close again later.
        """
