"""Reading from lenders: pieces are asked for, a few at a time, and put in place.

    read ──► waiting ──piece asked──► outstanding ──all pieces done──► settled

For every piece a receive is posted *before* the lender is asked, so data is
never waited for in UCX's own memory.  From then until UCX completes the receive
the piece can be written, and its read is not settled, whatever else happens:

* The lender is paused: the receives wait with it.
* The lender refuses: a message that is too long fails the receive; no byte changed.
  (UCX does not tell that one was too short.)
* We disconnect, or the lender dies: the connection is cut, UCX cancels what was
  not matched and ends what was, and each receive tells when that is so.

At most ``WINDOW`` pieces of a lender are outstanding, so that is what its reads
can hold in staging buffers.  Several reads of one lender take turns, a piece each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from transport.errors import BackendFailure, OutOfBounds, PeerLost, TransportError
from transport.types import ReadId, ReadStats, Settled, Spans
from transport.ucx.frames import (
    BadFrame,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    Session,
    decode,
    encode,
    session_in,
)
from transport.ucx.gather import Bytes, bytes_at, scatter
from transport.ucx.pieces import STAGED_BYTES, Cutter
from transport.ucx.pulls import AwaitedPiece, RemoteLender, UcxRead
from transport.ucx.worker import FRAME_TAG, Endpoint, UcxWorker

_log = logging.getLogger(__name__)

WINDOW = 16
_SPARE = 32
"""Staging buffers that are kept for the next piece, whoever's."""

_DATA = 1 << 63


