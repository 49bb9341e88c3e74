"""``python -m tests.multinode.demo``: seven machines that are network namespaces, and prompts.

Two prefill and two decode engines, the router, a client, and an engine alone that says what
is right.  Prompts go through the router, half of them with the cables to decode late and
losing packets; what each machine saw is shown as a table.  Needs root and ``ip``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.tools.lab.compare_answers import spread_lengths
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.lab_errors import LabError
from pdconn.tools.lab.model import write_model
from pdconn.tools.output.table import table
from tests.multinode.namespaces import NetworkFailed, why_not
from tests.multinode.topology import (
    DECODE,
    MAX_TOKENS,
    PREFILL,
    Cluster,
    NeverCame,
    Prompt,
    cluster,
    fresh_prompts,
)

EXIT_OK, EXIT_WRONG, EXIT_NOT_HERE = 0, 1, 2
Say = Callable[[str], None]

_ROLES = {**dict.fromkeys(PREFILL, "prefill"), **dict.fromkeys(DECODE, "decode")}


@dataclass(frozen=True)
class Row:
    """One machine: its address, what its network card received, what it lent and pulled."""

    machine: str
    address: str
    role: str
    received_nbytes: int
    lent: int
    pulled: int
    pulled_nbytes: int


@dataclass(frozen=True)
class Outcome:
    """What a run shows; ``wrong`` says how answers differ from those of one engine alone."""

    rows: list[Row]
    num_prompts: int
    packets_passed: int
    packets_lost: int
    wrong: list[str]


def run(directory: Path, num_prompts: int, say: Say) -> Outcome:
    """Bring everything up, ask, look, and tear it down.

    Raises:
        NetworkFailed, LabError, NeverCame: nothing is left running then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    say("starting five engines, each on a machine of its own")
    with cluster(write_model(directory), directory) as machines:
        say("asking")
        prompts = fresh_prompts(spread_lengths(num_prompts, 1200, seed=1), seed=2)
        wrong = _ask(machines, prompts[: num_prompts // 2])
        machines.network.wire.be(delay_s=0.005, loss=0.01)
        wrong += _ask(machines, prompts[num_prompts // 2 :])
        passed = machines.network.wire.be()
        rows = [_row(machines, name) for name in machines.network.machines]
        machines.await_free(*PREFILL, *DECODE)
    say("all gone")
    return Outcome(rows, len(prompts), passed.passed, passed.lost, wrong)


def _ask(machines: Cluster, prompts: Sequence[Prompt]) -> list[str]:
    router: Client = machines.router
    answers = [(prompt, router.complete(prompt, MAX_TOKENS)) for prompt in prompts]
    return [wrong for each in answers if (wrong := machines.wrong(*each)) is not None]


def _row(machines: Cluster, name: str) -> Row:
    counted = machines.client(name).metrics() if name in _ROLES else {}
    machine = machines.network[name]
    return Row(
        name,
        machine.address,
        _ROLES.get(name, name),
        machine.received_nbytes(),
        lent=int(counted.get("pdconn:leases_granted_total", 0)),
        pulled=int(counted.get("pdconn:pulls_total", 0)),
        pulled_nbytes=int(counted.get("vllm:nixl_bytes_transferred_sum", 0)),
    )


def render(outcome: Outcome) -> str:
    """The table, and a line on what was right."""
    headings = [
        "machine", "address", "role", "received\nMB", "prompts\nlent", "prompts\npulled",
        "KV pulled\nMB",
    ]  # fmt: skip
    rows = [
        [
            row.machine,
            row.address,
            row.role,
            f"{row.received_nbytes / 1e6:.3f}",
            str(row.lent),
            str(row.pulled),
            f"{row.pulled_nbytes / 1e6:.3f}",
        ]
        for row in outcome.rows
    ]
    right = outcome.num_prompts - len(outcome.wrong)
    return (
        f"{table(headings, rows)}\n\n{right} of {outcome.num_prompts} answers are those of one "
        f"engine alone; {outcome.packets_lost} of "
        f"{outcome.packets_lost + outcome.packets_passed} packets to and from decode were lost"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every answer was right, 1 when not, 2 where no network can be made."""
    parser = argparse.ArgumentParser(prog="python -m tests.multinode.demo", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="how many (%(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path(".work/multinode"), help="for logs (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(f"multinode: {reason}", file=sys.stderr)
        return EXIT_NOT_HERE
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    try:
        outcome = run(args.directory, args.prompts, say)
    except (NetworkFailed, NeverCame, LabError) as error:
        print(f"multinode: {error}", file=sys.stderr)
        return EXIT_WRONG
    print(json.dumps(asdict(outcome), indent=2) if args.json else render(outcome))
    for wrong in outcome.wrong:
        print(wrong, file=sys.stderr)
    return EXIT_WRONG if outcome.wrong else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
