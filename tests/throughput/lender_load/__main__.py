"""Cost of 64 decode engines for a prefill engine: the lender's thread, and the scheduler's steps.

    python -m tests.throughput.lender_load --ranks 8 --json lender.json

A real lender lends to simulated decode engines of so many ranks, each rank on an authenticated
connection of its own from another process.  Every rank claims, renews and ends what its engine
pulls, a thousand of each a second in all; the ranks of an engine do so within ``--jitter-ms``.
Renewals of a rank travel together, as real ranks send them; with ``--renew alone`` each has a
frame of its own.  Beside it a *scheduler* takes steps: plain Python in slices,
between which it releases the interpreter's lock as an engine does at every system call, then a
rest.  Phases with and without readers alternate; one with readers begins once as much is renewed
and ended as is claimed.  Readers note how long each claim takes to be granted, to a millisecond,
in which each looks for answers.  With ``--lender python`` or ``c``, a lender answers that
understands nothing (:mod:`tests.throughput.lender_load.bare`): what sockets alone cost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.lender.server import Lender
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.tools.bench.percentile import percentile
from pdconn.tools.lab.ports import LOCALHOST
from tests.fakes.pair import TRAITS, Cache
from tests.throughput.engines.threads import cpu_clock
from tests.throughput.lender_load.bare import BareLender
from tests.throughput.lender_load.crowd import TTL_S, Readers, crowd, digest

AHEAD_S = 0.5
"""Of the claims: how long before them requests are lent."""

STEP_S = 0.005
SLICES = 8
"""Of a step: after each the lock is released, and a waiting thread may take it."""
_LOOPS = 750


@dataclass(frozen=True)
class Phase:
    """One phase: seconds of the lender's thread per second, the scheduler's steps, and claims."""

    per_s: float
    lender_cpu: float
    step_p50_ms: float
    step_p99_ms: float
    claim_p50_ms: float | None
    claim_p99_ms: float | None


def step(slices: int = SLICES) -> float:
    """Seconds that the scheduler's own work took."""
    began = time.perf_counter()
    total = 0
    for _ in range(slices):
        for number in range(_LOOPS):
            total += number & 3
        select.select((), (), (), 0.0)
    return time.perf_counter() - began


class Scheduler:
    """Takes steps, lends and collects, as a prefill engine's scheduler does."""

    def __init__(self, lender: Lender | BareLender, slices: int = SLICES) -> None:
        self.lender = lender
        self._slices = slices
        self.lent = 0
        self.freed = 0

    def lend_until(self, number: int) -> None:
        """Lend every request before ``number``."""
        for each in range(self.lent, number):
            self.lender.lend(f"r{each}", digest(each), TTL_S)
        self.lent = max(self.lent, number)

    def run(self, rate: float, seconds: float, until: int) -> list[float]:
        """Take steps for so long, lending well before readers claim, in the end every request
        before ``until``; what each step took."""
        first, began, took = self.lent, time.monotonic(), []
        while (now := time.monotonic() - began) < seconds:
            self.lend_until(first + int(min(now, seconds) * rate))
            self.collect()
            took.append(step(self._slices))
            time.sleep(max(0.0, STEP_S - took[-1]))
        self.lend_until(until)
        return took

    def collect(self) -> None:
        """What is free again; every lease must have been read."""
        for freed in self.lender.take_freed():
            if freed.why != "read":
                raise RuntimeError(f"{freed.request}: expected to be read, {freed.why}")
            self.freed += 1

    def drain(self) -> None:
        """Wait until nothing is lent."""
        give_up = time.monotonic() + 10
        while self.freed < self.lent:
            if time.monotonic() > give_up:
                raise RuntimeError(f"{self.lent - self.freed} leases are left")
            time.sleep(0.01)
            self.collect()


