"""Reads over TCP with NIXL's progress thread at rest, adaptive, always awake, or without NIXL.

    python -m tests.throughput.tcp.progress [--rounds 9] [--busy] [--json FILE]

Two processes on this host read ``TOTAL`` bytes in blocks of each size, in random order on the
lender's side, polled as decode's reader thread does; ``single`` is one READ in one piece.  The
settings are those of both sides: ``rest`` never keeps a thread awake (``progress_cores`` 0),
``adaptive`` is the default, ``spin`` keeps the reader's and the lender's awake throughout, and
``ucx`` is ``transport: ucx``, which has no such thread.  All take turns in one run, ``spin`` after
the others.

``--busy`` runs a model beside the reader, a matrix product on the first core over and over, and
tells how long its steps take with reads and without; the reader's thread is given the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reads import JobResult, Read, ReadSettled, TransportJobs
from pdconn.tools.bench.transfer.arena import BenchMemory
from transport import Memory, PeerId, Spans, Transport
from transport.nixl.transport import NixlTransport
from transport.ucx.transport import UcxTransport

TOTAL = 256 << 20
SIZES = {"kib_256": 256 << 10, "kib_1024": 1 << 20, "single": TOTAL}
SETTINGS = ("rest", "adaptive", "spin", "ucx")
_MODULE = "tests.throughput.tcp.progress"
_ROOT = Path(__file__).parents[3]


def opened(name: str, setting: str, cores: set[int]) -> Transport:
    """A transport over TCP alone; NIXL's thread may be driven on ``cores`` unless it rests."""
    if setting == "ucx":
        return UcxTransport(name, options={"TLS": "tcp"})
    config = {"UCX": {"engine_config": "TLS=tcp"}}
    drive_on = frozenset() if setting == "rest" else frozenset(cores)
    return NixlTransport(name, backend_options=config, drive_on=drive_on)


def keep_awake(transport: Transport) -> None:
    """Drive NIXL's thread from now on, whatever is read."""
    assert isinstance(transport, NixlTransport)
    progress = transport._reads.progress  # the benchmark's own setting, which users have not
    assert progress.thread is not None, progress.why
    progress.thread.drive()
    progress.thread = None


