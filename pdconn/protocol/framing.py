"""Length-prefixed frames over a byte stream.

A frame is a four-byte big-endian length and that many bytes: a CRC-32 of the body,
big-endian, and the body.  The limit is checked on the length alone, before anything is kept
for the body.  The CRC detects accidents where nothing authenticates the other side: TCP's
own checksum misses some, and a Welcome with one wrong bit would move wrong bytes.
"""

from __future__ import annotations

from zlib import crc32

from pdconn.protocol.errors import FrameError

_PREFIX = 4
_CRC = 4


def frame(body: bytes) -> bytes:
    """``body`` with its length and CRC before it.

    Raises:
        FrameError: the length does not fit into four bytes.
    """
    length = _CRC + len(body)
    if length >= 2**32:
        raise FrameError("frame length", "under 2^32", length)
    return length.to_bytes(_PREFIX, "big") + crc32(body).to_bytes(_CRC, "big") + body


class Frames:
    """Splits a byte stream into frames with bodies of at most ``max_nbytes``.

    ``max_later`` is the limit of all bodies but the first, where that is another.

    Attributes:
        unfinished: bytes of a frame that has not arrived whole.

    Example:
        >>> frames = Frames(max_nbytes=16)
        >>> frames.feed(frame(b"one") + frame(b"two")[:5])
        [b'one']
        >>> frames.feed(frame(b"two")[5:])
        [b'two']
    """

    def __init__(self, max_nbytes: int, max_later: int | None = None) -> None:
        self._max_nbytes = max_nbytes
        self._max_later = max_nbytes if max_later is None else max_later
        self.unfinished = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bytes arrived; return the bodies that they complete.

        Raises:
            FrameError: a length above the limit or below a CRC's, or a body with another CRC;
                the stream is unusable from there on.
        """
        if self.unfinished:
            self.unfinished += data
            bodies, end = self._split(self.unfinished)
            del self.unfinished[:end]
        else:  # most frames arrive whole
            bodies, end = self._split(data)
            if end < len(data):
                self.unfinished += data[end:]
        return bodies

    def _split(self, stream: bytes | bytearray) -> tuple[list[bytes], int]:
        """The bodies of the complete frames, and the offset of their end."""
        bodies, start, nbytes = [], 0, len(stream)
        while nbytes - start >= _PREFIX:
            length = int.from_bytes(stream[start : start + _PREFIX], "big")
            if not _CRC <= length <= self._max_nbytes + _CRC:
                raise _bad_length(bytes(stream[start : start + _PREFIX]), self._max_nbytes + _CRC)
            body, end = start + _PREFIX + _CRC, start + _PREFIX + length
            if nbytes < end:
                break
            bodies.append(_checked(stream[body - _CRC : body], bytes(stream[body:end])))
            start, self._max_nbytes = end, self._max_later
        return bodies, start


def _bad_length(prefix: bytes, most: int) -> FrameError:
    """The error of a length that is none; text of another protocol is shown as text."""
    expected = f"{_CRC} to {most}"
    if not (prefix.isascii() and prefix.decode().isprintable()):
        return FrameError("frame length", expected, int.from_bytes(prefix, "big"))
    what = "an HTTP server answers here" if prefix == b"HTTP" else "this is text"
    return FrameError("frame length", expected, prefix, f"{what}, not a side channel")


def _checked(crc: bytes | bytearray, body: bytes) -> bytes:
    computed = crc32(body)
    if computed != int.from_bytes(crc, "big"):
        raise FrameError("frame CRC", f"{computed:08x}", crc.hex())
    return body
