"""Threads beside the engine's: their CUDA context, how UCX reads, and points in the GPU's work."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.gpu.bytes_on import BytesOn
from tests.gpu.rigs import DeviceLender, settled_reads
from transport import Device, Spans
from transport.nixl.cuda import load_driver
from transport.nixl.transport import NixlTransport
from transport.streams import stream_point

NBYTES = 1 << 20
DIRECT = {"cpu": ("cma", "tcp"), "cuda": ("cuda_ipc",)}
"""Transports of which UCX must have chosen one, to read from a process of the same host."""


def current_context() -> int | None:
    """The calling thread's CUDA context."""
    driver = load_driver()
    if driver is None:
        return None
    context = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    return context.value


def test_a_new_thread_is_bound_and_reads_directly(
    lender: DeviceLender,
    device: Device,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A thread is what decode reads on; before it connects it has no context."""
    address, remote = lender.plain(NBYTES)
    ours = BytesOn(np.zeros(NBYTES, dtype=np.uint8), device)
    one = [np.array([value], np.uint64) for value in (ours.memory.base, remote.base, NBYTES)]
    spans = Spans(*one, local_device=device, remote_device=device)
    caplog.set_level(logging.DEBUG, logger="transport")  # lets UCX print what it chose
    with (
        NixlTransport("gpu-decode", huge_pages=False) as transport,
        ThreadPoolExecutor(1) as thread,
    ):
        transport.register([ours.memory])
        before = thread.submit(current_context).result()
        peer = thread.submit(transport.connect, address).result()
        after = thread.submit(current_context).result()
        read = thread.submit(transport.read, peer, spans).result()
        [settled] = thread.submit(settled_reads, transport, [read]).result()
    assert settled.ok, settled.error
    assert before is None, "negative control: a new thread has none"
    assert (after is not None) == (device.kind == "cuda")
    chosen = capfd.readouterr().out.partition("Endpoint Config")[2]
    assert any(name in chosen for name in DIRECT[device.kind]), chosen
    possible = caplog.text.partition("UCX may connect by: ")[2].splitlines()[0]
    assert all(f"{name}/" in possible for name in DIRECT[device.kind]), possible


def test_a_point_is_reached_after_the_work_before_it(device: Device) -> None:
    if device.kind != "cuda":
        assert stream_point(device) is None
        return
    factor = torch.rand(8192, 8192, device="cuda")
    idle = stream_point(device)
    assert idle is not None
    idle.synchronize()
    assert idle.query(), "the control: a point with nothing before it"
    for _ in range(20):
        factor = (factor @ factor).clamp_(0, 1)
    busy = stream_point(device)
    assert busy is not None
    if busy.query():
        pytest.fail("expected 20 products of 8192 x 8192 to take longer than to ask")
    busy.synchronize()
    assert busy.query()
