"""Reads from lenders: pieces are requested, a few at a time, and land in place.

    read ──► queued ──piece requested──► outstanding ──all pieces done──► settled

For every piece a receive is posted *before* the piece is requested, so data never waits in UCX's
own memory; it lands in the read's own runs.  From then until UCX completes the receive the piece
can be written, and its read does not settle:

* The lender is paused: the receives wait.
* The lender refuses: its reason cancels the receive; if the reason is lost, a message that is too
  long makes the receive fail.  No byte changes.
* We disconnect, or the lender dies: the connection is closed.  Receives that no message was matched
  with are cancelled, UCX ends the others, and each reports when it has ended.

At most ``WINDOW`` pieces of a lender are outstanding, which bounds UCX's memory.  Several reads
from one lender take turns, a piece each.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from transport.errors import BackendFailure, OutOfBounds, PeerLost, TransportError
from transport.types import PeerId, ReadId, ReadStats, Settled, Spans
from transport.ucx.control import (
    BadFrame,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    SessionId,
    decode,
    encode,
    session_in,
)
from transport.ucx.pieces import PieceCutter
from transport.ucx.run_messages import RunsRequest
from transport.ucx.ucx_worker import FRAME_TAG, Endpoint, UcxRequest, UcxWorker

_log = logging.getLogger(__name__)

WINDOW = 8

_DATA = 1 << 63


@dataclass(slots=True, eq=False)
class UcxRead:
    """A read that has not settled: ``error`` is set once it cannot succeed."""

    id: ReadId
    spans: Spans
    began: float
    cutter: PieceCutter
    num_descriptors: int
    post_s: float = 0.0
    outstanding: int = 0
    error: TransportError | None = None

    @property
    def over(self) -> bool:
        """Whether nothing of it can still be written or requested."""
        return not self.outstanding and (self.cutter.exhausted or self.error is not None)


@dataclass(slots=True, eq=False)
class OutstandingPiece:
    """A piece whose receive is posted."""

    read: UcxRead
    request: RunsRequest


@dataclass(slots=True, eq=False)
class RemoteLender:
    """A lender, from its address; fields with a default belong to the UCX thread.

    ``lost`` is set by that thread, read by all threads, and never reset.  ``reads`` have pieces
    that were not requested yet.
    """

    id: PeerId
    payload: bytes
    secret: bytes
    worker_address: bytes
    session: SessionId
    lost: bool = False
    disconnecting: bool = False
    endpoint: Endpoint | None = None
    number: int = 0
    reads: deque[UcxRead] = field(default_factory=deque)
    outstanding: dict[int, OutstandingPiece] = field(default_factory=dict)
    frames: list[UcxRequest] = field(default_factory=list)

    @property
    def ending(self) -> bool:
        """Whether its connection was closed, by either side."""
        return self.lost or self.disconnecting


class UcxReader:
    """All reads of one transport.

    Args:
        settle: called with each read that ended.
        draw: a random number below its argument, for tags that cannot be guessed.
    """

    def __init__(
        self,
        worker: UcxWorker,
        settle: Callable[[ReadId, Settled], None],
        clock: Callable[[], float],
        draw: Callable[[int], int],
    ) -> None:
        self._worker = worker
        self._settle = settle
        self._clock = clock
        self._draw = draw
        self._lenders: dict[SessionId, RemoteLender] = {}

    @property
    def num_outstanding(self) -> int:
        """Receives that can still write, and frames that UCX still reads from."""
        return sum(len(each.outstanding) + len(each.frames) for each in self._lenders.values())

    @property
    def num_ending(self) -> int:
        """Closed connections with receives that have not ended."""
        return sum(lender.ending for lender in self._lenders.values())

    def start_read(self, lender: RemoteLender, read_id: ReadId, spans: Spans, began: float) -> None:
        """Start a read whose runs were checked on our side."""
        read = UcxRead(read_id, spans, began, PieceCutter(spans), len(spans.coalesced()))
        if lender.ending:
            read.error = PeerLost(f"{lender.id} is disconnected; connect to it again")
            self._end(lender, read)
            return
        self._lenders[lender.session] = lender
        lender.reads.append(read)
        self._request_pieces(lender)
        read.post_s = self._clock() - began

    def disconnect_lender(self, lender: RemoteLender) -> None:
        """Close the connection; its reads settle as ``PeerLost``, once they can write no more."""
        lender.disconnecting = True
        self._cut(lender, PeerLost(f"{lender.id} was disconnected while this read was in flight"))

    def close(self) -> None:
        """Disconnect from all lenders; :meth:`advance_reads` until ``num_outstanding`` is 0."""
        for lender in list(self._lenders.values()):
            self.disconnect_lender(lender)

    def handle_frame(self, data: bytes) -> None:
        """Handle a frame that claims to be a lender's answer, of an unknown sender."""
        lender = self._lenders.get(session_in(data))
        if lender is None:
            return
        try:
            frame = decode(data, lender.secret)
        except BadFrame as error:
            _log.debug("pdconn: ucx reader refused a frame: %s", error)
            return
        if isinstance(frame, PieceRefused) and frame.tag in lender.outstanding:
            piece = lender.outstanding[frame.tag]
            kind = OutOfBounds if frame.out_of_bounds else BackendFailure
            piece.read.error = piece.read.error or kind(f"{lender.id}: {frame.reason}")
            piece.request.cancel()

    def advance_reads(self) -> bool:
        """Complete pieces that have arrived, and request more; whether anything was done."""
        worked = False
        for lender in list(self._lenders.values()):
            worked |= self._step_lender(lender)
        return worked

    def _step_lender(self, lender: RemoteLender) -> bool:
        worked = self._complete_pieces(lender)
        if lender.ending:
            if lender.outstanding or lender.frames:
                self._worker.cancel_lost()
            else:
                del self._lenders[lender.session]
        elif lender.endpoint is not None and not lender.endpoint.alive:
            self._lose(lender, PeerLost(f"{lender.id} closed its connection or died"))
            return True
        else:
            worked |= self._request_pieces(lender)
        return worked

    def _complete_pieces(self, lender: RemoteLender) -> bool:
        lender.frames = [request for request in lender.frames if not request.done]
        done = [tag for tag, piece in lender.outstanding.items() if piece.request.done]
        for tag in done:
            piece = lender.outstanding.pop(tag)
            try:
                piece.request.raise_failure(f"read from {lender.id}")
            except TransportError as error:
                piece.read.error = piece.read.error or error
            piece.read.outstanding -= 1
            if piece.read.over:
                self._end(lender, piece.read)
        return bool(done)

    def _request_pieces(self, lender: RemoteLender) -> bool:
        """Request pieces, one of each read in turn, until the window is full."""
        requested = False
        while lender.reads and len(lender.outstanding) < WINDOW:
            read = lender.reads.popleft()
            if read.error is not None:
                continue  # it settles with its last outstanding piece
            try:
                self._request_piece(lender, read)
            except TransportError as error:
                lender.reads.append(read)
                self._lose(lender, PeerLost(f"{lender.id}: {error}"))
                return True
            if not read.cutter.exhausted:
                lender.reads.append(read)
            requested = True
        return requested

    def _request_piece(self, lender: RemoteLender, read: UcxRead) -> None:
        endpoint = self._endpoint(lender)
        piece = read.cutter.next_piece()
        lender.number += 1
        tag = _DATA | self._draw(_DATA)
        request = PieceRequest(
            lender.session, lender.number, tag, piece.remote.addresses, piece.remote.nbytes
        )
        frame = encode(request, lender.secret)
        receive = self._worker.receive_runs(piece.local, tag)
        lender.outstanding[tag] = OutstandingPiece(read, receive)
        read.outstanding += 1
        self._send_frame(lender, endpoint, frame)

    def _endpoint(self, lender: RemoteLender) -> Endpoint:
        if lender.endpoint is None:
            lender.endpoint = self._worker.connect(lender.worker_address)
            hello = ReaderHello(lender.session, self._worker.address)
            self._send_frame(lender, lender.endpoint, encode(hello, lender.secret))
        return lender.endpoint

    @staticmethod
    def _send_frame(lender: RemoteLender, endpoint: Endpoint, frame: bytes) -> None:
        lender.frames.append(endpoint.send_array(np.frombuffer(frame, dtype=np.uint8), FRAME_TAG))

    def _lose(self, lender: RemoteLender, error: PeerLost) -> None:
        lender.lost = True
        self._cut(lender, error)

    def _cut(self, lender: RemoteLender, error: PeerLost) -> None:
        reads = {read.id: read for read in lender.reads}
        reads |= {piece.read.id: piece.read for piece in lender.outstanding.values()}
        if lender.endpoint is not None:
            try:
                lender.endpoint.close()
            except TransportError as closing:
                _log.warning(
                    "pdconn: ucx: closing a lender's connection failed: %s peer=%s",
                    closing,
                    lender.id,
                )
            self._worker.cancel_lost()
            for piece in lender.outstanding.values():
                piece.request.cancel()
        for read in reads.values():
            read.error = error
            if read.over:
                self._end(lender, read)
        lender.reads.clear()

    def _end(self, lender: RemoteLender, read: UcxRead) -> None:
        if read in lender.reads:
            lender.reads.remove(read)
        stats = ReadStats(
            read.spans.total_bytes, read.num_descriptors, read.post_s, self._clock() - read.began
        )
        self._settle(read.id, Settled(stats, read.error))
