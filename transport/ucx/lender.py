"""Answering readers: each piece that is wanted is checked, gathered and sent.

All state that a reader can make us hold is bounded: at most ``MAX_BORROWERS``
sessions, ``MAX_QUEUED`` wants each (more is a breach, and ends the session),
``MAX_SENDING`` of them on their way, ``MAX_BUFFERS`` staging buffers for all.
Borrowers are served in turn, one piece each.

A reader that stops taking (a stopped process, a lost route) keeps the buffers
of what is on its way to it.  Should others want for buffers then, it is dropped
after ``STALL_S``: its reads fail, theirs go on.
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
    Session,
    decode,
    encode,
)
from transport.ucx.gather import Bytes, bytes_at, gather
from transport.ucx.outbox import Buffers, Sending
from transport.ucx.pieces import MAX_PIECE_BYTES, STAGED_BYTES, Runs
from transport.ucx.worker import FRAME_TAG, Endpoint, UcxWorker

_log = logging.getLogger(__name__)

MAX_BORROWERS = 4096
MAX_QUEUED = 32
MAX_SENDING = 16
MAX_BUFFERS = 128
STALL_S = 10.0
_MAX_ENDED = 4096
_LOOK_S = 1.0


@dataclass(slots=True, eq=False)
class RemoteReader:
    """A reader's session: its way back, what it wants, and what is on its way."""

    session: Session
    line: Endpoint
    number: int = 0
    wants: deque[PieceRequest] = field(default_factory=deque)
    sending: list[Sending] = field(default_factory=list)


