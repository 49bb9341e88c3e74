"""Which source files a request runs through, and how often it changes from one to another.

    python -m tests.project.structure.traced [--root DIR] [--runs N] [--json]

Counted are calls of Python functions whose file lies in one of the three packages, as
``sys.setprofile`` reports them, on every thread.  The calls of a thread are a sequence of files;
two neighbours that differ are a change; the changes of all threads are summed.  Of N runs, each
in fresh objects, the medians are printed:

first pull
    From the claim to the report and the freed lease, both sides, over real sockets and threads
    with bytes in this process.  It includes the connection and the greeting.
next pull
    The same of a second request: the peer is connected.
routed request
    One completion through the router: prefill, then decode, which are fake engines, after one
    that is not counted.
store save
    A prompt of two rows, from its arrival until both are committed to a folder: the scheduler's
    half and one rank, with a budget.  A prompt saved before is not counted.
store load
    The same prompt again, from its arrival until its rows are in the blocks.

This file runs inside the checkout that ``--root`` names, so it imports nothing beside itself
from ``tests.project.structure``, and knows old and new names of what drives a request.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PACKAGES = ("pdconn", "transport", "registration")
PAIRS = ("tests.fakes.pair", "tests.pair")
STORES = ("tests.store.joined.rig",)
FAKE_ENGINES = ("tests.fakes.deployment", "tests.fakes.fake_engine", "tests.unit.fake_engine")
SETTLE_S = 0.1
MOST = 20
"""Kinds of change that ``--json`` lists, the most frequent first."""


class CallRecorder:
    """Notes the files of calls on all threads that start while it is installed."""

    def __init__(self, root: Path) -> None:
        self._prefixes = tuple(f"{root / package}{os.sep}" for package in PACKAGES)
        self._cut = len(str(root)) + 1
        self._by_thread: defaultdict[int, list[str]] = defaultdict(list)
        self._is_on = False

    def __enter__(self) -> CallRecorder:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it, in every CPython

    def _note(self, frame: Any, event: str, _: object) -> None:
        if self._is_on and event == "call":
            path = frame.f_code.co_filename
            if path.startswith(self._prefixes):
                self._by_thread[threading.get_ident()].append(path[self._cut :])

    def start(self) -> None:
        """Forget what was noted, and note from here on."""
        self._by_thread.clear()
        self._is_on = True

    def stop(self) -> dict[str, Any]:
        """What was noted since ``start``."""
        self._is_on = False
        return summed(list(self._by_thread.values()))


def summed(sequences: list[list[str]]) -> dict[str, Any]:
    """Distinct files, and changes from one file to another within each sequence."""
    pairs = Counter(
        f"{a} -> {b}" for files in sequences for a, b in itertools.pairwise(files) if a != b
    )
    names = sorted({name for files in sequences for name in files})
    most = dict(pairs.most_common(MOST))
    return {"files": len(names), "changes": pairs.total(), "names": names, "most": most}


def imported(names: tuple[str, ...]) -> Any:
    """The first module of ``names`` that this checkout has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(f"none of {', '.join(names)}")


def trace_pulls(recorder: CallRecorder) -> dict[str, dict[str, Any]]:
    """A first pull of a new pair, and the one after it."""
    found = {}
    with imported(PAIRS).Pair() as pair:
        for name in ("first pull", "next pull"):
            ticket = pair.lend(name)
            recorder.start()
            pair.pull(name, ticket)
            assert pair.outcome_of(name) is None
            pair.freed()
            threading.Event().wait(SETTLE_S)  # what threads do after the report counts as well
            found[name] = recorder.stop()
    return found


async def trace_request(recorder: CallRecorder) -> dict[str, dict[str, Any]]:
    """The second request of a new router."""
    async with imported(FAKE_ENGINES).deployment() as deployment:
        await deployment.complete()
        recorder.start()
        reply = await deployment.complete()
        await asyncio.sleep(SETTLE_S)
        found = recorder.stop()
        assert reply.status == 200
    return {"routed request": found}


def trace_store(recorder: CallRecorder) -> dict[str, dict[str, Any]]:
    """A save to a folder after another one, and a load of it."""
    rig = imported(STORES)
    prompts = [[seed * 1000 + token for token in range(80)] for seed in (1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        settings = imported(("pdconn.store.settings",)).StoreSettings(
            root=f"{folder}/root", capacity=1 << 30, staging=8 << 20, block_tokens=64, min_tokens=1
        )
        engine = rig.FakeEngine(settings, budget=None)
        try:
            rig.until_ready(engine)
            engine.run(prompts[0])
            engine.settle()
            recorder.start()
            engine.run(prompts[1])
            engine.settle()
            saved = recorder.stop()
            recorder.start()
            assert engine.run(prompts[1]).loaded == 64
            loaded = recorder.stop()
        finally:
            engine.close()
    return {"store save": saved, "store load": loaded}


def trace(root: Path) -> dict[str, dict[str, Any]]:
    """Each kind once."""
    with CallRecorder(root) as recorder:
        return {
            **trace_pulls(recorder),
            **asyncio.run(trace_request(recorder)),
            **trace_store(recorder),
        }


def medians(run: Callable[[], dict[str, dict[str, Any]]], runs: int) -> dict[str, dict[str, Any]]:
    """Of the numbers of ``runs`` runs, the files of any, and the last one's commonest changes."""
    every = [run() for _ in range(runs)]
    found = {}
    for name in every[0]:
        numbers = {
            key: round(statistics.median(one[name][key] for one in every))
            for key in ("files", "changes")
        }
        names = sorted({n for one in every for n in one[name]["names"]})
        found[name] = {**numbers, "names": names, "most": every[-1][name]["most"]}
    return found


def main() -> int:
    """Run inside ``--root`` and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (this one)")
    parser.add_argument("--runs", type=int, default=5, help="medians are of these (%(default)s)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="as JSON, with the files' names and the commonest changes",
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = options.root.resolve()
    if not options.inside:
        here = Path(__file__).resolve()
        command = [sys.executable, str(here), *sys.argv[1:], "--root", str(root), "--inside"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(command, env=environment, cwd=root, check=False).returncode
    found = medians(lambda: trace(root), options.runs)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, numbers in found.items():
        print(f"{name:<15} {numbers['files']:>3} files  {numbers['changes']:>4} changes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
