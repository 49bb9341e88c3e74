"""What a reader remembers: its lenders, its reads, and the pieces that can be written.

Everything here belongs to the transport's thread, but for a source's ``lost``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from transport.errors import TransportError
from transport.types import PeerId, ReadId, Spans
from transport.ucx.frames import Session
from transport.ucx.gather import Bytes
from transport.ucx.pieces import Cutter, ReadPiece
from transport.ucx.worker import Endpoint, UcxRequest


@dataclass(slots=True, eq=False)
class UcxRead:
    """A read that has not settled: ``error`` is set once it cannot succeed."""

    read: ReadId
    spans: Spans
    began: float
    cutter: Cutter
    num_descriptors: int
    post_s: float = 0.0
    outstanding: int = 0
    error: TransportError | None = None

    @property
    def over(self) -> bool:
        """Whether nothing of it can be written any more, and nothing will be asked for."""
        return not self.outstanding and (self.cutter.exhausted or self.error is not None)


@dataclass(slots=True, eq=False)
class AwaitedPiece:
    """A piece whose receive is posted; ``buffer`` if it has to be scattered then."""

    pull: UcxRead
    piece: ReadPiece
    request: UcxRequest
    buffer: Bytes | None


@dataclass(slots=True, eq=False)
class RemoteLender:
    """A lender, as its address told; the rest is the thread's own.

    ``lost`` is set by the thread for all to see, and never taken back.
    """

    id: PeerId
    payload: bytes
    secret: bytes
    worker_address: bytes
    session: Session
    lost: bool = False
    leaving: bool = False
    line: Endpoint | None = None
    number: int = 0
    pulls: deque[UcxRead] = field(default_factory=deque)
    awaited: dict[int, AwaitedPiece] = field(default_factory=dict)
    frames: list[UcxRequest] = field(default_factory=list)
