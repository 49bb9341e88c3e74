"""Length-prefixed frames over a byte stream.

A frame is a four-byte big-endian length and that many bytes: a CRC-32 of the body,
big-endian, and the body.  The limit is checked on the length alone, before anything is kept
for the body.  The CRC is for accidents, where nothing authenticates the other side: TCP's
own checksum misses some, and a greeting with one wrong bit would move wrong bytes.
"""

from __future__ import annotations

from zlib import crc32

from pdconn.protocol.errors import FrameError

_PREFIX = 4
_CRC = 4


def frame(body: bytes) -> bytes:
    """``body`` with its length and CRC before it.

    Raises:
        FrameError: longer than the four bytes can say.
    """
    length = _CRC + len(body)
    if length >= 2**32:
        raise FrameError("frame length", "under 2^32", length)
    return length.to_bytes(_PREFIX, "big") + crc32(body).to_bytes(_CRC, "big") + body


class Frames:
    """Cuts a byte stream into frames with bodies of at most ``max_nbytes``.

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

    def __len__(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """Bytes arrived; return the bodies that they complete.

        Raises:
            FrameError: a length above the limit or below a CRC's, or a body that is not
                the one that was sent; the stream is lost from there on.
        """
        self._pending += data
        bodies = []
        start = 0
        while len(self._pending) - start >= _PREFIX:
            length = int.from_bytes(self._pending[start : start + _PREFIX], "big")
            if not _CRC <= length <= self._max_nbytes + _CRC:
                most = self._max_nbytes + _CRC
                raise FrameError("frame length", f"{_CRC} to {most}", length)
            end = start + _PREFIX + length
            if len(self._pending) < end:
                break
            bodies.append(_checked(bytes(self._pending[start + _PREFIX : end])))
            start = end
        del self._pending[:start]
        return bodies


def _checked(framed: bytes) -> bytes:
    seen, body = int.from_bytes(framed[:_CRC], "big"), framed[_CRC:]
    if crc32(body) != seen:
        raise FrameError("frame CRC", f"{crc32(body):08x}", f"{seen:08x}")
    return body
