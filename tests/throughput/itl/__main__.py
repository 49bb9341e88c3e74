"""Effect of pulls on running requests: the time from one of their tokens to the next.

    python -m tests.throughput.itl --json itl.json

One real decode engine, its loop alone on core 0, its other threads (the puller and the
reader among them) on core 1, and at lower priority there the API server, a lender without a
model with memory of the same geometry as the engine, and the clients.  A few requests stream,
and others, each for one token, arrive at a steady rate, in alternating phases of one run:

quiet
    none.
cached
    their prompts are in decode's own cache but for the last token, as after a pull.
instant
    they get blocks and wait as for a pull, which ends at once without a byte: all that vLLM
    does for a request with external KV, and nothing of pdconn.
pulled
    each pulls a new prompt.
lent
    as cached, and what is in the cache is lent and pulled from this engine; not by default.

Every one of them computes exactly one token, over a context of one length, so that the
model's work is the same in the last three kinds of phase.  The streams start again in each
phase with one length, so that their contexts are equal.  ``pulled / instant`` is the effect
of pdconn on the streams, ``pulled / cached`` that of pulling with vLLM's part of it,
``lent / cached`` that of lending, and ``cached / quiet`` that of serving one more token.

An interval ends when the engine's core is done with a step, which is vLLM's timestamp of a
token.  The kernel's account of the loop's wait for core 0 is subtracted: only the loop runs
there, so other programs cause that wait, and no wait for the GIL or for another thread is
counted in it.  Intervals with it, and those that clients see, are reported too.  A phase in
which the loop waited for its core for more than ``--others`` of the time is repeated, up to
``--tries`` times in all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pdconn.tools.lab.engine import running
from pdconn.tools.lab.model import SPECS
from tests.throughput.engine_thread import description_of, engine_spec, steps_of
from tests.throughput.engines.partner import LendingPartner, PullingPartner, described
from tests.throughput.engines.pinned import pin
from tests.throughput.itl.phases import KINDS, LENT, Bench, Phase
from tests.throughput.itl.results import render, sum_up


def measure(options: argparse.Namespace) -> list[Phase]:
    """All phases, each round in another order; those that were disturbed are left out."""
    role = "kv_both" if LENT in options.kinds else "kv_consumer"
    spec = engine_spec("itl", role, options, connector="SteppedConnector")
    taken: list[Phase] = []
    with running([spec], options.directory / "run") as (engine,):
        pin(engine.pid)
        like = described(description_of(engine))
        with LendingPartner(like) as partner, PullingPartner(like) as reader:
            bench = Bench(engine, partner, reader, options)
            for kind in options.kinds:  # greet, and warm up
                bench.phase(kind)
            for number in range(options.rounds):
                turn = number % len(options.kinds)
                for kind in [*options.kinds[turn:], *options.kinds[:turn]]:
                    taken.append(_undisturbed(bench, kind, options))
    steps = [step for step in steps_of(engine) if step["scheduled"]]
    for phase in taken:
        inside = [
            (step["ended"], step["late"] or 0.0)
            for step in steps
            if phase.began < step["ended"] < phase.ended
        ]
        phase.raw = [b - a for (a, _), (b, _) in itertools.pairwise(inside)]
        phase.steps = [(b - y) - (a - x) for (a, x), (b, y) in itertools.pairwise(inside)]
    return taken


def _undisturbed(bench: Bench, kind: str, options: argparse.Namespace) -> Phase:
    for _ in range(options.tries):
        phase = bench.phase(kind)
        share = phase.late_s / (phase.late_s + phase.loop_s)
        if share <= options.others:
            break
        print(f"{kind}: the loop waited {share:.0%} of the time for its core", file=sys.stderr)
    middle = 1e3 * statistics.median(phase.seen)
    print(f"{kind}: {phase.asked} asked, {middle:.2f} ms a token", file=sys.stderr)
    return phase


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    options = _options(arguments)
    phases = measure(options)
    kinds = [sum_up(kind, phases) for kind in options.kinds]
    print(render(kinds, phases))
    by_name = {kind.kind: kind for kind in kinds}
    held = True
    for over, under in (("pulled", "instant"), (LENT, "cached")):
        for name in ("p50", "p99"):
            if not {over, under} <= set(by_name):
                break
            ratio = getattr(by_name[over], name) / getattr(by_name[under], name)
            held &= ratio <= options.bound
            print(f"{'holds' if ratio <= options.bound else 'FAILS'}  {over} {name} {ratio:.3f}")
    if options.json is not None:
        settings = {key: str(value) for key, value in vars(options).items()}
        document = {
            "settings": settings,
            "cores": os.cpu_count(),
            "kinds": [asdict(kind) for kind in kinds],
            "phases": [asdict(phase) for phase in phases],
        }
        options.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return 0 if held or not options.check else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rate", type=float, default=20.0, help="requests a second (%(default)s)")
    add("--prompt", type=int, default=1025, help="their tokens (%(default)s)")
    add("--streams", type=int, default=2, help="requests that run (%(default)s)")
    add("--tokens", type=int, default=300, help="of a stream, in a phase (%(default)s)")
    add("--rounds", type=int, default=6, help="phases of each kind (%(default)s)")
    add("--kinds", nargs="+", choices=(*KINDS, LENT), default=list(KINDS))
    add("--most-s", type=float, default=20.0, help="prompts are prepared for so long")
    add("--others", type=float, default=0.1, help="of the loop's time, for other programs")
    add("--tries", type=int, default=3, help="of a phase that others disturbed")
    add(
        "--bound",
        type=float,
        default=1.05,
        help="of pulled / instant, lent / cached",
    )
    add("--check", action="store_true", help="fail if a ratio is above the bound")
    add("--model", choices=SPECS, default="handover")
    add("--layout", default="BHLNC", help="memory order (%(default)s)")
    add("--kv-cache-mib", type=int, default=1024)
    add("--directory", type=Path, default=Path(".work/itl"), help="for models and logs")
    add("--json", type=Path, help="where to write all measurements")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
