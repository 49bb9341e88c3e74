"""Copies move every run, and nothing else, whatever the addresses and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from pdconn.store.rank import copies as module
from pdconn.store.rank.copies import Copies, HostCopies, TorchCopies, copies_of
from tests.property.scale import drawn
from transport import Device, Memory, Spans

U8 = NDArray[np.uint8]
MAKERS: Sequence[Callable[[Sequence[Memory]], Copies]] = (HostCopies, TorchCopies)


@dataclass
class Arena:
    """Some allocations of KV, one host buffer, and runs between them."""

    kv: list[U8]
    host: U8
    runs: list[tuple[int, int, int, int]]
    """Allocation, offset there, offset in the host buffer, bytes."""

    def memories(self) -> list[Memory]:
        return [Memory(one.ctypes.data, one.nbytes) for one in self.kv]

    def spans(self) -> Spans:
        columns = [
            (self.kv[kv].ctypes.data + offset, self.host.ctypes.data + at, nbytes)
            for kv, offset, at, nbytes in self.runs
        ]
        table = np.array(columns, dtype=np.uint64).reshape(-1, 3)
        return Spans(*(np.ascontiguousarray(column) for column in table.T))

    def copied_out(self) -> U8:
        """The host buffer as it must be after, run by run."""
        wanted = self.host.copy()
        for kv, offset, at, nbytes in self.runs:
            wanted[at : at + nbytes] = self.kv[kv][offset : offset + nbytes]
        return wanted

    def copied_in(self) -> list[U8]:
        wanted = [one.copy() for one in self.kv]
        for kv, offset, at, nbytes in self.runs:
            wanted[kv][offset : offset + nbytes] = self.host[at : at + nbytes]
        return wanted


@st.composite
def arenas(draw: st.DrawFn) -> Arena:
    """Cells of one size or several, each in one run at most, at any alignment."""
    grain = draw(st.sampled_from([1, 3, 8, 16, 24, 64]))
    shift = draw(st.integers(0, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    runs: list[tuple[int, int, int, int]] = []
    cells = 40
    free = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    at = shift
    for kv in free:
        cell = 0
        while cell < cells:
            count = draw(st.integers(1, 5))
            if draw(st.booleans()) and cell + count <= cells:
                runs.append((kv, shift + cell * grain, at, count * grain))
                at += count * grain + draw(st.sampled_from([0, 0, 1, 64]))
            cell += count
    order = draw(st.permutations(runs))
    kv = [random.integers(0, 256, shift + cells * grain + 7, dtype=np.uint8) for _ in range(4)]
    return Arena(kv, random.integers(0, 256, at + 9, dtype=np.uint8), list(order))


@drawn(80)
@given(arenas(), st.sampled_from(MAKERS))
def test_out_and_in_move_every_run_and_nothing_else(
    arena: Arena, make: Callable[[Sequence[Memory]], Copies]
) -> None:
    copies = make(arena.memories())
    wanted, kv = arena.copied_out(), [one.copy() for one in arena.kv]
    copies.copy_out(arena.spans())
    assert (arena.host == wanted).all()
    assert all((one == two).all() for one, two in zip(arena.kv, kv, strict=True))
    arena.host[:] = np.random.default_rng(1).integers(0, 256, arena.host.nbytes, dtype=np.uint8)
    into, host = arena.copied_in(), arena.host.copy()
    copies.copy_in(arena.spans())
    assert all((one == two).all() for one, two in zip(arena.kv, into, strict=True))
    assert (arena.host == host).all()


@drawn(40)
@given(arenas(), st.integers(1, 7))
def test_pieces_of_any_size_move_every_run_and_nothing_else(arena: Arena, grains: int) -> None:
    """A GPU's copies hold a buffer of a fixed size; here one of a few grains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_GRAINS", grains)
        test_out_and_in_move_every_run_and_nothing_else.hypothesis.inner_test(arena, TorchCopies)


