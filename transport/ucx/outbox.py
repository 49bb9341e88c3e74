"""Messages that UCX may still read from, and the buffers that some of them were gathered in.

A buffer is given back once its message is done, whichever way it ended, and
never before: until then UCX may read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transport.ucx.gather import Bytes
from transport.ucx.pieces import STAGED_BYTES
from transport.ucx.worker import UcxRequest

_SPARE = 8


@dataclass(slots=True, eq=False)
class Sending:
    """A message on its way since ``since``, s; ``buffer`` is to be given back after it."""

    request: UcxRequest
    buffer: Bytes | None
    since: float


class Buffers:
    """Staging buffers of ``STAGED_BYTES``, at most ``limit`` at a time, a few kept spare."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spare: list[Bytes] = []
        self.taken = 0

    def take(self) -> Bytes | None:
        """A buffer with whatever is in it, or None at the limit."""
        if self.taken == self._limit:
            return None
        self.taken += 1
        return self._spare.pop() if self._spare else np.empty(STAGED_BYTES, dtype=np.uint8)

    def reap(self, sending: list[Sending]) -> list[Sending]:
        """Those of ``sending`` that UCX still reads from; the others' buffers are free."""
        left = []
        for message in sending:
            if not message.request.done:
                left.append(message)
            elif message.buffer is not None:
                self.give(message.buffer)
        return left

    def give(self, buffer: Bytes) -> None:
        """Take one back; nothing uses it any more."""
        self.taken -= 1
        if len(self._spare) < _SPARE:
            self._spare.append(buffer)
