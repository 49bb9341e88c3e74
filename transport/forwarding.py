"""A transport that forwards all calls to another one: the base of those that change some."""

from __future__ import annotations

from collections.abc import Sequence

from transport.base import Transport
from transport.types import Memory, PeerId, ReadId, Settled, Spans


class ForwardingTransport(Transport):
    """Forwards all calls to ``inner``."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def register(self, memories: Sequence[Memory]) -> None:
        self._inner.register(memories)

    def address(self) -> bytes:
        return self._inner.address()

    def connect(self, address: bytes) -> PeerId:
        return self._inner.connect(address)

    def disconnect(self, peer: PeerId) -> None:
        self._inner.disconnect(peer)

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        return self._inner.read(peer, spans)

    def poll(self, read: ReadId) -> Settled | None:
        return self._inner.poll(read)

    @property
    def poll_pause_s(self) -> float:
        return self._inner.poll_pause_s

    def check(self) -> None:
        self._inner.check()

    def describe(self) -> dict[str, str]:
        return self._inner.describe()

    def close(self) -> None:
        self._inner.close()