class UcxLender:
    """Serves ``lent``, which the transport replaces as memory is registered.

    ``secret`` is ours: whoever holds it may read.
    """

    def __init__(self, wire: UcxWorker, secret: bytes, clock: Callable[[], float]) -> None:
        self.lent = Regions()
        self._wire = wire
        self._secret = secret
        self._clock = clock
        self._borrowers: dict[Session, RemoteReader] = {}
        self._ended: dict[Session, None] = {}
        self._ending: list[Sending] = []
        self._buffers = Buffers(MAX_BUFFERS)
        self._look_at = 0.0
        self.refused_frames = 0

    @property
    def num_borrowers(self) -> int:
        """Sessions that are open."""
        return len(self._borrowers)

    @property
    def num_ending(self) -> int:
        """Messages to readers whose connection was cut, that UCX may still read from."""
        return len(self._ending)

    @property
    def num_sending(self) -> int:
        """Messages that UCX may still read from."""
        borrowers = tuple(self._borrowers.values())  # at once: other threads may ask as well
        return len(self._ending) + sum(len(b.sending) for b in borrowers)

    def take(self, data: bytes) -> None:
        """One frame from the wire, by whomever."""
        try:
            frame = decode(data, self._secret)
            if isinstance(frame, ReaderHello):
                self._greet(frame)
            elif isinstance(frame, PieceRequest):
                self._queue(frame)
        except TransportError as error:
            self.refused_frames += 1
            _log.debug("ucx: frame refused: %s", error)

    def step(self) -> bool:
        """Send what can be sent; whether anything was done."""
        self._look_after()
        worked = self._reap_ending()
        for borrower in list(self._borrowers.values()):
            if borrower.wants or borrower.sending:
                worked |= self._serve(borrower)
        return worked

    def close(self) -> None:
        """Drop all borrowers; keep stepping until ``num_sending`` is 0."""
        for borrower in list(self._borrowers.values()):
            self._drop(borrower, "we close")

    def _greet(self, hello: ReaderHello) -> None:
        if hello.session in self._borrowers or hello.session in self._ended:
            raise BadFrame("hello of a session that is known")
        if len(self._borrowers) >= MAX_BORROWERS:
            idle = (b for b in self._borrowers.values() if not b.wants and not b.sending)
            oldest = next(idle, None)
            if oldest is None:
                raise BadFrame(f"{MAX_BORROWERS} readers are being served")
            self._drop(oldest, "the table is full")
        line = self._wire.dial(hello.worker_address)
        self._borrowers[hello.session] = RemoteReader(hello.session, line)

    def _queue(self, want: PieceRequest) -> None:
        borrower = self._borrowers.get(want.session)
        if borrower is None:
            raise BadFrame("want of an unknown session")
        if want.number <= borrower.number:
            raise BadFrame(f"want {want.number} after {borrower.number}")
        borrower.number = want.number
        if len(borrower.wants) == MAX_QUEUED:
            self._drop(borrower, f"more than {MAX_QUEUED} wants at once")
            return
        borrower.wants.append(want)

    def _serve(self, borrower: RemoteReader) -> bool:
        worked = self._reap(borrower)
        if not borrower.line.alive:
            self._drop(borrower, "its connection broke")
            return True
        if not borrower.wants or len(borrower.sending) >= MAX_SENDING:
            return worked
        try:
            return self._answer(borrower, borrower.wants[0]) or worked
        except TransportError as error:
            self._drop(borrower, str(error))
            return True

    def _answer(self, borrower: RemoteReader, want: PieceRequest) -> bool:
        """Send what is wanted, or why not; False while there is no buffer for it."""
        refused = self._objection(want)
        if refused is not None:
            borrower.wants.popleft()
            frame = np.frombuffer(encode(refused, self._secret), dtype=np.uint8)
            self._send(borrower, frame, FRAME_TAG, None)
            self._send(borrower, _too_long(want), want.tag, None)
            return True
        runs = Runs(want.addresses, want.nbytes).joined()
        if len(runs.nbytes) == 1:
            message, buffer = bytes_at(int(runs.addresses[0]), runs.total_bytes), None
        else:
            buffer = self._buffers.take()
            if buffer is None:
                return self._make_room()
            message = buffer[: runs.total_bytes]
            gather(runs, message)
        borrower.wants.popleft()
        self._send(borrower, message, want.tag, buffer)
        return True

    def _objection(self, want: PieceRequest) -> PieceRefused | None:
        outside = self.lent.outside("remote", want.addresses, want.nbytes, HOST)
        if outside is not None:
            return PieceRefused(want.session, want.tag, True, str(outside))
        runs = Runs(want.addresses, want.nbytes).joined()
        limit = MAX_PIECE_BYTES if len(runs.nbytes) == 1 else STAGED_BYTES
        if runs.total_bytes <= limit:
            return None
        reason = f"a piece of {runs.total_bytes} bytes, at most {limit}"
        return PieceRefused(want.session, want.tag, False, reason)

    def _send(self, borrower: RemoteReader, message: Bytes, tag: int, buffer: Bytes | None) -> None:
        try:
            request = borrower.line.send(message, tag)
        except TransportError:
            if buffer is not None:
                self._buffers.give(buffer)
            raise
        borrower.sending.append(Sending(request, buffer, self._clock()))

    def _make_room(self) -> bool:
        """End the session that has kept its buffers longest, if that is long."""
        borrowers = self._borrowers.values()
        holding = [b for b in borrowers if any(s.buffer is not None for s in b.sending)]
        if not holding:
            return False
        slowest = min(holding, key=lambda b: b.sending[0].since)
        if self._clock() - slowest.sending[0].since < STALL_S:
            return False
        self._drop(slowest, f"it took nothing for {STALL_S:g} s and others wait")
        return True

    def _reap(self, borrower: RemoteReader) -> bool:
        before = len(borrower.sending)
        borrower.sending = self._buffers.reap(borrower.sending)
        return len(borrower.sending) < before

    def _reap_ending(self) -> bool:
        before = len(self._ending)
        if before:
            self._wire.cancel_lost()
            self._ending = self._buffers.reap(self._ending)
        return len(self._ending) < before

    def _drop(self, borrower: RemoteReader, why: str) -> None:
        _log.debug("ucx: session %s ends: %s", borrower.session.hex()[:8], why)
        del self._borrowers[borrower.session]
        self._ended[borrower.session] = None
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        borrower.wants.clear()
        self._ending += borrower.sending
        try:
            borrower.line.close()
        except TransportError as error:
            _log.warning("ucx: closing a reader's connection: %s", error)

    def _look_after(self) -> None:
        """Now and then see which quiet readers have gone."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            for borrower in [b for b in self._borrowers.values() if not b.line.alive]:
                self._drop(borrower, "its connection broke")


def _too_long(want: PieceRequest) -> Bytes:
    """What fails the receive of a piece, whether or not its reader hears why.

    UCX fails one that more bytes come for than it has room for, and writes none of them.
    It takes fewer for all that were wanted, so an empty message would pass for the piece.
    """
    return np.zeros(min(int(want.nbytes.sum()), MAX_PIECE_BYTES) + 1, dtype=np.uint8)


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
