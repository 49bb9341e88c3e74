"""A process that lends or reads over UCX, to be stopped and killed by tests.

lend NBYTES                   prints address and base, lends until its input ends
read ADDRESS BASE NBYTES RUN  prints "reading", then reads all in runs of RUN bytes, for ever
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transport.types import Memory, Spans
from transport.ucx.transport import UcxTransport

TCP: dict[str, Any] = {"options": {"TLS": "tcp,self"}, "huge_pages": False}


def content(nbytes: int) -> NDArray[np.uint8]:
    """What a lender of these tests holds; no byte is 255."""
    return np.random.default_rng(3).integers(0, 255, nbytes, dtype=np.uint8)


def shuffled(base: int, their_base: int, nbytes: int, run: int, seed: int = 5) -> Spans:
    """Everything, in runs that are shuffled on their side."""
    count = nbytes // run
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(run)
    theirs = np.random.default_rng(seed).permutation(offsets)
    return Spans(
        offsets + np.uint64(base),
        theirs + np.uint64(their_base),
        np.full(count, run, dtype=np.uint64),
    )


@contextmanager
def process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Such a process, and the first line that it printed; it is killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.ucx.ucx_process", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child, next(line[1:] for line in child.stdout if line.startswith("@"))
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def _lend(nbytes: int) -> None:
    held = content(nbytes)
    with UcxTransport("lender", **TCP) as lender:
        lender.register([Memory(held.ctypes.data, nbytes)])
        print("@" + json.dumps([lender.address().hex(), held.ctypes.data]), flush=True)
        sys.stdin.read()


def _read(address: str, base: int, nbytes: int, run: int) -> None:
    ours = np.zeros(nbytes, dtype=np.uint8)
    with UcxTransport("reader", **TCP) as reader:
        reader.register([Memory(ours.ctypes.data, nbytes)])
        peer = reader.connect(bytes.fromhex(address))
        spans = shuffled(ours.ctypes.data, base, nbytes, run)
        while True:
            read = reader.read(peer, spans)
            print("@reading", flush=True)
            while reader.poll(read) is None:
                time.sleep(0.001)


if __name__ == "__main__":
    if sys.argv[1] == "lend":
        _lend(int(sys.argv[2]))
    else:
        _read(sys.argv[2], *map(int, sys.argv[3:]))
