"""(b) ``tests/gpu`` on a device, against the byte oracle, file by file.

Allocation, pulls in every layout and slice, checksums, and the store's copies.  pytest is on that
machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tests.gpu
from tests.gpu.kit.found import step_arguments

FILES = (
    "test_allocated.py",
    "test_store_copies.py",
    "test_pulls.py",
    "test_contract.py",
    "test_threads.py",
    "test_sleep.py",
)
"""The most telling first: a time limit costs the last ones."""
_OPTIONS = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "default")


def run_file(name: str, kind: str) -> tuple[dict[str, Any], str]:
    """How many tests passed, failed and were skipped, and what was printed."""
    folder = Path(tests.gpu.__file__).parent
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        # ``-k cuda`` takes a device's cases by their names: cpu-..., cuda-...
        selected = ["-k", f"not {'cpu' if kind == 'cuda' else 'cuda'}"]
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *selected]
        command += ["--rootdir", str(folder.parents[1]), f"--junitxml={report}", str(folder / name)]
        ended = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        counts = counted(report)
    took = round(time.monotonic() - began, 1)
    return {**counts, "exit status": ended.returncode, "seconds": took}, ended.stdout


def counted(report: Path) -> dict[str, int]:
    """Counts of a JUnit report; nothing where there is none."""
    if not report.is_file():
        return {}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    sums = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in sums:
            sums[name] += int(suite.get(name, 0))
    failed = sums["failures"] + sums["errors"]
    passed = sums["tests"] - failed - sums["skipped"]
    return {"passed": passed, "failed": failed, "skipped": sums["skipped"]}


def main() -> int:
    """Exit status 1: a test failed, or a file had none that passed."""
    device, found = step_arguments(__doc__)
    is_fine = True
    for name in FILES:
        counts, said = run_file(name, device.kind)
        found.add(name, counts)
        if counts["exit status"] or not counts.get("passed"):
            is_fine = False
            print(said[-4000:], flush=True)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
