"""(a) NIXL on a device's memory between two processes: bytes, UCX's way, and speed.

The speed is set beside torch's copy of as many bytes within one process, to the same memory, and
on a card beside UCX's own choice for a card without NVLink, which is to read through the host.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tests.gpu.bytes_on import BytesOn
from tests.gpu.kit.found import Found, step_arguments
from tests.gpu.rigs import DeviceLender, settled_reads
from transport import Device, PeerId, Spans
from transport.nixl.transport import NixlTransport

MIB = 1 << 20
NBYTES = {"cpu": 64 * MIB, "cuda": 512 * MIB}
DIRECT = {"cpu": ("cma", "sysv", "posix", "tcp"), "cuda": ("cuda_ipc",)}
"""Transports of UCX of which one must carry the bytes."""
LEAST_SHARE = {"cpu": 0.0, "cuda": 0.05}
"""Of the copy's speed that a read in one piece reaches: a table of transports is no proof, since
UCX lists ``cuda_ipc`` also where it does not read by it."""
UCX_OWN = {"UCX": {"engine_config": "CUDA_IPC_ENABLE_GET_ZCOPY=auto"}}
BLOCKS_KIB = (64, 256, 2048)
ROUNDS = 5
SEED = 7
"""Of the lender's bytes: ``DeviceLender.plain``."""


class WrongBytes(Exception):
    """What arrived is not what was lent."""


def spans_of(ours: BytesOn, remote: int, block: int | None) -> tuple[Spans, np.ndarray, np.ndarray]:
    """All of it in one piece, or every block to a random place from a random one."""
    size = block or ours.memory.nbytes
    count = ours.memory.nbytes // size
    random = np.random.default_rng(1)
    there, here = random.permutation(count), random.permutation(count)
    local = (ours.memory.base + here * size).astype(np.uint64)
    far = (remote + there * size).astype(np.uint64)
    device = ours.memory.device
    spans = Spans(local, far, np.full(count, size, np.uint64), device, device)
    return spans, here, there


def seconds(transport: NixlTransport, peer: PeerId, spans: Spans) -> float:
    """Of one read."""
    began = time.monotonic()
    [settled] = settled_reads(transport, [transport.read(peer, spans)])
    assert settled.ok, settled.error
    return time.monotonic() - began


def check(
    ours: BytesOn, source: np.ndarray, size: int, here: np.ndarray, there: np.ndarray
) -> None:
    """Compare every byte.

    Raises:
        WrongBytes: with how many.
    """
    wrong = (ours[:].reshape(-1, size)[here] != source.reshape(-1, size)[there]).sum()
    if wrong:
        raise WrongBytes(f"{wrong} bytes of {source.size} differ")


def copied_gb_s(nbytes: int, device: Device) -> float:
    """Torch's copy within a process, bytes written per second."""
    where = torch.device("cpu" if device.kind == "cpu" else f"cuda:{device.index}")
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    took = []
    for _ in range(ROUNDS + 1):
        _wait(where)
        began = time.monotonic()
        target.copy_(source)
        _wait(where)
        took.append(time.monotonic() - began)
    return nbytes / statistics.median(took[1:]) / 1e9


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


@contextmanager
def standard_output() -> Iterator[list[str]]:
    """What this process writes to its standard output, UCX's C code included."""
    said: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 1)
        try:
            yield said
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            caught.seek(0)
            said.append(caught.read().decode(errors="replace"))


def ways_of(transport: NixlTransport, address: bytes, spans: Spans) -> dict[str, str]:
    """Each transport that UCX chose, and for what: it prints that, where our log is at debug."""
    log = logging.getLogger("transport")
    before = log.level
    log.setLevel(logging.DEBUG)
    try:
        with standard_output() as said:
            seconds(transport, transport.connect(address), spans)
    finally:
        log.setLevel(before)
    return ways_in(said[0])


def ways_in(said: str) -> dict[str, str]:
    """Of UCX's table ``| Transport | Device | # Lanes | Lane Types |``."""
    table = said.partition("Endpoint Config")[2]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    return {row[0]: row[3] for row in rows if len(row) == 4 and row[0] not in ("", "Transport")}


def main() -> int:
    """Exit status 1: a wrong byte, or another way than expected."""
    device, found = step_arguments(__doc__)
    lender = DeviceLender(device)
    try:
        return _measure(device, lender, found)
    finally:
        lender.end()


def _measure(device: Device, lender: DeviceLender, found: Found) -> int:
    nbytes = NBYTES[device.kind]
    address, remote = lender.plain(nbytes)
    source = np.random.default_rng(SEED).integers(0, 255, nbytes, dtype=np.uint8)
    ours = BytesOn(np.zeros(nbytes, dtype=np.uint8), device)
    logging.getLogger("transport").setLevel(logging.DEBUG)  # at its start UCX learns to print
    whole, _, _ = spans_of(ours, remote.base, None)
    copied = copied_gb_s(nbytes, device)
    found.add("copy within a process, GB/s", round(copied, 2))
    with NixlTransport("kit-decode", huge_pages=False) as transport:
        transport.register([ours.memory])
        ways = ways_of(transport, address, whole)
        peer = transport.connect(address)
        speeds = {}
        for block in (None, *(kib << 10 for kib in BLOCKS_KIB)):
            ours[:] = np.zeros(nbytes, dtype=np.uint8)
            spans, here, there = spans_of(ours, remote.base, block)
            speeds[block] = nbytes / median_s(transport, peer, spans) / 1e9
            check(ours, source, block or nbytes, here, there)
            name = f"read in blocks of {block >> 10} KiB" if block else "read in one piece"
            found.add(f"{name}, GB/s", round(speeds[block], 2))
    is_direct = any("rma" in ways.get(name, "") for name in DIRECT[device.kind])
    is_direct = is_direct and speeds[None] >= LEAST_SHARE[device.kind] * copied
    found.add("ways", {**ways, "as expected": is_direct})
    found.add("control", _is_noticed(ours, source))
    if device.kind == "cuda":
        found.add("by UCX's own choice, GB/s", _by_ucx_alone(address, ours, whole))
    return 0 if is_direct else 1


def median_s(transport: NixlTransport, peer: PeerId, spans: Spans) -> float:
    """Of some reads, after one that does not count."""
    return statistics.median([seconds(transport, peer, spans) for _ in range(ROUNDS + 1)][1:])


def _by_ucx_alone(address: bytes, ours: BytesOn, whole: Spans) -> float:
    """The same read in one piece without our setting of ``cuda_ipc``."""
    with NixlTransport("kit-plain", huge_pages=False, backend_options=UCX_OWN) as transport:
        transport.register([ours.memory])
        took = median_s(transport, transport.connect(address), whole)
    return round(ours.memory.nbytes / took / 1e9, 2)


def _is_noticed(ours: BytesOn, source: np.ndarray) -> str:
    """Negative control: one flipped byte is found."""
    ours[:] = source
    ours.flip(source.size // 2)
    everything = np.zeros(1, np.int64)
    try:
        check(ours, source, source.size, everything, everything)
    except WrongBytes as error:
        return str(error)
    raise AssertionError("a flipped byte was not noticed")


if __name__ == "__main__":
    sys.exit(main())
