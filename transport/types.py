"""The types of the transport interface: memory, spans of it, and how a read has ended.

Addresses are integers: a transport moves bytes between registered memories and knows nothing of KV
caches, requests or engines.  A read is a set of spans, in numpy columns because a pull of a long
prompt has tens of thousands of them::

            local                remote             nbytes
    span 0  0x7f10_0000_0000 <-- 0x7e20_0001_0000   65536
    span 1  0x7f10_0001_0000 <-- 0x7e20_0005_0000   65536

Runs that continue each other on both sides merge::

    theirs   [0, 4)  [4, 8)  [8, 12)            [0, 8)     [8, 12)
    ours     [0, 4)  [4, 8)  [16, 20)    ──►    [0, 8)     [16, 20)

Three runs of 4 bytes.  The second begins where the first ends on both sides, so they become
one run of 8 bytes.  The third continues the second on their side only, so it stays apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from operator import add
from typing import Literal, NewType, TypeVar

import numpy as np
from numpy.typing import NDArray

from transport.errors import BadSpans, TransportError

PeerId = NewType("PeerId", str)
"""Identifies a connected peer within one transport."""

ReadId = NewType("ReadId", int)
"""Identifies a posted read within one transport."""

U64 = NDArray[np.uint64]
_Int = TypeVar("_Int", np.uint64, np.int64)

_MAX_DEVICES = 1 << 16
_LAST = 2**63 - 1
_LAST_ADDRESS = np.uint64(_LAST)


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lives: ``cpu`` (NIXL's DRAM) or ``cuda`` (VRAM), and which one."""

    kind: Literal["cpu", "cuda"] = "cpu"
    index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < _MAX_DEVICES:
            raise ValueError(f"device index: expected 0 to {_MAX_DEVICES - 1}, got {self.index}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


HOST = Device()


@dataclass(frozen=True, slots=True)
class Memory:
    """One contiguous allocation: ``nbytes`` bytes from address ``base`` on ``device``."""

    base: int
    nbytes: int
    device: Device = HOST

    def __post_init__(self) -> None:
        if self.base <= 0 or self.nbytes <= 0:
            raise BadSpans(f"memory at {self.base:#x} of {self.nbytes} bytes: both must be above 0")

    @property
    def end(self) -> int:
        """First address after this memory."""
        return self.base + self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Byte runs to copy from a peer's memory into ours.

    ``local``, ``remote`` and ``nbytes`` are one-dimensional uint64 arrays of the
    same length n: run i copies ``nbytes[i]`` bytes from the peer's address
    ``remote[i]`` to our address ``local[i]``.

    Raises:
        BadSpans: another dtype, shape or length, an empty run, or an address
            that would overflow 63 bits.
    """

    local: U64
    remote: U64
    nbytes: U64
    local_device: Device = HOST
    remote_device: Device = HOST
    _is_merged: bool = field(default=False, init=False, repr=False)
    _total: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("local", "remote", "nbytes"):
            column = getattr(self, name)
            if column.dtype != np.uint64 or column.ndim != 1:
                raise BadSpans(
                    f"{name}: expected uint64 of shape (n,), got {column.dtype} {column.shape}"
                )
        _check_lengths(self.local, self.remote, self.nbytes)
        if not len(self.nbytes):
            return
        if not np.minimum.reduce(self.nbytes):
            raise BadSpans(f"run {int(np.argmin(self.nbytes))} has 0 bytes")
        last = _LAST_ADDRESS - self.nbytes
        if np.logical_or.reduce(np.maximum(self.local, self.remote) > last):
            name = "local" if (self.local > last).any() else "remote"
            raise BadSpans(f"{name}: an address lies beyond 63 bits")

    @classmethod
    def merged(
        cls, local: U64, remote: U64, nbytes: U64, local_device: Device, remote_device: Device
    ) -> Spans:
        """Spans of which no run continues the one before it; :meth:`coalesced` relies on that."""
        spans = cls(local, remote, nbytes, local_device, remote_device)
        object.__setattr__(spans, "_is_merged", True)
        return spans

    @classmethod
    def merged_few(
        cls,
        local: Sequence[int],
        remote: Sequence[int],
        nbytes: Sequence[int],
        local_device: Device,
        remote_device: Device,
    ) -> Spans:
        """Merged spans of few runs, from integers: checking them without arrays is faster."""
        _check_lengths(local, remote, nbytes)
        if min(nbytes, default=1) < 1:
            raise BadSpans(f"run {nbytes.index(min(nbytes))} has {min(nbytes)} bytes")
        for name, addresses in (("local", local), ("remote", remote)):
            ends = map(add, addresses, nbytes)
            if min(addresses, default=0) < 0 or max(ends, default=0) > _LAST:
                raise BadSpans(f"{name}: an address lies beyond 63 bits")
        table = np.array((local, remote, nbytes), dtype=np.uint64)
        spans = object.__new__(cls)
        for field_name, value in (
            ("local", table[0]), ("remote", table[1]), ("nbytes", table[2]),
            ("local_device", local_device), ("remote_device", remote_device),
            ("_is_merged", True), ("_total", sum(nbytes)),
        ):  # fmt: skip
            object.__setattr__(spans, field_name, value)
        return spans

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that the whole read moves."""
        if self._total < 0:
            object.__setattr__(self, "_total", int(self.nbytes.sum()))
        return self._total

    def coalesced(self) -> Spans:
        """The same copy with neighbouring runs merged.

        Run i + 1 is merged into run i if it continues it on both sides.  Order is kept, so a caller
        that lists blocks in ascending order merges the most.
        """
        if self._is_merged:
            return self
        merged = merge_runs(self.nbytes, self.local, self.remote)
        if merged is None:
            return self
        first, nbytes = merged
        return Spans.merged(
            self.local[first], self.remote[first], nbytes, self.local_device, self.remote_device
        )

    def between(self, ends: U64, start: int, end: int) -> Spans:
        """Bytes ``[start, end)`` of all runs; a run that crosses either bound is cut in two.

        ``ends`` are running sums of the runs' bytes.
        """
        first = int(np.searchsorted(ends, np.uint64(start), side="right"))
        last = int(np.searchsorted(ends, np.uint64(end), side="left"))
        part = slice(first, last + 1)
        local, remote, nbytes = (
            column[part].copy() for column in (self.local, self.remote, self.nbytes)
        )
        nbytes[-1] -= ends[last] - np.uint64(end)
        skipped = np.uint64(start) - (ends[first] - self.nbytes[first])
        local[0] += skipped
        remote[0] += skipped
        nbytes[0] -= skipped
        return Spans(local, remote, nbytes, self.local_device, self.remote_device)

    def chunks(self, nbytes: int) -> Iterator[Spans]:
        """The same copy in parts of ``nbytes`` at most; only runs longer than that are cut."""
        total = self.total_bytes
        if total <= nbytes:
            yield self
            return
        ends, start = np.cumsum(self.nbytes), 0
        while start < total:
            end = min(start + nbytes, total)
            whole = int(np.searchsorted(ends, np.uint64(end), side="right"))
            if whole and int(ends[whole - 1]) > start:
                end = int(ends[whole - 1])
            yield self.between(ends, start, end)
            start = end


def _check_lengths(local: Sized, remote: Sized, nbytes: Sized) -> None:
    if not len(local) == len(remote) == len(nbytes):
        raise BadSpans(
            f"columns differ in length: local {len(local)}, remote {len(remote)}, "
            f"nbytes {len(nbytes)}"
        )


def merge_runs(
    nbytes: NDArray[_Int], *sides: NDArray[_Int], alike: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.intp], NDArray[_Int]] | None:
    """The runs that remain once neighbours are merged, or None if there are no neighbours.

    Run i + 1 is merged into run i if it begins where run i ends, on each of ``sides``.  Order is
    kept: runs that are listed out of order do not merge.

    Args:
        nbytes: bytes of each run, of shape (n,).
        sides: addresses of each run, of shape (n,) each; at least one.
        alike: of shape (n - 1,): whether runs i and i + 1 may merge at all.

    Returns:
        The indices of the runs that remain, and their bytes after merging.

    >>> merge_runs(np.array([4, 4, 4]), np.array([0, 4, 16]))
    (array([0, 2]), array([8, 4]))
    """
    if len(nbytes) < 2:
        return None
    joins = alike
    for addresses in sides:
        follows = addresses[:-1] + nbytes[:-1] == addresses[1:]
        joins = follows if joins is None else joins & follows
    if joins is None or not np.logical_or.reduce(joins):
        return None
    begins = np.ones(len(nbytes), dtype=np.bool_)
    np.logical_not(joins, out=begins[1:])
    first = begins.nonzero()[0]
    return first, np.add.reduceat(nbytes, first)


@dataclass(frozen=True, slots=True)
class ReadStats:
    """The cost of a finished read.

    ``num_descriptors`` is counted after merging; times are in seconds: ``post_s`` for posting,
    ``transfer_s`` from posting until the end was observed.
    """

    nbytes: int
    num_descriptors: int
    post_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Settled:
    """A read that can no longer write.

    ``error`` is None if every byte has arrived; otherwise the local bytes of its spans are
    undefined.  In both cases the destination may be reused.
    """

    stats: ReadStats
    error: TransportError | None = field(default=None)

    @property
    def ok(self) -> bool:
        """Whether every byte has arrived."""
        return self.error is None
