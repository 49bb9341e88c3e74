"""Time from prefill's answer until decode's first token.

    python -m tests.throughput.handover --json handover.json

A prompt is first computed by the prefill engine; then the clock starts, the
decode engine gets the request with what prefill returned, and the clock stops
at the first streamed token.  The same prompts also go to an engine alone: the time that
the handover saves, and, with a one-token prompt, the floor of any first token.

Everything is measured in one run, on one machine, in rounds.  A round measures every
contestant with every length once, so drift of the machine affects all of them.  Engines
that are not measured are frozen, and a measurement during which other programs used much
of the machine is repeated.  Ratios apply to other machines, milliseconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pdconn.tools.bench.serving.lineup import CONNECTORS, CORES, engine_specs
from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.engine import running
from pdconn.tools.lab.lab_errors import RequestRefused
from pdconn.tools.lab.model import SPECS, write_model
from pdconn.tools.lab.quiet import Neighbours, wait_for_quiet
from tests.throughput.engines.contestants import ALONE, Contestant, Taken, contestants
from tests.throughput.engines.results import RIVALS, Results, verdicts

_LENGTHS = (200, 1000, 3000)
DEFAULT = ("in-tree", "in-tree-tuned", "in-tree-push", "pdconn")


def main() -> int:
    """Measure, print the table, write the JSON."""
    options = _options()
    names = [ALONE, *options.connectors]
    model = write_model(options.directory / "models", SPECS[options.model])
    results = Results()
    engines = engine_specs(names, model, options.cores)
    with running(engines, options.directory / "run", timeout_s=900, progress=_booting) as started:
        print(
            "boot, s:", {e.spec.name: round(e.boot_s or 0.0, 1) for e in started}, file=sys.stderr
        )
        everyone = contestants(names, started)
        for engine in started:
            engine.pause()
        _run(everyone, options, results)
    print(results.table())
    verdict = verdicts(results, options.connectors)
    print("\n".join(map(str, verdict)))
    if options.json is not None:
        settings = {key: str(value) for key, value in vars(options).items()}
        document = {"settings": settings, "cores": os.cpu_count(), **results.as_json(verdict)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    wrong = results.mismatches or any(name not in RIVALS for name, _ in results.failed)
    return 1 if wrong or (options.check and not all(verdict)) else 0


def _run(everyone: list[Contestant], options: argparse.Namespace, results: Results) -> None:
    alone = everyone[0]
    for number in range(-options.warm_up, options.rounds):
        prompts = make_prompts(options.lengths, seed=1000 * options.seed + number)
        floor, *expected = _turn(alone, [(4 + number % 1000,), *prompts], options, results)
        if number >= 0:
            results.add(ALONE, 1, floor)
        for one in everyone:
            answers = expected if one is alone else _turn(one, prompts, options, results)
            for prompt, right, taken in zip(prompts, expected, answers, strict=True):
                if number >= 0:
                    results.add(one.name, len(prompt), taken)
                if right and taken and (wrong := compare(right.timed.answer, taken.timed.answer)):
                    results.mismatches += 1
                    print(f"{one.name}, {len(prompt)} tokens: {wrong}", file=sys.stderr)
            shown = ", ".join(
                f"{1000 * taken.first_s:.0f}" if taken else "failed" for taken in answers
            )
            print(f"round {number}: {one.name}: {shown} ms", file=sys.stderr)


def _turn(
    one: Contestant,
    prompts: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
    results: Results,
) -> list[Taken | None]:
    """All prompts through one contestant; repeated if other processes used much of the machine."""
    pids = [engine.pid for engine in one.engines]
    for _ in range(options.tries):
        wait_for_quiet(options.others, timeout_s=60.0, ours=pids)
        with one.awake():
            neighbours = Neighbours(pids)
            answers = [_asked(one, prompt) for prompt in prompts]
            share = neighbours.share()
        if share <= options.others:
            return answers
        print(f"{one.name}: others took {share:.0%} of the machine", file=sys.stderr)
    results.disturbed += 1
    return answers


def _asked(one: Contestant, prompt: Sequence[int]) -> Taken | None:
    """One prompt through one contestant; None if it failed or took minutes."""
    try:
        return one.answer(prompt)
    except (RequestRefused, TimeoutError) as error:
        print(f"{one.name}, {len(prompt)} tokens: {error}", file=sys.stderr)
        return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="where to write all measurements")
    add("--connectors", nargs="*", choices=CONNECTORS, default=DEFAULT)
    add("--lengths", nargs="+", type=int, default=_LENGTHS, help="prompts, in tokens")
    add("--rounds", type=int, default=15, help="prompts of each length")
    add("--warm-up", type=int, default=2, help="rounds that do not count")
    add("--model", choices=SPECS, default="handover")
    add("--directory", type=Path, default=Path(".work/handover"), help="for models and logs")
    add("--cores", choices=CORES, default="reserved", help=f"how engines share them: {dict(CORES)}")
    add("--seed", type=int, default=1)
    add("--others", type=float, default=0.1, help="most of the machine that others may take")
    add("--tries", type=int, default=3, help="how often to take a turn that others disturbed")
    add("--check", action="store_true", help="fail if a ratio is above its bound")
    return parser.parse_args()


def _booting(name: str, seconds: float, line: str) -> None:
    if round(seconds) % 10 == 0:
        print(f"{seconds:4.0f} s  {name}: {line[:100]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
