"""Length-prefixed frames over a byte stream.

A frame is a four-byte big-endian length and that many bytes.  The limit is
checked on the length alone, before anything is kept for the body.
"""

from __future__ import annotations

from pdconn.protocol.errors import FrameError

_PREFIX = 4


def frame(body: bytes) -> bytes:
    """``body`` with its length before it.

    Raises:
        FrameError: longer than the four bytes can say.
    """
    if len(body) >= 2**32:
        raise FrameError("frame length", "under 2^32", len(body))
    return len(body).to_bytes(_PREFIX, "big") + body


class Frames:
    """Cuts a byte stream into frames of at most ``max_nbytes``.

    Example:
        >>> frames = Frames(max_nbytes=16)
        >>> frames.feed(frame(b"one") + frame(b"two")[:5])
        [b'one']
        >>> frames.feed(frame(b"two")[5:])
        [b'two']
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bytes arrived; return the bodies that they complete.

        Raises:
            FrameError: a length above the limit; the stream is lost from there on.
        """
        self._pending += data
        bodies = []
        start = 0
        while len(self._pending) - start >= _PREFIX:
            length = int.from_bytes(self._pending[start : start + _PREFIX], "big")
            if length > self._max_nbytes:
                raise FrameError("frame length", f"at most {self._max_nbytes}", length)
            end = start + _PREFIX + length
            if len(self._pending) < end:
                break
            bodies.append(bytes(self._pending[start + _PREFIX : end]))
            start = end
        del self._pending[:start]
        return bodies