@contextlib.contextmanager
def readers_of(lender: Lender | BareLender, readers: Readers) -> Iterator[subprocess.Popen[str]]:
    """The crowd, in a process of its own."""
    command = [sys.executable, "-m", "tests.throughput.lender_load", "--crowd", str(lender.port)]
    command += ["--engines", str(readers.engines), "--ranks", str(readers.ranks)]
    command += ["--jitter-ms", str(1e3 * readers.jitter_s)]
    command += ["--renew", "along" if readers.renew_along else "alone"]
    command += [] if readers.is_secured else ["--insecure"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        child.stdin.close()


def lender_for(readers: Readers) -> Lender:
    """A lender of a small cache."""
    cache = Cache("BHLNC", filled=False)
    rank = RankGeometry(0, 0, b"nowhere", cache.references)
    welcome = Welcome.in_our_version("prefill", "boot", TRAITS, (rank,))
    return Lender(welcome, LOCALHOST, 0, security=readers.security)


def measure(
    scheduler: Scheduler, readers: Readers, rate: float, seconds: float, rounds: int
) -> list[Phase]:
    """Phases without and with readers of the scheduler's lender, ``rounds`` of each."""
    phases, lender = [], scheduler.lender
    try:
        timed = Timed(scheduler, cpu_clock("pdconn-lender"), seconds)
        with readers_of(lender, readers) as child:
            for _ in range(rounds):
                phases.append(_phase(0.0, *timed.phase(0.0, timed.scheduler.lent), {}))
                phases.append(_loaded(timed, child, readers, rate))
    finally:
        lender.close()
    return phases


class Timed:
    """Takes the times of phases of ``seconds``; ``clock`` is that of the lender's thread."""

    def __init__(self, scheduler: Scheduler, clock: int, seconds: float) -> None:
        self.scheduler = scheduler
        self.seconds = seconds
        self._clock = clock

    def phase(self, lent_per_s: float, until: int) -> tuple[float, list[float]]:
        """The lender's part of a core while so much is lent, and what each step took."""
        before, began = time.clock_gettime(self._clock), time.monotonic()
        took = self.scheduler.run(lent_per_s, self.seconds, until)
        spent = time.clock_gettime(self._clock) - before
        return spent / (time.monotonic() - began), took


def _loaded(timed: Timed, child: subprocess.Popen[str], readers: Readers, rate: float) -> Phase:
    """A phase with readers, once as many requests end as are claimed."""
    scheduler, lent_per_s = timed.scheduler, rate / readers.ranks
    first, ahead_s = scheduler.lent, AHEAD_S + readers.pull_s
    scheduler.lend_until(first + int(AHEAD_S * lent_per_s))
    _ask(child, first, rate, ahead_s + timed.seconds)
    scheduler.run(lent_per_s, readers.pull_s, first + int(lent_per_s * ahead_s))
    cpu, took = timed.phase(lent_per_s, first + int(lent_per_s * (ahead_s + timed.seconds)))
    claims = _answered(child)
    scheduler.drain()
    return _phase(rate, cpu, took, claims)


def _ask(child: subprocess.Popen[str], first: int, rate: float, seconds: float) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{first} {rate} {seconds}\n")
    child.stdin.flush()


def _answered(child: subprocess.Popen[str]) -> dict[str, float]:
    """Wait for the crowd, and return what it says; everything must have been granted."""
    assert child.stdout is not None
    report: dict[str, float] = json.loads(child.stdout.readline())
    if (report["granted"], report["refused"]) != (3 * report["count"], 0):
        raise RuntimeError(f"expected every claim granted, renewed and confirmed, got {report}")
    return report


def _phase(per_s: float, cpu: float, took: Sequence[float], claims: Mapping[str, float]) -> Phase:
    steps_ms = [1e3 * each for each in took]
    p50_ms, p99_ms = statistics.median(steps_ms), percentile(steps_ms, 0.99)
    of_claims = (claims.get("claim_p50_ms"), claims.get("claim_p99_ms"))
    return Phase(per_s, cpu, p50_ms, p99_ms, *of_claims)


def summary(phases: Sequence[Phase]) -> dict[str, float]:
    """Medians over the phases with readers, and their steps over those without.

    Those of claims are left out where answers do not say which claim they are to.
    Processor time grows with what neighbours of a virtual machine do, so the least of the
    phases is given as well.
    """

    def values(field: str, loaded: bool) -> list[float]:
        return [getattr(p, field) for p in phases if (p.per_s > 0) is loaded]

    def median(field: str, loaded: bool) -> float:
        return statistics.median(values(field, loaded))

    found = {
        "lender_cpu": median("lender_cpu", True),
        "lender_cpu_least": min(values("lender_cpu", True)),
        "lender_cpu_idle": median("lender_cpu", False),
        "step_p50_ratio": median("step_p50_ms", True) / median("step_p50_ms", False),
        "step_p99_ratio": median("step_p99_ms", True) / median("step_p99_ms", False),
    }
    if None not in values("claim_p50_ms", True):
        found["claim_p50_ms"] = median("claim_p50_ms", True)
        found["claim_p99_ms"] = median("claim_p99_ms", True)
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="claims a second, of all (%(default)s)"
    )
    parser.add_argument("--engines", type=int, default=64, help="that decode (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="of each engine (%(default)s)")
    parser.add_argument(
        "--jitter-ms", type=float, default=1.0, help="between ranks of one pull (%(default)s)"
    )
    parser.add_argument(
        "--renew",
        choices=["along", "alone"],
        default="along",
        help="each rank's renewals together, or each in a frame of its own (%(default)s)",
    )
    parser.add_argument(
        "--lender",
        choices=["ours", "python", "c"],
        default="ours",
        help="the real one, or one that understands nothing; that needs --insecure --renew alone "
        "(%(default)s)",
    )
    parser.add_argument(
        "--slices",
        type=int,
        default=SLICES,
        help="of plain Python, some 20 us each, in a step of the scheduler (%(default)s)",
    )
    parser.add_argument("--insecure", action="store_true", help="do not authenticate")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a phase (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="phases of each kind (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write all measurements")
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    positive = (
        options.rate, options.seconds, options.rounds, options.engines, options.ranks,
        options.slices,
    )  # fmt: skip
    if not min(positive) > 0:
        parser.error("--rate, --seconds, --rounds, --engines, --ranks, --slices: expected above 0")
    if options.lender != "ours" and not (options.insecure and options.renew == "alone"):
        parser.error("--lender: expected --insecure and --renew alone beside it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    options = _options(arguments)
    readers = Readers(
        options.engines,
        options.ranks,
        options.jitter_ms / 1e3,
        is_secured=not options.insecure,
        renew_along=options.renew == "along",
    )
    if options.crowd is not None:
        crowd(options.crowd, readers)
        return 0
    lender = lender_for(readers) if options.lender == "ours" else BareLender(options.lender)
    scheduler = Scheduler(lender, options.slices)
    phases = measure(scheduler, readers, options.rate, options.seconds, options.rounds)
    for phase in phases:
        what = f"{phase.per_s:6.0f}/s" if phase.per_s else "no readers"
        print(
            f"{what:>10}: lender {100 * phase.lender_cpu:5.1f} % of a core, "
            f"steps {phase.step_p50_ms:.3f} ms (p99 {phase.step_p99_ms:.3f})"
        )
    found = summary(phases)
    print(
        f"{readers.engines} x {readers.ranks} readers, {options.rate:.0f} claims, renewals "
        "and dones a second each: "
        f"{100 * found['lender_cpu']:.1f} % of a core, {100 * found['lender_cpu_least']:.1f} % "
        "in the phase with least; the scheduler's steps take "
        f"{found['step_p50_ratio']:.2f} times as long (p99 {found['step_p99_ratio']:.2f})"
    )
    if "claim_p50_ms" in found:
        print(f"claims take {found['claim_p50_ms']:.1f} ms (p99 {found['claim_p99_ms']:.1f})")
    if options.json is not None:
        document = {
            "readers": readers.engines * readers.ranks,
            "secured": readers.is_secured,
            "jitter_ms": options.jitter_ms,
            "renew": options.renew,
            "lender": options.lender,
            "slices": options.slices,
            "rate": options.rate,
            "summary": found,
            "phases": [asdict(phase) for phase in phases],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