class UcxReader:
    """All reads of one transport.

    Args:
        settle: called with each read that ended.
        draw: a random number below its argument, for tags that nobody guesses.
    """

    def __init__(
        self,
        wire: UcxWorker,
        settle: Callable[[ReadId, Settled], None],
        clock: Callable[[], float],
        draw: Callable[[int], int],
    ) -> None:
        self._wire = wire
        self._settle = settle
        self._clock = clock
        self._draw = draw
        self._sources: dict[Session, RemoteLender] = {}
        self._spare: list[Bytes] = []

    @property
    def num_outstanding(self) -> int:
        """Receives that can still write, and frames that UCX still reads from."""
        return sum(len(s.awaited) + len(s.frames) for s in self._sources.values())

    def start(self, source: RemoteLender, read: ReadId, spans: Spans, began: float) -> None:
        """Queue a read whose runs were checked on our side."""
        pull = UcxRead(read, spans, began, Cutter(spans), len(spans.coalesced()))
        if source.lost or source.leaving:
            pull.error = PeerLost(f"{source.id} is disconnected; connect to it again")
            self._end(source, pull)
            return
        self._sources[source.session] = source
        source.pulls.append(pull)
        self._fill(source)
        pull.post_s = self._clock() - began

    def leave(self, source: RemoteLender) -> None:
        """Cut the connection; its reads settle as ``PeerLost``, each when it is over."""
        source.leaving = True
        self._cut(source, PeerLost(f"{source.id} was disconnected while this read was in flight"))

    def close(self) -> None:
        """Leave all lenders; keep stepping until ``num_outstanding`` is 0."""
        for source in list(self._sources.values()):
            self.leave(source)

    def take(self, data: bytes) -> None:
        """A frame that says it is a lender's answer, by whomever."""
        source = self._sources.get(session_in(data))
        if source is None:
            return
        try:
            frame = decode(data, source.secret)
        except BadFrame as error:
            _log.debug("ucx: frame refused: %s", error)
            return
        if isinstance(frame, PieceRefused) and frame.tag in source.awaited:
            pull = source.awaited[frame.tag].pull
            kind = OutOfBounds if frame.out_of_bounds else BackendFailure
            pull.error = pull.error or kind(f"{source.id}: {frame.reason}")

    @property
    def num_leaving(self) -> int:
        """Connections that were cut and whose receives have not all ended."""
        return sum(s.lost or s.leaving for s in self._sources.values())

    def step(self) -> bool:
        """Put in place what came and ask for more; whether anything was done."""
        worked = False
        for source in list(self._sources.values()):
            worked |= self._attend(source)
        return worked

    def _attend(self, source: RemoteLender) -> bool:
        worked = self._land(source)
        if source.lost or source.leaving:
            if source.awaited or source.frames:
                self._wire.cancel_lost()
            else:
                del self._sources[source.session]
        elif source.line is not None and not source.line.alive:
            self._lose(source, PeerLost(f"{source.id} closed its connection or died"))
            return True
        else:
            worked |= self._fill(source)
        return worked

    def _land(self, source: RemoteLender) -> bool:
        source.frames = [request for request in source.frames if not request.done]
        done = [tag for tag, awaited in source.awaited.items() if awaited.request.done]
        for tag in done:
            awaited = source.awaited.pop(tag)
            self._place(source, awaited)
            awaited.pull.outstanding -= 1
            if awaited.pull.over:
                self._end(source, awaited.pull)
        return bool(done)

    def _place(self, source: RemoteLender, awaited: AwaitedPiece) -> None:
        pull = awaited.pull
        try:
            awaited.request.check(f"read from {source.id}")
        except TransportError as error:
            pull.error = pull.error or error
        if awaited.buffer is None:
            return
        if pull.error is None:
            scatter(awaited.request.array, awaited.piece.local)
        if len(self._spare) < _SPARE:
            self._spare.append(awaited.buffer)

    def _fill(self, source: RemoteLender) -> bool:
        """Ask for pieces, one read after the other, until the window is full."""
        asked = False
        while source.pulls and len(source.awaited) < WINDOW:
            pull = source.pulls.popleft()
            if pull.error is not None:
                continue  # it ends with its last piece
            try:
                self._ask(source, pull)
            except TransportError as error:
                source.pulls.append(pull)
                self._lose(source, PeerLost(f"{source.id}: {error}"))
                return True
            if not pull.cutter.exhausted:
                source.pulls.append(pull)
            asked = True
        return asked

    def _ask(self, source: RemoteLender, pull: UcxRead) -> None:
        line = self._line(source)
        piece = pull.cutter.next()
        source.number += 1
        tag = _DATA | self._draw(_DATA)
        want = PieceRequest(
            source.session, source.number, tag, piece.remote.addresses, piece.remote.nbytes
        )
        frame = encode(want, source.secret)
        buffer = None
        if len(piece.local.nbytes) == 1:
            into = bytes_at(int(piece.local.addresses[0]), piece.nbytes)
        else:
            buffer = self._spare.pop() if self._spare else np.empty(STAGED_BYTES, dtype=np.uint8)
            into = buffer[: piece.nbytes]
        source.awaited[tag] = AwaitedPiece(pull, piece, line.receive(into, tag), buffer)
        pull.outstanding += 1
        self._say(source, line, frame)

    def _line(self, source: RemoteLender) -> Endpoint:
        if source.line is None:
            source.line = self._wire.dial(source.worker_address)
            hello = ReaderHello(source.session, self._wire.address)
            self._say(source, source.line, encode(hello, source.secret))
        return source.line

    @staticmethod
    def _say(source: RemoteLender, line: Endpoint, frame: bytes) -> None:
        source.frames.append(line.send(np.frombuffer(frame, dtype=np.uint8), FRAME_TAG))

    def _lose(self, source: RemoteLender, error: PeerLost) -> None:
        source.lost = True
        self._cut(source, error)

    def _cut(self, source: RemoteLender, error: PeerLost) -> None:
        pulls = {pull.read: pull for pull in source.pulls}
        pulls |= {awaited.pull.read: awaited.pull for awaited in source.awaited.values()}
        if source.line is not None:
            try:
                source.line.close()
            except TransportError as closing:
                _log.warning("ucx: closing the connection to %s: %s", source.id, closing)
            self._wire.cancel_lost()
        for pull in pulls.values():
            pull.error = error
            if pull.over:
                self._end(source, pull)
        source.pulls.clear()

    def _end(self, source: RemoteLender, pull: UcxRead) -> None:
        if pull in source.pulls:
            source.pulls.remove(pull)
        stats = ReadStats(
            pull.spans.total_bytes, pull.num_descriptors, pull.post_s, self._clock() - pull.began
        )
        self._settle(pull.read, Settled(stats, pull.error))