def test_a_copy_takes_no_memory_but_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load had to find room on the GPU for all its bytes, after it was promised."""
    random = np.random.default_rng(0)
    size, count = 4096, 2048
    kv = random.integers(0, 256, size * count, dtype=np.uint8)
    order = random.permutation(count)
    runs = [(0, int(block) * size, at * size, size) for at, block in enumerate(order)]
    arena = Arena([kv], np.zeros(size * count, dtype=np.uint8), runs)
    monkeypatch.setattr(module, "_PIECE_NBYTES", 1 << 20)
    wanted, copies = arena.copied_out(), TorchCopies(arena.memories())
    copies.copy_out(arena.spans())  # what torch loads at its first copy
    assert (arena.host == wanted).all()
    assert most_allocated(lambda: copies.copy_out(arena.spans())) < 1 << 16
    assert most_allocated(lambda: copies.copy_in(arena.spans())) < 1 << 16
    assert most_allocated(lambda: torch.empty(1 << 20, dtype=torch.uint8)) >= 1 << 20  # control


class Stream:
    """A stream of a GPU: what is queued runs on until a thread waits for it."""

    is_running = False

    def synchronize(self) -> None:
        self.is_running = False


def test_a_copy_that_fails_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are another request's a step later."""
    kv = np.zeros(8192, dtype=np.uint8)
    runs = [(0, 0, 4096, 4096), (0, 4096, 0, 4096)]
    arena = Arena([kv], np.ones(8192, dtype=np.uint8), runs)
    copies, stream = TorchCopies(arena.memories()), Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    copies._stream = stream

    def fail(*_: object) -> None:
        stream.is_running = True
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(TorchCopies, "_in", staticmethod(fail))
        with pytest.raises(RuntimeError, match="out of memory"):
            copies.copy_in(arena.spans())
    assert not stream.is_running


def most_allocated(run: Callable[[], object]) -> int:
    """Bytes of the largest tensor that torch allocates meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    return max((abs(event.cpu_memory_usage) for event in seen.events()), default=0)


def _shifted(arena: Arena) -> Arena:
    return replace(arena, runs=[(kv, offset, at + 1, n) for kv, offset, at, n in arena.runs])


def _one_less(arena: Arena) -> Arena:
    return replace(arena, runs=arena.runs[1:])


def _swapped(arena: Arena) -> Arena:
    (kv, offset, at, n), (other, there, to, m), *rest = arena.runs
    return replace(arena, runs=[(kv, offset, to, n), (other, there, at, m), *rest])


def small() -> Arena:
    random = np.random.default_rng(0)
    kv = [random.integers(0, 256, 4096, dtype=np.uint8) for _ in range(2)]
    runs = [(0, 64, 0, 128), (1, 0, 256, 128), (0, 1024, 128, 128), (1, 512, 1024, 64)]
    return Arena(kv, np.zeros(2048, dtype=np.uint8), runs)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("wrong", [_shifted, _one_less, _swapped])
def test_other_runs_are_noticed(
    wrong: Callable[[Arena], Arena], make: Callable[[Sequence[Memory]], Copies]
) -> None:
    arena = small()
    wanted = arena.copied_out()
    make(arena.memories()).copy_out(wrong(arena).spans())
    assert (arena.host != wanted).any()


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_to_copy_is_no_error(make: Callable[[Sequence[Memory]], Copies]) -> None:
    arena = replace(small(), runs=[])
    make(arena.memories()).copy_out(arena.spans())
    make(arena.memories()).copy_in(arena.spans())


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("run", [(0, 4000, 0, 97), (0, -1, 0, 8), (1, 4096, 0, 1)])
def test_a_run_that_leaves_kv_memory_is_refused_before_a_byte_moves(
    run: tuple[int, int, int, int], make: Callable[[Sequence[Memory]], Copies]
) -> None:
    arena = small()
    lone = replace(arena, runs=[*arena.runs, run], kv=[one[:4096] for one in arena.kv])
    before = arena.host.copy()
    with pytest.raises(ValueError, match="expected one in KV memory"):
        make(lone.memories()).copy_out(lone.spans())
    assert (arena.host == before).all()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grains of every indexed copy."""
    seen: list[int] = []
    take = np.take

    def counted(*args: object, **named: object) -> object:
        seen.append(len(args[1]))  # type: ignore[arg-type]
        return take(*args, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(np, "take", counted)
    return seen


def test_a_row_is_one_indexed_copy_however_many_runs_it_has(steps: list[int]) -> None:
    size, count = 256, 300
    kv = np.random.default_rng(0).integers(0, 256, size * 2 * count, dtype=np.uint8)
    order = np.random.default_rng(1).permutation(2 * count)[:count]
    runs = [(0, int(block) * size, at * size, size) for at, block in enumerate(order)]
    arena = Arena([kv], np.zeros(size * count, dtype=np.uint8), runs)
    wanted = arena.copied_out()
    copies_of(arena.memories()).copy_out(arena.spans())
    assert steps == [count]
    assert (arena.host == wanted).all()


def test_the_device_decides_what_copies() -> None:
    host = Memory(1 << 20, 64)
    assert isinstance(copies_of([host]), HostCopies)
    with pytest.raises(ValueError, match="device: expected one, got"):
        copies_of([host, Memory(1 << 21, 64, Device("cuda", 1))])
    with pytest.raises(ValueError, match="device: expected one"):
        copies_of([])
