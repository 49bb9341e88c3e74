"""A read, cut into pieces: each is one request, one message and one receive.

A piece is some bytes that are gathered from runs of the lender's memory and
scattered to runs of ours.  Either side may be a single run, as it mostly is when
blocks are large; then nothing is copied on that side.

    spans        ██ ██ ██ ██ ██████████████████████ ██ ██
    pieces      [ 1: small, staged ][ 2: direct ][ 3 ][ 4 ]

Small neighbours are put together until a piece has ``STAGED_BYTES``; a long run
is cut into direct pieces.  Pieces are made one by one, as the window allows, so a
read of a million runs costs nothing in advance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transport.runs import merge_runs
from transport.types import U64, Spans
from transport.ucx.frames import MAX_RUNS

STAGED_BYTES = 512 << 10
"""Most bytes that one staging buffer holds."""

DIRECT_BYTES = 256 << 10
"""A run of this many bytes is a piece of its own: copying it costs more than a request."""

MAX_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes: uint64 columns of shape (n,), n >= 1."""

    addresses: U64
    nbytes: U64

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs; never overflows, as a piece is bounded."""
        return int(self.nbytes.sum())

    def merged(self) -> Runs:
        """The same bytes with runs merged that continue each other."""
        merged = merge_runs(self.nbytes, self.addresses)
        if merged is None:
            return self
        first, nbytes = merged
        return Runs(self.addresses[first], nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPiece:
    """``nbytes`` bytes from the lender's runs ``remote`` into ours, ``local``."""

    local: Runs
    remote: Runs
    nbytes: int


class PieceCutter:
    """Cuts ``spans`` into pieces, in order; every byte is in exactly one."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans.coalesced()
        self._ends = np.cumsum(self._spans.nbytes)
        self._large = np.flatnonzero(self._spans.nbytes >= DIRECT_BYTES)
        self._next = 0
        self._into = 0  # bytes of run ``_next`` that are in earlier pieces

    @property
    def exhausted(self) -> bool:
        """Whether there is no further piece."""
        return self._next == len(self._spans)

    def next(self) -> ReadPiece:
        """The next piece; there must be one."""
        assert not self.exhausted
        large = int(self._spans.nbytes[self._next]) >= DIRECT_BYTES
        return self._direct() if large else self._staged()

    def _direct(self) -> ReadPiece:
        run, into = self._next, self._into
        left = int(self._spans.nbytes[run]) - into
        nbytes = min(left, MAX_PIECE_BYTES)
        self._into += nbytes
        if nbytes == left:
            self._next, self._into = run + 1, 0
        return _piece(
            self._spans.local[run : run + 1] + np.uint64(into),
            self._spans.remote[run : run + 1] + np.uint64(into),
            np.array([nbytes], dtype=np.uint64),
        )

    def _staged(self) -> ReadPiece:
        first = self._next
        given = self._ends[first] - self._spans.nbytes[first]
        fits = int(np.searchsorted(self._ends, given + np.uint64(STAGED_BYTES), side="right"))
        at = int(np.searchsorted(self._large, first))
        large = int(self._large[at]) if at < len(self._large) else len(self._spans)
        last = min(fits, large, first + MAX_RUNS)
        self._next = last
        spans = self._spans
        return _piece(spans.local[first:last], spans.remote[first:last], spans.nbytes[first:last])


def _piece(local: U64, remote: U64, nbytes: U64) -> ReadPiece:
    return ReadPiece(Runs(local, nbytes).merged(), Runs(remote, nbytes).merged(), int(nbytes.sum()))
