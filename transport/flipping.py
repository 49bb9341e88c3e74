"""A transport that spoils what it reads: the negative control of every end-to-end check.

It wraps a real one and flips one byte of every read that went well, as a bad cable
under a missing checksum would.  A check that stays green with it checks
nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from transport.base import Transport
from transport.types import Memory, PeerId, ReadId, Settled, Spans


class FlippingTransport(Transport):
    """``inner``, but every read has one wrong byte, in the last number of its first span.

    Host memory only.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._spans: dict[ReadId, Spans] = {}

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
        read = self._inner.read(peer, spans)
        self._spans[read] = spans
        return read

    def poll(self, read: ReadId) -> Settled | None:
        settled = self._inner.poll(read)
        if settled is not None:
            spans = self._spans.pop(read)
            if settled.ok and len(spans):
                # The highest byte of a little-endian float: a number around 1 turns into
                # one of some thousands, and does not turn into infinity.
                last = int(spans.local[0]) + int(spans.nbytes[0]) - 1
                ctypes.c_uint8.from_address(last).value ^= 0x7B
        return settled

    def describe(self) -> dict[str, str]:
        return {**self._inner.describe(), "flipping": "one byte of every read"}

    def close(self) -> None:
        self._inner.close()
