"""Answering readers: each piece that is requested is checked, gathered and sent.

All state that a reader can make us hold is bounded (:class:`LenderLimits`): the number of
sessions, the requests that each may have queued (more is a breach, and ends the session),
the messages in flight to each, and the staging buffers of all.  Readers are served in
turn, one piece each.

A reader that stops receiving (a stopped process, a lost route) keeps the buffers of what
is in flight to it.  If others need buffers then, it is dropped after ``stall_s``: its
reads fail, theirs go on.
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
from transport.ucx.frames import (
    BadFrame,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    SessionId,
    decode,
    encode,
)
from transport.ucx.gather import Bytes, bytes_at, gather
from transport.ucx.pieces import MAX_PIECE_BYTES, STAGED_BYTES, Runs
from transport.ucx.worker import FRAME_TAG, Endpoint, UcxRequest, UcxWorker

_log = logging.getLogger(__name__)

_MAX_SPARE_BUFFERS = 8
_MAX_ENDED = 4096
_LIVENESS_S = 1.0


@dataclass(frozen=True, slots=True)
class LenderLimits:
    """What all readers together, and each of them, can make a lender hold.

    Attributes:
        readers: open sessions; beyond it the oldest idle one is dropped.
        queued: requests of one reader that wait to be answered.
        sending: messages in flight to one reader.
        buffers: staging buffers of all readers, ``STAGED_BYTES`` each.
        stall_s: how long a reader may keep buffers that others wait for.
    """

    readers: int = 4096
    queued: int = 32
    sending: int = 16
    buffers: int = 128
    stall_s: float = 10.0


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    """A message in flight since ``since``, s; UCX may read its bytes until it is done.

    ``buffer`` is the staging buffer that it was gathered in, if any.
    """

    request: UcxRequest
    buffer: Bytes | None
    since: float


class StagingBuffers:
    """Buffers of ``STAGED_BYTES``, at most ``limit`` at a time; a few are kept for reuse.

    A buffer is returned once its message is done, whichever way it ended, and never
    before: until then UCX may read it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spare: list[Bytes] = []
        self.taken = 0

    def take(self) -> Bytes | None:
        """A buffer with arbitrary content, or None at the limit."""
        if self.taken == self._limit:
            return None
        self.taken += 1
        return self._spare.pop() if self._spare else np.empty(STAGED_BYTES, dtype=np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """Return a buffer that nothing uses any more."""
        self.taken -= 1
        if len(self._spare) < _MAX_SPARE_BUFFERS:
            self._spare.append(buffer)

    def reclaim(self, messages: list[OutgoingMessage]) -> list[OutgoingMessage]:
        """Return the buffers of finished ``messages``; gives those still in flight."""
        in_flight = []
        for message in messages:
            if not message.request.done:
                in_flight.append(message)
            elif message.buffer is not None:
                self.give_back(message.buffer)
        return in_flight


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

    ``secret`` is ours: a reader must hold it to read.
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
        self._buffers = StagingBuffers(self.limits.buffers)
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
        readers = tuple(self._readers.values())  # a snapshot: other threads may ask as well
        return len(self._ending) + sum(len(reader.sending) for reader in readers)

    def handle(self, data: bytes) -> None:
        """Handle one frame from the network; its sender is not known yet."""
        try:
            frame = decode(data, self._secret)
            if isinstance(frame, ReaderHello):
                self._open_session(frame)
            elif isinstance(frame, PieceRequest):
                self._queue(frame)
        except TransportError as error:
            self.refused_frames += 1
            _log.debug("pdconn: ucx lender refused a frame: %s", error)

    def step(self) -> bool:
        """Send what can be sent; returns whether anything was done."""
        self._drop_broken()
        worked = self._reclaim_ending()
        for reader in list(self._readers.values()):
            if reader.requests or reader.sending:
                worked |= self._serve(reader)
        return worked

    def close(self) -> None:
        """Drop all readers; keep stepping until ``num_sending`` is 0."""
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
        reader.sending = self._buffers.reclaim(reader.sending)
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
        """Send the piece, or why it is refused; False while there is no buffer for it."""
        refused = self._refusal(request)
        if refused is not None:
            reader.requests.popleft()
            frame = np.frombuffer(encode(refused, self._secret), dtype=np.uint8)
            self._send(reader, frame, FRAME_TAG, None)
            self._send(reader, _too_long(request), request.tag, None)
            return True
        runs = Runs(request.addresses, request.nbytes).merged()
        if len(runs.nbytes) == 1:
            message, buffer = bytes_at(int(runs.addresses[0]), runs.total_bytes), None
        else:
            buffer = self._buffers.take()
            if buffer is None:
                return self._drop_slowest()
            message = buffer[: runs.total_bytes]
            gather(runs, message)
        reader.requests.popleft()
        self._send(reader, message, request.tag, buffer)
        return True

    def _refusal(self, request: PieceRequest) -> PieceRefused | None:
        outside = self.lent.outside("remote", request.addresses, request.nbytes, HOST)
        if outside is not None:
            return PieceRefused(request.session, request.tag, True, str(outside))
        runs = Runs(request.addresses, request.nbytes).merged()
        limit = MAX_PIECE_BYTES if len(runs.nbytes) == 1 else STAGED_BYTES
        if runs.total_bytes <= limit:
            return None
        reason = f"piece of {runs.total_bytes} bytes, at most {limit}"
        return PieceRefused(request.session, request.tag, False, reason)

    def _send(self, reader: RemoteReader, message: Bytes, tag: int, buffer: Bytes | None) -> None:
        try:
            request = reader.endpoint.send(message, tag)
        except TransportError:
            if buffer is not None:
                self._buffers.give_back(buffer)
            raise
        reader.sending.append(OutgoingMessage(request, buffer, self._clock()))

    def _drop_slowest(self) -> bool:
        """Drop the reader that has kept its buffers longest, if that is ``stall_s`` or more."""
        readers = self._readers.values()
        holding = [r for r in readers if any(m.buffer is not None for m in r.sending)]
        if not holding:
            return False
        slowest = min(holding, key=lambda reader: reader.sending[0].since)
        if self._clock() - slowest.sending[0].since < self.limits.stall_s:
            return False
        self._drop(slowest, f"it received nothing for {self.limits.stall_s:g} s and others wait")
        return True

    def _reclaim_ending(self) -> bool:
        before = len(self._ending)
        if before:
            self._worker.cancel_lost()
            self._ending = self._buffers.reclaim(self._ending)
        return len(self._ending) < before

    def _drop(self, reader: RemoteReader, reason: str) -> None:
        _log.debug("pdconn: ucx session=%s ends: %s", reader.session.hex()[:8], reason)
        del self._readers[reader.session]
        self._ended[reader.session] = None
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        reader.requests.clear()
        self._ending += reader.sending
        try:
            reader.endpoint.close()
        except TransportError as error:
            _log.warning("pdconn: ucx: closing a reader's connection failed: %s", error)

    def _drop_broken(self) -> None:
        """Once in a while, drop idle readers whose connection broke."""
        now = self._clock()
        if now >= self._liveness_at:
            self._liveness_at = now + _LIVENESS_S
            for reader in [r for r in self._readers.values() if not r.endpoint.alive]:
                self._drop(reader, "its connection broke")


def _too_long(request: PieceRequest) -> Bytes:
    """A message that fails the receive of a piece, whether or not its reader learns why.

    UCX fails a receive when more bytes come than it has room for, and writes none of them.
    It accepts a message that is shorter, so an empty one would pass for the piece.
    """
    return np.zeros(min(int(request.nbytes.sum()), MAX_PIECE_BYTES) + 1, dtype=np.uint8)


def lendable(memories: Regions) -> Regions:
    """``memories`` with those merged that touch: a piece may cross from one into the next.

    The reader merges neighbouring runs, and a copy needs no key per memory.
    """
    merged: list[Memory] = []
    for memory in memories:
        if merged and merged[-1].end == memory.base:
            merged[-1] = Memory(merged[-1].base, merged[-1].nbytes + memory.nbytes)
        else:
            merged.append(memory)
    return Regions(merged)