class Child:
    """This module in another process: a line of JSON for each line of input."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )

    def ask(self, line: str = "") -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def lend() -> None:
    """Lend one memory under every setting; a setting that is named is connected back, and awake."""
    with BenchMemory(TOTAL, huge_pages=True) as arena, ExitStack() as stack:
        arena.fill(seed=0)
        lenders = {}
        for setting in SETTINGS:
            lender = opened(f"lender-{setting}", setting, os.sched_getaffinity(0))
            lenders[setting] = stack.enter_context(lender)
            lender.register([arena.memory])
        for line in sys.stdin:
            asked, _, address = line.strip().partition(" ")
            if asked == "addresses":
                found = {name: lender.address().hex() for name, lender in lenders.items()}
                print(json.dumps({"base": arena.memory.base, **found}), flush=True)
            else:
                lenders[asked].connect(bytes.fromhex(address))
                keep_awake(lenders[asked])
                print("true", flush=True)


def compute(core: int) -> None:
    """Multiply matrices on one core; each line of input is answered with the steps since."""
    import threading

    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    one, steps, asked = torch.rand(256, 256), [], threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            asked.set()
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        began = time.perf_counter()
        for _ in range(8):
            one @ one
        steps.append(time.perf_counter() - began)
        if asked.is_set():
            asked.clear()
            print(json.dumps(steps), flush=True)
            steps = []


class Reader:
    """One setting's reads, carried out and polled with the code of decode's reader thread.

    Reads are posted whole.  At ``least_pause_s`` seconds a thread that nobody tells us of is
    kept awake: a poll would take UCX's lock from it.
    """

    def __init__(self, transport: Transport, peer: PeerId) -> None:
        self.transport = transport
        self._peer = peer
        self._results: list[JobResult] = []
        self._jobs = TransportJobs(transport, self._results.append, sizer=ChunkSizer(TOTAL, TOTAL))
        self.least_pause_s = 0.0

    def read(self, spans: Spans) -> float:
        """GB/s."""
        began, polls = time.perf_counter(), 0
        self._jobs.do_job(Read("read", self._peer, spans))
        self._jobs.post_chunk()
        while not self._jobs.poll_reads():
            time.sleep(max(self._jobs.pause_s(polls), self.least_pause_s))
            polls += 1
        seconds = time.perf_counter() - began
        result = self._results.pop()
        assert isinstance(result, ReadSettled)
        assert result.settled.ok, result.settled.error
        return TOTAL / seconds / 1e9


class Contest:
    """A reader per setting, all connected to one lending process, and perhaps a busy model."""

    def __init__(self, *, busy: bool) -> None:
        self._stack = ExitStack()
        cores = os.sched_getaffinity(0)
        self.model = Child("--compute", str(min(cores))) if busy else None
        self._lender = Child("--lend")
        self._arena = self._stack.enter_context(BenchMemory(TOTAL, huge_pages=True))
        self._arena.fill(seed=1)
        told = self._lender.ask("addresses")
        self._base = told["base"]
        self._readers: dict[str, Reader] = {}
        spare = cores - {min(cores)} if busy else cores
        for setting in SETTINGS:
            reader = self._stack.enter_context(opened(f"reader-{setting}", setting, spare))
            reader.register([self._arena.memory])
            peer = reader.connect(bytes.fromhex(told[setting]))
            self._readers[setting] = Reader(reader, peer)
        self._rng = np.random.default_rng(0)

    def keep_spin_awake(self) -> None:
        """Wake both threads of ``spin``; they do not rest again before :meth:`close`."""
        spinning = self._readers["spin"]
        self._lender.ask(f"spin {spinning.transport.address().hex()}")
        keep_awake(spinning.transport)
        spinning.least_pause_s = 0.001

    def spans(self, size: int) -> Spans:
        at = np.arange(TOTAL // size, dtype=np.uint64) * np.uint64(size)
        local = at + np.uint64(self._arena.memory.base)
        remote = self._rng.permutation(at) + np.uint64(self._base)
        return Spans(local, remote, np.full(len(at), size, dtype=np.uint64))

    def check(self) -> None:
        """Every byte of one read over every setting is the lender's."""
        spans = self.spans(1 << 20)
        for setting in self._readers:
            self._arena.blank()
            self.read(setting, spans)
            wrong = self._arena.wrong_bytes(spans, Memory(self._base, TOTAL), seed=0)
            assert wrong == 0, f"{setting}: {wrong} bytes are wrong"

    def read(self, setting: str, spans: Spans) -> float:
        """GB/s."""
        return self._readers[setting].read(spans)

    def steps(self) -> float:
        """Median seconds of the model's steps since the last call."""
        assert self.model is not None
        return float(statistics.median(self.model.ask()))

    def close(self) -> None:
        self._stack.close()
        self._lender.close()
        if self.model is not None:
            self.model.close()


def measured(rounds: int, *, busy: bool) -> dict[str, Any]:
    """All settings in turns; ``spin`` has rounds of its own after them, as it never rests again."""
    contest = Contest(busy=busy)
    found: dict[str, dict[str, list[float]]] = {one: {} for one in SETTINGS}
    steps: dict[str, list[float]] = {}
    try:
        contest.check()
        for settings in (("rest", "adaptive", "ucx"), ("spin",)):
            if "spin" in settings:
                contest.keep_spin_awake()
            for _ in range(rounds):
                if busy and "rest" in settings:
                    contest.steps()
                    time.sleep(0.3)
                    steps.setdefault("no reads", []).append(contest.steps())
                for size, nbytes in SIZES.items():
                    spans = contest.spans(nbytes)
                    for setting in settings:
                        if busy:
                            contest.steps()
                        rate = contest.read(setting, spans)
                        found[setting].setdefault(size, []).append(rate)
                        if busy:
                            steps.setdefault(setting, []).append(contest.steps())
    finally:
        contest.close()
    return {
        "rounds": rounds,
        "busy": busy,
        "settings": [
            {"setting": setting}
            | {size: round(statistics.median(rates), 2) for size, rates in sizes.items()}
            for setting, sizes in found.items()
        ],
        "model_steps": [
            {
                "setting": setting,
                "step_us": round(statistics.median(seen) * 1e6, 1),
                "times": round(statistics.median(seen) / statistics.median(steps["no reads"]), 3),
            }
            for setting, seen in steps.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", action="store_true", help="beside a model on the first core")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--lend", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compute", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lend:
        lend()
        return
    if options.compute is not None:
        compute(options.compute)
        return
    results = measured(options.rounds, busy=options.busy)
    print("GB/s    256 KiB  1024 KiB  single")
    for row in results["settings"]:
        print(f"{row['setting']:9}{row['kib_256']:6.2f}{row['kib_1024']:10.2f}{row['single']:8.2f}")
    for row in results["model_steps"]:
        print(f"model's step, {row['setting']}: {row['step_us']:.1f} us, times {row['times']:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
