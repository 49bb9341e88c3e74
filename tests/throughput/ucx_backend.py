"""Reads over the NIXL and the UCX backend, in turn, in one run, between two processes.

    python -m tests.throughput.ucx_backend [--tls tcp,self] [--rounds 9] [--json FILE]

Each round reads ``TOTAL`` bytes once per backend and size, in random order; blocks lie
in random order on both sides.  Every payload is compared.  Both use the same UCX
transports, each with its own default segments (1 M here, 256 K with NIXL); absolute figures
are those of the machine, at that minute.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from transport.base import Transport
from transport.types import Memory, PeerId, Spans

TOTAL = 64 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)


def opened(backend: str, name: str, tls: str) -> Transport:
    """A transport of ``backend`` restricted to ``tls``, without huge pages."""
    if backend == "nixl":
        from transport.nixl.transport import NixlTransport

        # NIXL splits engine_config at commas, and allows no list.
        config = {"UCX": {"engine_config": f"TLS={tls.partition(',')[0]}"}}
        return NixlTransport(name, backend_options=config, huge_pages=False)
    from transport.ucx.transport import UcxTransport

    return UcxTransport(name, options={"TLS": tls}, huge_pages=False)


def content() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The lender's memory."""
    return np.random.default_rng(1).integers(0, 255, TOTAL, dtype=np.uint8)


def lend(tls: str) -> None:
    """Lend over both backends until standard input ends."""
    held = content()
    memory = Memory(held.ctypes.data, TOTAL)
    transports = {backend: opened(backend, "lender", tls) for backend in ("nixl", "ucx")}
    for transport in transports.values():
        transport.register([memory])
    addresses = {backend: each.address().hex() for backend, each in transports.items()}
    print("@" + json.dumps({"base": memory.base, **addresses}), flush=True)
    sys.stdin.read()
    for transport in transports.values():
        transport.close()


class Contest:
    """Both backends' readers, connected to one lender process."""

    def __init__(self, tls: str) -> None:
        command = [sys.executable, "-m", "tests.throughput.ucx_backend", "--lend", "--tls", tls]
        self._lender = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._lender.stdout is not None
        addresses = json.loads(next(line for line in self._lender.stdout if line[0] == "@")[1:])
        self._base = addresses["base"]
        self._expected = content()
        self._bytes = np.zeros(TOTAL, dtype=np.uint8)
        self._readers: dict[str, tuple[Transport, PeerId]] = {}
        for backend in ("nixl", "ucx"):
            reader = opened(backend, "reader", tls)
            reader.register([Memory(self._bytes.ctypes.data, TOTAL)])
            self._readers[backend] = reader, reader.connect(bytes.fromhex(addresses[backend]))

    def read(self, backend: str, size: int, seed: int) -> float:
        """Read everything in blocks of ``size`` bytes; GB/s."""
        reader, peer = self._readers[backend]
        rng, blocks = np.random.default_rng(seed), TOTAL // size
        ours, theirs = rng.permutation(blocks), rng.permutation(blocks)
        spans = Spans(
            (ours * size + self._bytes.ctypes.data).astype(np.uint64),
            (theirs * size + self._base).astype(np.uint64),
            np.full(blocks, size, dtype=np.uint64),
        )
        self._bytes[:] = 0
        began = time.perf_counter()
        read = reader.read(peer, spans)
        pause = 0.00002
        while (settled := reader.poll(read)) is None:
            time.sleep(pause)
            pause = min(2 * pause, 0.001)  # as the connector's own reader does
        elapsed = time.perf_counter() - began
        assert settled.ok, settled.error
        moved = self._bytes.reshape(blocks, size)[ours]
        assert (moved == self._expected.reshape(blocks, size)[theirs]).all(), "payload differs"
        return TOTAL / elapsed / 1e9

    def close(self) -> None:
        """End readers and lender."""
        for reader, _ in self._readers.values():
            reader.close()
        self._lender.communicate()


def compare(tls: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """GB/s of every round, by size and backend."""
    contest = Contest(tls)
    cases = [(backend, size) for backend in ("nixl", "ucx") for size in SIZES]
    for backend, size in cases:
        contest.read(backend, size, seed=0)
    seen: dict[str, dict[str, list[float]]] = {str(s): {"nixl": [], "ucx": []} for s in SIZES}
    rng = random.Random(1)
    for number in range(rounds):
        for backend, size in rng.sample(cases, len(cases)):
            seen[str(size)][backend].append(contest.read(backend, size, seed=number))
    contest.close()
    return seen


def summary(seen: dict[str, dict[str, list[float]]]) -> list[dict[str, float]]:
    """By block size: medians in GB/s; the ratio of each round: median and quartiles."""
    sizes = []
    for size, runs in seen.items():
        ratios = [u / n for u, n in zip(runs["ucx"], runs["nixl"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        sizes.append(
            {
                "block_kib": int(size) >> 10,
                "nixl": statistics.median(runs["nixl"]),
                "ucx": statistics.median(runs["ucx"]),
                "ratio": statistics.median(ratios),
                "low": low,
                "high": high,
            }
        )
    return sizes


def table(sizes: list[dict[str, float]]) -> str:
    """A row per block size."""
    lines = [f"{'block':>8} {'nixl':>8} {'ucx':>8} {'ucx/nixl':>9}   GB/s"]
    for size in sizes:
        lines.append(
            f"{size['block_kib']:>7}K {size['nixl']:>8.2f} {size['ucx']:>8.2f} "
            f"{size['ratio']:>9.2f}   {size['low']:.2f} to {size['high']:.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the comparison, or lend for one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tls", default="tcp,self")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lend", action="store_true")
    options = parser.parse_args()
    if options.lend:
        lend(options.tls)
        return
    seen = compare(options.tls, options.rounds)
    sizes = summary(seen)
    print(table(sizes))
    if options.json:
        document = {"tls": options.tls, "sizes": sizes, "gb_per_s": seen}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
