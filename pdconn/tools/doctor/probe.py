"""Bandwidth between two hosts: a pull by pdconn, beside a single READ of the same size.

One host lends (``pdconn doctor --serve``), the other reads real bytes over NIXL and compares them
(``pdconn doctor --probe``).  Both use the parts of ``pdconn bench transfer``, for one workload.

The reader is a child process (``python -m pdconn.tools.doctor.probe``): UCX reads its settings when
it is loaded, and prints the transports of its reads.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pdconn.tools.bench.bench_errors import BenchError
from pdconn.tools.bench.transfer.bench_case import OpenCase
from pdconn.tools.bench.transfer.bench_lender import ListeningLender, listen
from pdconn.tools.bench.transfer.methods import Method
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.rounds import take_rounds
from pdconn.tools.bench.transfer.workload import Workload
from pdconn.tools.doctor.findings import Finding, fault, one_line, warning
from pdconn.tools.doctor.local.host_limits import sized
from pdconn.tools.doctor.local.used import SETTING, listed_counts, used_transports
from pdconn.tools.output.progress_line import LogStep
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.link import Link
from pdconn.tools.plan.shapes import built_in
from transport import TransportError

MODEL = "llama-3.1-8b"
PROMPT_TOKENS = 2048
ROUNDS = 3
MAX_NBYTES = 2 << 30
"""Bytes that a doctor's lender may allocate."""
_SLOW_SHARE = 0.5
"""Least share of a READ that a pull should reach, and of its link that a READ should reach."""


@dataclass(frozen=True, slots=True)
class ProbeFacts:
    """Medians in bytes per second; ``error`` if nothing was measured.

    ``used``: the transports of UCX's reads with their numbers; empty if not reported.
    """

    where: str
    nbytes: int = 0
    pull_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0
    error: str | None = None
    used: tuple[tuple[str, int], ...] = ()


def serve_probe(host: str, port: int, log_step: LogStep) -> None:
    """Lend to probes until interrupted.

    Raises:
        OSError: the port cannot be bound.
    """
    listen(host, port, MAX_NBYTES, log_step)


def read_probe(
    host: str, port: int, log_step: LogStep, prompt_tokens: int = PROMPT_TOKENS
) -> ProbeFacts:
    """Measure in a child process; ``log_step`` is called with each step."""
    where = f"{host}:{port}"
    name, _, value = SETTING.partition("=")
    module = "pdconn.tools.doctor.probe"
    command = [sys.executable, "-m", module, host, str(port), str(prompt_tokens)]
    printed: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, name: value, "UCX_LOG_FILE": ""},  # empty: UCX prints to its output
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process, which ends the child
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith(_STEP):
                    log_step(line.removeprefix(_STEP).strip())
                else:
                    printed.append(line)
        finally:
            child.kill()
    reported = next((line for line in reversed(printed) if line.startswith(_FACTS)), None)
    if reported is None:
        last = one_line("".join(printed)[-200:]) or "it printed nothing"
        return ProbeFacts(where, error=f"the process that reads ended: {last}")
    facts = json.loads(reported.removeprefix(_FACTS))
    return ProbeFacts(**{**facts, "used": used_transports(where, printed).counts})


_STEP, _FACTS = "pdconn step: ", "pdconn facts: "


def _measure(host: str, port: int, log_step: LogStep, prompt_tokens: int) -> ProbeFacts:
    where = f"{host}:{port}"
    shape = EngineShape(built_in(MODEL)).in_best_layout()
    try:
        workload = Workload(shape, shape, prompt_tokens)
        with (
            ListeningLender(host, port) as lender,
            OpenCase(workload, PATHS["auto"], lender.control) as case,
        ):
            results = take_rounds(case, ROUNDS, random.Random(0), log_step)
    except (BenchError, TransportError, OSError) as error:
        return ProbeFacts(where, error=str(error))
    by_method = {result.method: result for result in results}
    pull, read = by_method[Method.PDCONN], by_method[Method.RAW]
    return ProbeFacts(where, pull.nbytes, pull.bytes_per_s, read.bytes_per_s)


def seen_probe(facts: ProbeFacts) -> str:
    """One line about the measurement."""
    if facts.error is not None:
        return f"{facts.where}: not measured"
    pull, read = facts.pull_bytes_per_s / 1e9, facts.read_bytes_per_s / 1e9
    return (
        f"{facts.where}: a pull of {sized(facts.nbytes)} at {pull:.2f} GB/s, one READ of as many "
        f"bytes at {read:.2f} GB/s; all bytes were right; UCX read by {_used(facts)}"
    )


def _used(facts: ProbeFacts) -> str:
    return listed_counts(facts.used) or "transports that it does not report"


def judge_probe(facts: ProbeFacts, link: Link | None = None) -> Iterator[Finding]:
    """Findings about a path slower than its link, or a pull slower than the path."""
    if facts.error is not None:
        remedy = f"run pdconn doctor --serve {facts.where} there, with the same UCX_… variables"
        yield fault("probe.failed", facts.where, facts.error, remedy)
        return
    if facts.pull_bytes_per_s < _SLOW_SHARE * facts.read_bytes_per_s:
        share = facts.pull_bytes_per_s / facts.read_bytes_per_s
        message = f"a pull reaches {share:.2f} of a single READ"
        remedy = "pdconn bench transfer shows which layouts and block sizes cost that"
        yield warning("probe.pull", facts.where, message, remedy)
    if link is not None and facts.read_bytes_per_s < _SLOW_SHARE * link.bytes_per_s:
        message = (
            f"one READ reaches {facts.read_bytes_per_s / 1e9:.2f} GB/s of the link's "
            f"{link.bytes_per_s / 1e9:.2f}, by {_used(facts)}"
        )
        remedy = (
            "set UCX_NET_DEVICES and UCX_TLS on both hosts as the line of devices of pdconn doctor "
            "there has them"
        )
        yield warning("probe.link", facts.where, message, remedy)


def _main(host: str, port: str, prompt_tokens: str) -> None:
    """Run in the child process."""

    def log_step(text: str) -> None:
        print(f"{_STEP}{text}", flush=True)

    facts = _measure(host, int(port), log_step, int(prompt_tokens))
    print(f"\n{_FACTS}{json.dumps(asdict(facts))}", flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
    os._exit(0)  # UCX's own shutdown may take seconds, or fail
