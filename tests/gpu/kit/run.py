"""Runs the kit's steps one after the other, each with a time limit, and prints a line for each.

    python3 run.py --out DIR [--device cuda] [--steps nixl,bytes,vllm] [--total-s 570]

This file is copied into the kit, beside ``wheels/``, ``vllm.tar.xz`` and ``tests.tar.xz``.  It
needs nothing but Python.  A step that fails, or takes too long, costs only itself: the others run,
and what it had found before is kept.  ``DIR/results.json`` is written after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TOTAL_S = 570.0
"""All steps of a command together; the command stops everything at 580 s."""
PARTS = (("nixl", "bytes", "vllm"), ("handover", "follow", "store", "graphs"))
"""The steps of each command, after the one that unpacks."""
_GRACE_S = 3.0
_LEAST_S = 5.0
_TAIL = 1500


@dataclass(frozen=True)
class Step:
    """A program, and the longest that it may take."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        state: ok, failed, too long, or skipped since no time was left.
        found: what the step wrote, also before it failed.
        log: the last of what it printed, unless it is ok.
    """

    step: str
    state: str
    seconds: float
    limit_s: float
    found: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""

    @property
    def line(self) -> str:
        """For the screen."""
        head = f"{self.step}: {self.state} in {self.seconds:.1f} of {self.limit_s:.0f} s"
        return f"{head}; {json.dumps(self.found)}" if self.found else head


def run_step(step: Step, out: Path, limit_s: float, env: Mapping[str, str]) -> Outcome:
    """Run a step, and end all its processes after ``limit_s`` seconds."""
    found, log = out / f"{step.name}.json", out / f"{step.name}.log"
    found.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*step.command, "--found", str(found)],
            cwd=out,  # not a checkout, whose modules would come before the kit's
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            state = "failed" if process.wait(limit_s) else "ok"
        except subprocess.TimeoutExpired:
            state = "too long"
        finally:
            _end(process)
    seconds = time.monotonic() - began
    said = "" if state == "ok" else _tail(log)
    outcome = Outcome(step.name, state, round(seconds, 2), limit_s, _read(found), said)
    found.unlink(missing_ok=True)  # it is in results.json
    return outcome


def run_steps(
    steps: Sequence[Step], out: Path, total_s: float, env: Mapping[str, str]
) -> list[Outcome]:
    """Run all of them in order; together they take at most ``total_s`` seconds and the grace."""
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + total_s
    outcomes: list[Outcome] = []
    for step in steps:
        limit_s = min(step.limit_s, until - time.monotonic())
        if limit_s < _LEAST_S and limit_s < step.limit_s:
            outcome = Outcome(step.name, "skipped: no time left", 0.0, 0.0)
        else:
            outcome = run_step(step, out, limit_s, env)
        outcomes.append(outcome)
        print(outcome.line, flush=True)
        if outcome.log:
            print(outcome.log, flush=True)
        _write(out / "results.json", [asdict(one) for one in outcomes])
    return outcomes


def environment(unpacked: Path, kit: Path, device: str) -> dict[str, str]:
    """Of the steps: what is in the kit comes before what the machine has.

    vLLM's V2 model runner is asked for by name, so that it is not left silently; nothing may look
    for a network.  Without a card Triton's kernels are interpreted.
    """
    places = [unpacked / "vllm", unpacked / "tests", unpacked / "site"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PDCONN_GPU_KIT": str(kit),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # or it is imported, whether it is installed or not
        "VLLM_PLUGINS": "pdconn",
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(unpacked / "triton"),
        "TRITON_CACHE_AUTOTUNING": "1",  # the second engine takes what the first one tried out
        "TRITON_F32_DEFAULT": "ieee",  # or float32 is rounded to ten bits before each product
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        # An empty list of cards keeps Triton on, where vLLM finds no driver.
        env |= {"VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return env


def steps_of(kit: Path, unpacked: Path, device: str) -> list[Step]:
    """All steps, in order."""
    here = [sys.executable, "-m"]
    on = ["--device", device]
    unpack = [sys.executable, str(kit / "unpack.py"), str(kit), str(unpacked)]
    return [
        Step("unpack", unpack, 40.0),
        Step("nixl", [*here, "tests.gpu.kit.steps.nixl", *on], 45.0),
        Step("bytes", [*here, "tests.gpu.kit.steps.bytes", *on], 135.0),
        Step("vllm", [*here, "tests.gpu.kit.steps.vllm", *on], 300.0),
        Step("handover", [*here, "tests.gpu.kit.steps.handover", *on], 130.0),
        Step("follow", [*here, "tests.gpu.kit.steps.follow", *on], 150.0),
        Step("store", [*here, "tests.gpu.kit.steps.store", *on], 150.0),
        Step("graphs", [*here, "tests.gpu.kit.steps.graphs", *on], 100.0),
    ]


def main() -> int:
    """Exit status 0: every step is ok."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", default=",".join(step for part in PARTS for step in part))
    parser.add_argument("--total-s", type=float, default=TOTAL_S)
    parser.add_argument("--limit-factor", type=float, default=1.0, help="for a slow machine")
    options = parser.parse_args()
    kit = Path(__file__).resolve().parent
    wanted = {"unpack", *options.steps.split(",")}
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        unpacked = Path(folder)
        steps = [
            Step(one.name, one.command, one.limit_s * options.limit_factor)
            for one in steps_of(kit, unpacked, options.device)
            if one.name in wanted
        ]
        env = environment(unpacked, kit, options.device)
        outcomes = run_steps(steps, options.out.resolve(), options.total_s, env)
    return int(any(outcome.state != "ok" for outcome in outcomes))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End its whole session; what ignores the first signal gets the last one."""
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        if not _signalled(process.pid, number):
            return
        until = time.monotonic() + patience_s
        while time.monotonic() < until and _signalled(process.pid, 0):
            process.poll()  # a child that ended and was not waited for counts as alive
            time.sleep(0.02)


def _signalled(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]


if __name__ == "__main__":
    sys.exit(main())
