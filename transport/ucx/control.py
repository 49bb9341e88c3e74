"""The control messages between a reader and a lender, beside the bytes themselves.

    reader                                         lender
    ReaderHello(session, worker address) ────►     connects back to the reader
    PieceRequest(session, number, tag, runs) ►     checked, sent as one message
        ◄── the runs' bytes, tagged with the request's tag
    PieceRequest(…)  ────────────────────────►
        ◄── PieceRefused(session, tag, reason), and a message that is too long

A frame fits one packet of UCX, and so arrives whole or not at all.  Every frame ends in a keyed
BLAKE2b of the rest.  The key is the lender's: random at every boot, it travels in the lender's
address through the side channel only.  Nothing of a frame is used before its hash is verified, so
a sender without the address cannot make us allocate, connect or answer, and a frame recorded
before a restart is invalid after it.  The numbers of a session's frames only grow, so frames cannot
be replayed.

    "pdU2" | kind u8 | 0 u8 | count u16 | number u64 | tag u64 | session 16 | body | mac 32
    body:   ReaderHello   the address of the reader's worker, ``count`` bytes
            PieceRequest  ``count`` addresses u64, then ``count`` lengths u32
            PieceRefused  ``count`` bytes of UTF-8: the reason; number 1: out of bounds
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

import numpy as np

from transport.errors import TransportError
from transport.types import U64
from transport.ucx.library import EAGER_BYTES

SessionId = NewType("SessionId", bytes)
"""16 random bytes that a reader draws for each connection."""

PROTOCOL = "pdU2"
"""The version of these frames and of the limits of pieces; an address names it.

In ``pdU1`` pieces of several runs had 512 KiB at most, since both sides copied them.
"""

SECRET_BYTES = 32
SESSION_BYTES = 16
MAC_BYTES = 32
MAX_RUNS = 512
MAX_WORKER_ADDRESS_BYTES = 6000
MAX_REASON_BYTES = 500
MAX_FRAME_BYTES = EAGER_BYTES - 512
"""512 bytes are left for UCX's own headers."""

_HEAD = struct.Struct("<4sBBHQQ16s")
_MAGIC = PROTOCOL.encode()
SAME_PDCONN = "run the same pdconn on both sides"
_LAST_ADDRESS = np.uint64(2**63 - 1)


class BadFrame(TransportError):
    """The bytes are not a valid frame, or their sender does not hold the secret."""


class OtherProtocol(BadFrame):
    """The sender holds the secret, and uses another version of the protocol."""


@dataclass(frozen=True, slots=True)
class ReaderHello:
    """A reader's first frame: where its worker can be reached."""

    session: SessionId
    worker_address: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PieceRequest:
    """Send these runs, one after the other, as one message tagged ``tag``.

    ``addresses`` and ``nbytes`` are uint64 of shape (n,), 1 <= n <= ``MAX_RUNS``;
    no run is empty or ends beyond 63 bits.
    """

    session: SessionId
    number: int
    tag: int
    addresses: U64
    nbytes: U64


@dataclass(frozen=True, slots=True)
class PieceRefused:
    """The lender's answer to a ``PieceRequest`` that it will not serve.

    ``out_of_bounds``: a run lies outside what is registered.
    """

    session: SessionId
    tag: int
    out_of_bounds: bool
    reason: str


Frame = ReaderHello | PieceRequest | PieceRefused


def encode(frame: Frame, secret: bytes) -> bytes:
    """``frame``, authenticated with ``secret``, the lender's.

    Raises:
        BadFrame: it is larger than ``decode`` would accept.
    """
    number, tag = 0, 0
    if isinstance(frame, ReaderHello):
        kind, count, body = 1, len(frame.worker_address), frame.worker_address
    elif isinstance(frame, PieceRequest):
        kind, count, number, tag = 2, len(frame.addresses), frame.number, frame.tag
        body = frame.addresses.astype("<u8").tobytes() + frame.nbytes.astype("<u4").tobytes()
    else:
        body = frame.reason.encode()[:MAX_REASON_BYTES]
        kind, count, number, tag = _REFUSED, len(body), int(frame.out_of_bounds), frame.tag
    plain = _HEAD.pack(_MAGIC, kind, 0, count, number, tag, frame.session) + body
    if len(plain) + MAC_BYTES > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(plain) + MAC_BYTES} bytes, at most {MAX_FRAME_BYTES}")
    return plain + _mac(plain, secret)


def session_in(data: bytes) -> SessionId:
    """The session that a frame claims to belong to, which selects the secret to verify it with."""
    return SessionId(data[_HEAD.size - SESSION_BYTES : _HEAD.size])


def is_answer(data: bytes) -> bool:
    """Whether ``data`` claims to be a ``PieceRefused``, for our reader.  Not verified."""
    return len(data) > _HEAD.size and data[4] == _REFUSED


def decode(data: bytes, secret: bytes) -> Frame:
    """The frame in ``data``, if its sender holds ``secret``.

    Raises:
        OtherProtocol: the sender does, and uses another version.
        BadFrame: the sender does not, or the data is no frame.
    """
    if not _HEAD.size + MAC_BYTES <= len(data) <= MAX_FRAME_BYTES:
        raise BadFrame(
            f"frame of {len(data)} bytes, expected {_HEAD.size + MAC_BYTES} to {MAX_FRAME_BYTES}"
        )
    plain, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(plain, secret)):
        raise BadFrame(f"frame of {len(data)} bytes is not authenticated by our secret")
    magic, kind, zero, count, number, tag, session = _HEAD.unpack_from(plain)
    if magic != _MAGIC:
        raise OtherProtocol(f"frame of protocol {magic!r}, expected {_MAGIC!r}: {SAME_PDCONN}")
    if zero != 0 or kind not in _BODIES:
        raise BadFrame(f"frame of kind {kind}, {zero}: expected 1 to 3, 0")
    return _BODIES[kind](SessionId(session), number, tag, count, plain[_HEAD.size :])


def _hello(session: SessionId, number: int, tag: int, count: int, body: bytes) -> ReaderHello:
    if len(body) != count or not 0 < count <= MAX_WORKER_ADDRESS_BYTES:
        raise BadFrame(f"hello states {count} bytes and has {len(body)}")
    return ReaderHello(session, body)


def _request(session: SessionId, number: int, tag: int, count: int, body: bytes) -> PieceRequest:
    if not 0 < count <= MAX_RUNS or len(body) != 12 * count:
        raise BadFrame(f"{count} runs in {len(body)} bytes, expected 1 to {MAX_RUNS}, 12 each")
    addresses = np.frombuffer(body, "<u8", count).astype(np.uint64)
    nbytes = np.frombuffer(body, "<u4", count, 8 * count).astype(np.uint64)
    if not nbytes.all():
        raise BadFrame(f"run {int(np.argmin(nbytes))} has 0 bytes")
    if (addresses > _LAST_ADDRESS - nbytes).any():
        raise BadFrame("a run ends beyond 63 bits")
    return PieceRequest(session, number, tag, addresses, nbytes)


def _refused(session: SessionId, number: int, tag: int, count: int, body: bytes) -> PieceRefused:
    if len(body) != count or count > MAX_REASON_BYTES:
        raise BadFrame(f"refusal states {count} bytes and has {len(body)}")
    return PieceRefused(session, tag, number == 1, body.decode(errors="replace"))


_REFUSED = 3
_BODIES: dict[int, Callable[[SessionId, int, int, int, bytes], Frame]] = {
    1: _hello,
    2: _request,
    _REFUSED: _refused,
}


def _mac(plain: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(plain, key=secret, digest_size=MAC_BYTES).digest()
