"""A transport whose user may close it without ending it for its owner."""

from __future__ import annotations

from collections.abc import Sequence

from transport import Memory, PeerId, ReadId, Settled, Spans, Transport


class BorrowedTransport(Transport):
    """Passes all calls on; ``close`` disconnects from the peers connected here, and no more.

    Args:
        owner: the transport; nobody else uses it meanwhile.
    """

    def __init__(self, owner: Transport) -> None:
        self._owner = owner
        self._peers: dict[PeerId, None] = {}

    @property
    def name(self) -> str:
        return self._owner.name

    def register(self, memories: Sequence[Memory]) -> None:
        self._owner.register(memories)

    def address(self) -> bytes:
        return self._owner.address()

    def connect(self, address: bytes) -> PeerId:
        peer = self._owner.connect(address)
        self._peers[peer] = None
        return peer

    def disconnect(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)
        self._owner.disconnect(peer)

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        return self._owner.read(peer, spans)

    def poll(self, read: ReadId) -> Settled | None:
        return self._owner.poll(read)

    def check(self) -> None:
        self._owner.check()

    def describe(self) -> dict[str, str]:
        return self._owner.describe()

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
