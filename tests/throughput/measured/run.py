"""Runs a benchmark's commands, one after the other, and makes the record of them."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pdconn.tools.bench.manifest import machine
from pdconn.tools.bench.manifest import versions as manifest_versions
from pdconn.tools.lab.lab_errors import LabError
from pdconn.tools.lab.process import Process
from tests.throughput.measured.catalog import Benchmark, Command
from tests.throughput.measured.record import BenchmarkFailed, NotHere, Record, Run, without

Say = Callable[[str], None]
Clock = Callable[[], float]

TICK_S = 0.1
LEAST_S, TIMES = 600.0, 5.0
"""A command is ended after so many times its benchmark's minutes, and not before ``LEAST_S``."""


def measured(benchmark: Benchmark, logs: Path, say: Say, clock: Clock = time.monotonic) -> Record:
    """Run all commands of ``benchmark``; what they print goes to ``logs``.

    ``say`` gets the last line that was printed, again and again.  A command that takes far
    longer than ``benchmark.minutes``, by ``clock``, is ended with all that it started.

    Raises:
        NotHere: the machine lacks what the benchmark needs.
        BenchmarkFailed: a command failed, took too long, or wrote no JSON.
    """
    missing = [need.words for need in benchmark.needs if not need.met()]
    if missing:
        raise NotHere(f"needs {', '.join(missing)}")
    began = datetime.now(UTC)
    runs = {one.name: _run(benchmark, one, logs, say, clock) for one in benchmark.commands}
    found = {**manifest_versions(), **_versions(benchmark.packages)}
    return Record(
        benchmark.name, began.isoformat(timespec="seconds"), machine_in_words(), found, runs
    )


def machine_in_words() -> dict[str, str]:
    """The machine as the page names it."""
    seen = machine()
    cores, gib = int(seen["cores"]), int(seen["memory_bytes"]) / (1 << 30)
    release = re.search(r"\d+\.\d+", seen["system"])
    return {
        "processor": " ".join(seen["processor"].replace("(R)", "").split()),
        "cores": f"{cores} core" + ("s" if cores > 1 else ""),
        "memory": f"{gib:.0f} GiB",
        "system": " ".join([seen["system"].split()[0], *([release[0]] if release else [])]),
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed; a build for CPUs only has a name of its own."""
    found = {}
    for package in packages:
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found


def _run(benchmark: Benchmark, command: Command, logs: Path, say: Say, clock: Clock) -> Run:
    log = logs / f"{benchmark.name}-{command.name}.log"
    logs.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    limit_s = max(LEAST_S, 60 * TIMES * benchmark.minutes)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        began = clock()
        try:
            code = _wait(command, out, log, say, lambda: clock() - began > limit_s)
        except LabError as error:
            raise BenchmarkFailed(f"{command.line}: {error}") from error
        if code != 0:
            raise _failed(command, f"ended with {code}", log)
        try:
            document = json.loads(out.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _failed(command, f"wrote no JSON ({error.__class__.__name__})", log) from error
    return Run(command.line, clock() - began, without(document, benchmark.drop))


def _wait(
    command: Command, out: Path, log: Path, say: Say, is_late: Callable[[], bool]
) -> int | None:
    with Process(command.name, command.argv(out), log) as process:
        while (ended := process.ended()) is None:
            if is_late():
                raise _failed(command, "takes too long", log)
            say(re.split(r"[\r\n]", process.tail(1).strip())[-1])
            time.sleep(TICK_S)
    return ended.exit_code


def _failed(command: Command, why: str, log: Path) -> BenchmarkFailed:
    last = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ][-3:]
    return BenchmarkFailed("\n    ".join([f"{command.line} {why}; its last words:", *last]))
