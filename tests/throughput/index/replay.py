"""Replays recorded steps through one index, in a process of its own on one core.

    python tests/throughput/index/replay.py dynamo steps.pickle 1 1000

It runs with the rival's Python too, so it imports nothing but the standard library before it knows
whose index it is.  The index is filled twice:

1. All batches at once.  The time counts until a look-up sees the last block that was stored, so
   work that an index leaves to a thread of its own is counted.
2. Batches and look-ups in the order of the trace; each look-up is timed once an empty one has
   shown that no batch is waiting, and what it finds is compared with what was recorded.

Processor time is of the process with all its threads.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any, Protocol

Row = tuple[int, int, list[int], list[int], Any, list[bytes], tuple[int, int], dict[int, int]]
"""A step as ``recording.save`` writes it."""


class Contestant(Protocol):
    """An index."""

    windows: bool

    def batches_of(self, row: Row) -> list[bytes]:
        """The step's payloads in the form that this index takes."""

    def prompt_of(self, row: Row) -> Any:
        """The prompt in the form that this index takes; not timed."""

    def apply_batch(self, pod: int, payload: bytes) -> None: ...

    def matches(self, prompt: Any) -> dict[int, int]:
        """Leading blocks that each pod holds, without pods that hold none."""


class Dynamo:
    """The RadixTree of ``ai-dynamo-runtime``, which a thread of its own serves."""

    windows = False

    def __init__(self, pods: int) -> None:
        self._tree = importlib.import_module("dynamo._core").RadixTree()

    def batches_of(self, row: Row) -> list[bytes]:
        return row[5]

    def prompt_of(self, row: Row) -> list[int]:
        return row[3]

    def apply_batch(self, pod: int, payload: bytes) -> None:
        self._tree.apply_event(pod, payload)

    def matches(self, prompt: list[int]) -> dict[int, int]:
        scores = self._tree.find_matches(prompt).scores
        return {pod: number for (pod, _), number in scores.items()}


def contestant(name: str, pods: int) -> Contestant:
    """The index of this name, empty."""
    if name == "dynamo":
        return Dynamo(pods)
    made: Contestant = importlib.import_module("tests.throughput.index.ours").made(name, pods)
    return made


def resident_nbytes() -> int:
    """Resident memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def fill(index: Contestant, rows: list[Row]) -> dict[str, float]:
    """Apply every batch; what it took until the last one was seen, and the memory."""
    batches = [(row[0], index.batches_of(row)) for row in rows]
    last = next(row for row in reversed(rows) if index.batches_of(row))
    prompt = index.prompt_of(last)
    gc.collect()
    nbytes, wall, used = resident_nbytes(), time.perf_counter(), time.process_time()
    for pod, payloads in batches:
        for payload in payloads:
            index.apply_batch(pod, payload)
    found = index.matches(prompt)
    used, wall = time.process_time() - used, time.perf_counter() - wall
    if found.get(last[0]) != len(last[2]):
        raise SystemExit(f"the last batch is not seen: {found.get(last[0])} of {len(last[2])}")
    gc.collect()
    ops = sum(row[6][0] + (row[6][1] if index.windows else 0) for row in rows)
    return {
        "ops": ops,
        "fill_s": used,
        "fill_wall_s": wall,
        "grown_nbytes": resident_nbytes() - nbytes,
    }


def look_up(index: Contestant, rows: list[Row]) -> dict[str, Any]:
    """Apply and look up in the order of the trace; the times of each look-up in seconds."""
    used_s, wall_s, wrong, less, blocks = [], [], 0, 0, 0
    nothing = index.prompt_of((0, 0, [], [], (), [], (0, 0), {}))
    for row in rows:
        prompt = index.prompt_of(row)
        index.matches(nothing)
        wall, used = time.perf_counter(), time.process_time()
        found = index.matches(prompt)
        used_s.append(time.process_time() - used)
        wall_s.append(time.perf_counter() - wall)
        if index.windows:  # a window can only make a match shorter
            wrong += any(number > row[7].get(pod, 0) for pod, number in found.items())
            less += max(found.values(), default=0) < max(row[7].values(), default=0)
        else:
            wrong += found != row[7]
        blocks += len(row[2])
        for payload in index.batches_of(row):
            index.apply_batch(row[0], payload)
    return {
        "used_s": used_s, "wall_s": wall_s, "wrong": wrong, "shorter": less, "blocks": blocks,
    }  # fmt: skip


def main(name: str, file: str, pods: int, core: int) -> None:
    """Print the figures of one index as JSON."""
    os.sched_setaffinity(0, {core})
    rows: list[Row] = pickle.loads(Path(file).read_bytes())
    gc.freeze()
    result: dict[str, Any] = fill(contestant(name, pods), rows)
    result |= look_up(contestant(name, pods), rows)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
