"""Copies of a store between a device's KV and host memory: each run, and no other byte.

On a GPU they run on a stream of their own; the engine's stream is kept busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pdconn.integrity.zeros import fill_with_zeros
from pdconn.planning.plan import Gaps
from pdconn.store.rank.copies import TorchCopies
from tests.gpu.bytes_on import BytesOn
from transport import Device, Spans

GRAINS, SHIFT, HOST_NBYTES = 600, 72, 1 << 18
GRAIN_NBYTES = [8, 24, 256, 1000]


class Copied:
    """KV of a device, a host buffer, and runs between random places of both."""

    def __init__(self, grain: int, device: Device) -> None:
        random = np.random.default_rng(grain)
        self.content = random.integers(0, 255, SHIFT + GRAINS * grain, dtype=np.uint8)
        self.kv = BytesOn(self.content, device)
        used = min(GRAINS, HOST_NBYTES // grain) // 2
        self.there = SHIFT + random.permutation(GRAINS)[:used] * grain
        self.at = random.permutation(used) * grain
        self.host = random.integers(0, 255, HOST_NBYTES, dtype=np.uint8)
        self.grain = grain
        columns = (
            self.kv.memory.base + self.there,
            self.host.ctypes.data + self.at,
            np.full(used, grain),
        )
        ours, theirs, nbytes = (column.astype(np.uint64) for column in columns)
        self.spans = Spans(ours, theirs, nbytes, device)

    def moved(self, source: np.ndarray, target: np.ndarray, out: bool) -> np.ndarray:
        """``target`` as it must be after, run by run."""
        wanted = target.copy()
        for there, at in zip(self.there, self.at, strict=True):
            kv, host = slice(there, there + self.grain), slice(at, at + self.grain)
            if out:
                wanted[host] = source[kv]
            else:
                wanted[kv] = source[host]
        return wanted


@contextmanager
def busy(device: Device) -> Iterator[None]:
    """Work on the engine's stream that takes longer than the copies."""
    if device.kind == "cuda":
        with torch.inference_mode():
            factor = torch.rand(4096, 4096, device="cuda")
            for _ in range(20):
                factor = (factor @ factor).clamp_(0, 1)
    yield


@pytest.mark.parametrize("grain", GRAIN_NBYTES)
def test_a_save_copies_each_run_out(grain: int, device: Device) -> None:
    copied = Copied(grain, device)
    expected = copied.moved(copied.content, copied.host, out=True)
    with busy(device):
        TorchCopies([copied.kv.memory]).copy_out(copied.spans)
    assert (copied.host == expected).all()
    assert not (copied.kv != copied.content).any()


@pytest.mark.parametrize("grain", GRAIN_NBYTES)
def test_a_load_copies_each_run_in_and_no_other_byte(grain: int, device: Device) -> None:
    copied = Copied(grain, device)
    expected = copied.moved(copied.host, copied.content, out=False)
    before = copied.host.copy()
    with busy(device):
        TorchCopies([copied.kv.memory]).copy_in(copied.spans)
    assert not (copied.kv != expected).any()
    assert (copied.host == before).all()


@pytest.mark.parametrize("grain", GRAIN_NBYTES)
def test_gaps_are_zeroed_and_no_other_byte(grain: int, device: Device) -> None:
    copied = Copied(grain, device)
    runs = np.sort(copied.spans.local)
    expected = copied.content.copy()
    for start in (runs - copied.kv.memory.base).astype(np.int64).tolist():
        expected[start : start + grain] = 0
    with busy(device):
        fill_with_zeros(Gaps(runs, copied.spans.nbytes, device))
    assert not (copied.kv != expected).any()


def test_a_run_that_was_not_copied_is_noticed(device: Device) -> None:
    """Negative control: one run less."""
    copied = Copied(256, device)
    expected = copied.moved(copied.content, copied.host, out=True)
    spans = copied.spans
    less = Spans(spans.local[1:], spans.remote[1:], spans.nbytes[1:], device)
    TorchCopies([copied.kv.memory]).copy_out(less)
    assert (copied.host != expected).any()


def test_copies_to_a_gpu_have_a_stream_of_their_own(device: Device) -> None:
    copies = TorchCopies([Copied(8, device).kv.memory])
    stream = copies._stream
    if device.kind == "cpu":
        assert stream is None
    else:
        assert stream != torch.cuda.default_stream()


def test_their_buffer_is_no_memory_that_the_engine_may_still_write(device: Device) -> None:
    """Torch gives what was freed on a stream to the next on it, while kernels may still write."""
    if device.kind == "cpu":
        return
    nbytes = 64 << 20
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    freed = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    there = range(freed.data_ptr(), freed.data_ptr() + nbytes)
    del freed
    copies = TorchCopies([Copied(8, device).kv.memory])
    assert copies._buffer.data_ptr() not in there
    assert copies._index.data_ptr() not in there
    control = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    assert control.data_ptr() in there
