"""Scattered blocks against as many bytes in one piece, in one run.

Prints both speeds and their ratio (``pytest -s``).  The least ratio is loose: on a
GPU each block is a copy of its own that must be launched.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from tests.gpu.bytes_on import BytesOn
from tests.gpu.rigs import DeviceLender, settled_reads
from transport import Device, PeerId, Spans
from transport.nixl.transport import NixlTransport

MIB = 1 << 20
SIZES = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
LEAST = {"cpu": 0.4, "cuda": 0.05}
ROUNDS = 7


def spans_of(ours: BytesOn, remote_base: int, block_nbytes: int, seed: int | None) -> Spans:
    """All of it in blocks: in order, or each to a random place from a random one."""
    device = ours.memory.device
    num = ours.memory.nbytes // block_nbytes
    order = np.arange(num)
    there, here = order, order
    if seed is not None:
        rng = np.random.default_rng(seed)
        there, here = rng.permutation(num), rng.permutation(num)
    local = ours.memory.base + here * block_nbytes
    remote = remote_base + there * block_nbytes
    nbytes = np.full(num, block_nbytes, dtype=np.uint64)
    return Spans(local.astype(np.uint64), remote.astype(np.uint64), nbytes, device, device)


def seconds(transport: NixlTransport, peer: PeerId, spans: Spans) -> float:
    began = time.monotonic()
    [settled] = settled_reads(transport, [transport.read(peer, spans)])
    assert settled.ok, settled.error
    return time.monotonic() - began


@pytest.mark.parametrize("block_kib", [256, 2048])
def test_scattered_blocks_reach_a_part_of_one_piece(
    block_kib: int, lender: DeviceLender, device: Device
) -> None:
    nbytes, block = SIZES[device.kind], block_kib << 10
    address, remote = lender.plain(nbytes)
    source = np.random.default_rng(7).integers(0, 255, nbytes, dtype=np.uint8)
    ours = BytesOn(np.zeros(nbytes, dtype=np.uint8), device)
    with NixlTransport("gpu-decode", huge_pages=False) as transport:
        transport.register([ours.memory])
        peer = transport.connect(address)
        whole = spans_of(ours, remote.base, nbytes, None)
        scattered = spans_of(ours, remote.base, block, seed=1)
        assert len(scattered.coalesced()) > 0.9 * len(scattered)
        seconds(transport, peer, whole)
        pairs = [
            (seconds(transport, peer, whole), seconds(transport, peer, scattered))
            for _ in range(ROUNDS)
        ]
        here = (scattered.local - np.uint64(ours.memory.base)) // np.uint64(block)
        there = (scattered.remote - np.uint64(remote.base)) // np.uint64(block)
        arrived = ours[:].reshape(-1, block)
        assert (arrived[here] == source.reshape(-1, block)[there]).all()
    ratio = statistics.median(one / many for one, many in pairs)
    one, many = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    print(
        f"\n{device}: {nbytes / MIB:.0f} MiB in one piece {nbytes / one / 1e9:.2f} GB/s, in random "
        f"blocks of {block_kib} KiB {nbytes / many / 1e9:.2f} GB/s, ratio {ratio:.2f}"
    )
    assert ratio > LEAST[device.kind]


def test_a_read_of_a_sixteenth_is_seen_to_be_quicker(lender: DeviceLender, device: Device) -> None:
    """Negative control: the clock measures the copy and not something else."""
    nbytes = SIZES[device.kind]
    address, remote = lender.plain(nbytes)
    ours = BytesOn(np.zeros(nbytes, dtype=np.uint8), device)
    with NixlTransport("gpu-decode", huge_pages=False) as transport:
        transport.register([ours.memory])
        peer = transport.connect(address)
        whole = spans_of(ours, remote.base, nbytes, None)
        part = spans_of(ours, remote.base, nbytes // 16, None)
        part = Spans(
            part.local[:1], part.remote[:1], part.nbytes[:1], part.local_device, part.remote_device
        )
        seconds(transport, peer, whole)
        pairs = [
            (seconds(transport, peer, whole), seconds(transport, peer, part)) for _ in range(ROUNDS)
        ]
    assert statistics.median(one / less for one, less in pairs) > 2
