"""A read, cut into pieces: each is one request, one message and one receive.

A piece is a stretch of the read's bytes, up to ``MAX_PIECE_BYTES`` and ``MAX_RUNS`` runs,
which UCX takes from the lender's runs and puts into ours:

    spans        ██ ██ ██ ██ ██████████████████████ ██ ██
    pieces      [ 1: 4 runs  and ][ 2: 1 run ][ 3: 3 runs ]

A run that does not fit is continued in the next piece.  Pieces are cut one by one, as the window
allows, so a read of a million runs costs nothing in advance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transport.types import U64, Spans, merge_runs
from transport.ucx.control import MAX_RUNS

MAX_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes: uint64 columns of shape (n,), n >= 1."""

    addresses: U64
    nbytes: U64

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs; does not overflow, since a piece is bounded."""
        return int(self.nbytes.sum())

    def merged(self) -> Runs:
        """The same bytes with neighbouring runs merged."""
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
        self._total = int(self._ends[-1])
        self._given = 0  # bytes in earlier pieces

    @property
    def exhausted(self) -> bool:
        """Whether there is no further piece."""
        return self._given == self._total

    def next_piece(self) -> ReadPiece:
        """The next piece; only while not :attr:`exhausted`."""
        assert not self.exhausted
        begin, ends = np.uint64(self._given), self._ends
        first = int(np.searchsorted(ends, begin, side="right"))
        most = begin + np.uint64(MAX_PIECE_BYTES)
        end = min(most, ends[min(first + MAX_RUNS, len(ends)) - 1])
        last = int(np.searchsorted(ends, end, side="left")) + 1
        spans, self._given = self._spans, int(end)
        nbytes = spans.nbytes[first:last].copy()
        skipped = begin - (ends[first] - nbytes[0])  # bytes of the first run in earlier pieces
        nbytes[-1] -= ends[last - 1] - end
        nbytes[0] -= skipped
        local, remote = spans.local[first:last].copy(), spans.remote[first:last].copy()
        local[0] += skipped
        remote[0] += skipped
        return ReadPiece(
            Runs(local, nbytes).merged(), Runs(remote, nbytes).merged(), int(end - begin)
        )
