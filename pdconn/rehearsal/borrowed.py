"""A transport whose user may close it without ending it for its owner."""

from __future__ import annotations

from transport import PeerId, Transport
from transport.forwarding import ForwardingTransport


class BorrowedTransport(ForwardingTransport):
    """``close`` disconnects from the peers connected here, and no more.

    Args:
        owner: the transport; nobody else uses it meanwhile.
    """

    def __init__(self, owner: Transport) -> None:
        super().__init__(owner)
        self._peers: dict[PeerId, None] = {}

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self._peers[peer] = None
        return peer

    def disconnect(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)
        super().disconnect(peer)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
