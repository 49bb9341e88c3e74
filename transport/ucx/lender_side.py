"""Answers readers: each requested piece is checked, and sent from lent memory.

All state that a reader can create here is bounded (:class:`LenderLimits`).  A message has no buffer
of its own: UCX reads lent memory until the message is done.  Readers are served in turn, one piece
each.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from transport.errors import TransportError
from transport.regions import Regions
from transport.types import HOST, Memory
from transport.ucx.control import (
    BadFrame,
    OtherProtocol,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    SessionId,
    decode,
    encode,
)
from transport.ucx.pieces import MAX_PIECE_BYTES, Runs
from transport.ucx.run_messages import RunsRequest
from transport.ucx.ucx_worker import FRAME_TAG, Endpoint, UcxRequest, UcxWorker

_log = logging.getLogger(__name__)

_MAX_ENDED = 4096
_LIVENESS_S = 1.0
_ZEROS = np.zeros(64 << 10, dtype=np.uint8)
"""Content of messages that are too long; shared by all of them."""


@dataclass(frozen=True, slots=True)
class LenderLimits:
    """Bounds of a lender's state.

    Attributes:
        readers: open sessions; beyond it the oldest idle one is dropped.
        queued: requests of one reader that wait to be answered; beyond it its session ends.
        sending: messages in flight to one reader; exceeded by one, since a refusal is two.
        in_flight: messages in flight to all readers; exceeded by one, likewise.
        stall_s: how long a reader may keep messages in flight while others wait to send.
    """

    readers: int = 4096
    queued: int = 32
    sending: int = 16
    in_flight: int = 1024
    stall_s: float = 10.0


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    """A message in flight since ``since``, s; UCX may read its bytes until it is done."""

    request: UcxRequest | RunsRequest
    since: float


@dataclass(slots=True, eq=False)
class RemoteReader:
    """A reader's session: the endpoint to it, its queued requests, and messages in flight.

    ``number`` is that of its latest request; numbers only grow.
    """

    session: SessionId
    endpoint: Endpoint
    number: int = 0
    requests: deque[PieceRequest] = field(default_factory=deque)
    sending: list[OutgoingMessage] = field(default_factory=list)


class UcxLender:
    """Serves ``lent``, which the transport replaces as memory is registered.

    ``secret`` is ours; a reader must send it.
    """

    def __init__(
        self,
        worker: UcxWorker,
        secret: bytes,
        clock: Callable[[], float],
        limits: LenderLimits | None = None,
    ) -> None:
        self.lent = Regions()
        self.limits = limits or LenderLimits()
        self.refused_frames = 0
        self._worker = worker
        self._secret = secret
        self._clock = clock
        self._readers: dict[SessionId, RemoteReader] = {}
        self._ended: dict[SessionId, None] = {}
        self._ending: list[OutgoingMessage] = []
        self._in_flight = 0
        self._liveness_at = 0.0

    @property
    def num_readers(self) -> int:
        """Open sessions."""
        return len(self._readers)

    @property
    def num_ending(self) -> int:
        """Messages to readers that were dropped, which UCX may still read from."""
        return len(self._ending)

    @property
    def num_sending(self) -> int:
        """Messages that UCX may still read from."""
        return self._in_flight

    def handle_frame(self, data: bytes) -> None:
        """Handle one frame from the network, of an unknown sender."""
        try:
            frame = decode(data, self._secret)
            if isinstance(frame, ReaderHello):
                self._open_session(frame)
            elif isinstance(frame, PieceRequest):
                self._queue(frame)
        except OtherProtocol as error:
            self.refused_frames += 1
            _log.warning("pdconn: ucx: a reader is not served: %s", error)
        except TransportError as error:
            self.refused_frames += 1
            _log.debug("pdconn: ucx lender refused a frame: %s", error)

    def serve_readers(self) -> bool:
        """Send pieces to readers, one each; whether anything was done."""
        self._drop_broken()
        worked = self._reclaim_ending()
        for session, reader in list(self._readers.items()):
            is_served = session in self._readers  # another reader's turn may have dropped it
            if is_served and (reader.requests or reader.sending):
                worked |= self._serve(reader)
        return worked

    def close(self) -> None:
        """Drop all readers.  Call :meth:`serve_readers` until ``num_sending`` is 0."""
        for reader in list(self._readers.values()):
            self._drop(reader, "the transport closes")

    def _open_session(self, hello: ReaderHello) -> None:
        if hello.session in self._readers or hello.session in self._ended:
            raise BadFrame("hello of a session that is known already")
        if len(self._readers) >= self.limits.readers:
            idle = (r for r in self._readers.values() if not r.requests and not r.sending)
            oldest = next(idle, None)
            if oldest is None:
                raise BadFrame(f"{self.limits.readers} readers are being served")
            self._drop(oldest, "the table of readers is full")
        endpoint = self._worker.connect(hello.worker_address)
        self._readers[hello.session] = RemoteReader(hello.session, endpoint)

    def _queue(self, request: PieceRequest) -> None:
        reader = self._readers.get(request.session)
        if reader is None:
            raise BadFrame("request of an unknown session")
        if request.number <= reader.number:
            raise BadFrame(f"request {request.number} after {reader.number}")
        reader.number = request.number
        if len(reader.requests) == self.limits.queued:
            self._drop(reader, f"more than {self.limits.queued} requests are queued")
            return
        reader.requests.append(request)

    def _serve(self, reader: RemoteReader) -> bool:
        before = len(reader.sending)
        reader.sending = self._unfinished(reader.sending)
        worked = len(reader.sending) < before
        if not reader.endpoint.alive:
            self._drop(reader, "its connection broke")
            return True
        if not reader.requests or len(reader.sending) >= self.limits.sending:
            return worked
        try:
            return self._answer(reader, reader.requests[0]) or worked
        except TransportError as error:
            self._drop(reader, str(error))
            return True

    def _answer(self, reader: RemoteReader, request: PieceRequest) -> bool:
        """Send the piece or a refusal; False while too many messages are in flight."""
        if self._in_flight >= self.limits.in_flight:
            return self._drop_slowest()
        reader.requests.popleft()
        refused = self._refusal(request)
        if refused is None:
            runs = Runs(request.addresses, request.nbytes).merged()
        else:
            frame = np.frombuffer(encode(refused, self._secret), dtype=np.uint8)
            self._sent(reader, reader.endpoint.send_array(frame, FRAME_TAG))
            runs = _too_long(request)
        self._sent(reader, reader.endpoint.send_runs(runs, request.tag))
        return True

    def _refusal(self, request: PieceRequest) -> PieceRefused | None:
        outside = self.lent.outside("remote", request.addresses, request.nbytes, HOST)
        if outside is not None:
            return PieceRefused(request.session, request.tag, True, str(outside))
        nbytes = int(request.nbytes.sum())
        if nbytes <= MAX_PIECE_BYTES:
            return None
        reason = f"piece of {nbytes} bytes, at most {MAX_PIECE_BYTES}"
        return PieceRefused(request.session, request.tag, False, reason)

    def _sent(self, reader: RemoteReader, request: UcxRequest | RunsRequest) -> None:
        self._in_flight += 1
        reader.sending.append(OutgoingMessage(request, self._clock()))

    def _unfinished(self, messages: list[OutgoingMessage]) -> list[OutgoingMessage]:
        in_flight = [message for message in messages if not message.request.done]
        self._in_flight -= len(messages) - len(in_flight)
        return in_flight

    def _drop_slowest(self) -> bool:
        """Drop the reader with the oldest message in flight, if that is ``stall_s`` old."""
        # It receives nothing (a stopped process, a lost route), and others wait for its messages.
        sending = [reader for reader in self._readers.values() if reader.sending]
        if not sending:
            return False
        slowest = min(sending, key=lambda reader: reader.sending[0].since)
        if self._clock() - slowest.sending[0].since < self.limits.stall_s:
            return False
        self._drop(slowest, f"it received nothing for {self.limits.stall_s:g} s and others wait")
        return True

    def _reclaim_ending(self) -> bool:
        before = len(self._ending)
        if before:
            self._worker.cancel_lost()
            self._ending = self._unfinished(self._ending)
        return len(self._ending) < before

    def _drop(self, reader: RemoteReader, reason: str) -> None:
        _log.debug("pdconn: ucx session=%s ends: %s", reader.session.hex()[:8], reason)
        del self._readers[reader.session]
        self._ended[reader.session] = None
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        reader.requests.clear()
        self._ending += reader.sending
        reader.sending = []
        try:
            reader.endpoint.close()
        except TransportError as error:
            _log.warning("pdconn: ucx: closing a reader's connection failed: %s", error)

    def _drop_broken(self) -> None:
        """Drop idle readers whose connection broke; once per ``_LIVENESS_S``."""
        now = self._clock()
        if now >= self._liveness_at:
            self._liveness_at = now + _LIVENESS_S
            for reader in [r for r in self._readers.values() if not r.endpoint.alive]:
                self._drop(reader, "its connection broke")


def _too_long(request: PieceRequest) -> Runs:
    """A message that makes the receive of a piece fail, even if the refusal is lost."""
    # UCX fails a receive if the message is longer than its buffer, and writes none of it.  It
    # accepts a shorter one, so an empty message would be taken for the piece.
    nbytes = min(int(request.nbytes.sum()), MAX_PIECE_BYTES) + 1
    whole, rest = divmod(nbytes, len(_ZEROS))
    lengths = [len(_ZEROS)] * whole + [rest] * (rest > 0)
    return Runs(
        np.full(len(lengths), _ZEROS.ctypes.data, dtype=np.uint64),
        np.array(lengths, dtype=np.uint64),
    )


def lendable(memories: Regions) -> Regions:
    """``memories`` with adjacent ones merged: a piece may cross from one into the next.

    The reader merges neighbouring runs, and a copy needs no key per memory.
    """
    merged: list[Memory] = []
    for memory in memories:
        if merged and merged[-1].end == memory.base:
            merged[-1] = Memory(merged[-1].base, merged[-1].nbytes + memory.nbytes)
        else:
            merged.append(memory)
    return Regions(merged)
