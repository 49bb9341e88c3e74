"""The fixture of the contract's tests: a reader, a lender, and bytes to watch.

    guard │ registered memory                 │ guard
    EE EE │ pattern (lender) or EE EE (reader)│ EE EE

The lender may be anywhere: the tests know the pattern in its memory, so they need not fetch its
bytes by other means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from transport.base import Transport
from transport.types import Memory, PeerId, ReadId, Settled, Spans

Bytes = NDArray[np.uint8]

GUARD_BYTES = 8192
ARENA_BYTES = 256 * 1024
BLANK = 0xEE
SETTLE_S = 20.0
"""How long a read may take before a test fails."""


def pattern(nbytes: int) -> Bytes:
    """The bytes in a lender's registered memory; no two runs are equal."""
    return np.random.default_rng(7).integers(0, 200, nbytes, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Bytes with a guard on either side of ``memory``, the part that is registered."""

    bytes: Bytes

    @classmethod
    def blank(cls) -> Arena:
        """A reader's arena: every byte is ``BLANK``, which no pattern contains."""
        return cls(np.full(ARENA_BYTES + 2 * GUARD_BYTES, BLANK, dtype=np.uint8))

    @classmethod
    def patterned(cls) -> Arena:
        """A lender's arena: ``pattern`` in the middle, blank guards."""
        arena = cls.blank()
        arena.bytes[GUARD_BYTES:-GUARD_BYTES] = pattern(ARENA_BYTES)
        return arena

    @property
    def memory(self) -> Memory:
        """The registered middle of the arena."""
        return Memory(self.bytes.ctypes.data + GUARD_BYTES, ARENA_BYTES)

    @property
    def guard(self) -> Memory:
        """The guard after it."""
        return replace(self.memory, base=self.memory.end, nbytes=GUARD_BYTES)


@dataclass(frozen=True, slots=True)
class Rig:
    """A reader, connected to ``peer`` at ``address``; ``remote`` is memory that the peer lends.

    ``remote`` is the middle of an ``Arena.patterned()``, in any process.  After ``pause`` no read
    may settle before ``resume``; ``kill`` ends the peer like a crash.  None: not supported.
    """

    reader: Transport
    peer: PeerId
    address: bytes
    arena: Arena
    remote: Memory
    pause: Callable[[], None] | None = None
    resume: Callable[[], None] | None = None
    kill: Callable[[], None] | None = None
    settle_s: float = SETTLE_S

    def spans(self, *runs: tuple[int, int, int]) -> Spans:
        """Runs ``(local offset, remote offset, nbytes)`` into the registered memories."""
        local, remote, nbytes = np.array(runs, dtype=np.int64).reshape(-1, 3).T
        return Spans(
            (local + self.arena.memory.base).astype(np.uint64),
            (remote + self.remote.base).astype(np.uint64),
            nbytes.astype(np.uint64),
            self.arena.memory.device,
            self.remote.device,
        )

    def finish(self, read: ReadId) -> Settled:
        """Poll until ``read`` settles."""
        deadline = time.monotonic() + self.settle_s
        while (settled := self.reader.poll(read)) is None:
            assert time.monotonic() < deadline, f"read not settled after {self.settle_s} s"
            time.sleep(0.0005)
        return settled

    def check_arena(self, *runs: tuple[int, int, int]) -> None:
        """Assert that exactly ``runs`` were copied into the arena."""
        expected, source = Arena.blank().bytes, pattern(ARENA_BYTES)
        for local, remote, nbytes in runs:
            start = GUARD_BYTES + local
            expected[start : start + nbytes] = source[remote : remote + nbytes]
        wrong = np.flatnonzero(self.arena.bytes != expected)
        assert not len(wrong), (
            f"{len(wrong)} bytes are wrong, the first at offset {int(wrong[0]) - GUARD_BYTES}"
        )

    def check_read(self, *runs: tuple[int, int, int]) -> Settled:
        """Read ``runs``; assert that they arrived, and nothing else."""
        settled = self.finish(self.reader.read(self.peer, self.spans(*runs)))
        assert settled.ok, settled.error
        self.check_arena(*runs)
        return settled


def scattered(num_runs: int, seed: int) -> list[tuple[int, int, int]]:
    """Runs of random lengths, in a different order on each side, with gaps between them."""
    rng = np.random.default_rng(seed)
    slot = ARENA_BYTES // num_runs
    nbytes = rng.integers(1, slot, num_runs).tolist()
    local, remote = (rng.permutation(num_runs) * slot).tolist(), rng.permutation(num_runs) * slot
    return list(zip(local, remote.tolist(), nbytes, strict=True))
