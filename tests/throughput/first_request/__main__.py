"""The first request of fresh engines, beyond the first request of a fresh engine alone.

    python -m tests.throughput.first_request --json first_request.json

Every round starts new engines of every kind, waits until all serve, freezes those that are not
measured, and sends each kind its first requests of 200 tokens, all with other tokens.  A kind's
*beyond* is its first request's time to first token less that of the engine alone, or of ``two``,
of the same round.  ``two`` has no connector and shows what a second cold engine of vLLM costs.
In kinds that end in ``used`` both engines have answered ordinary requests before, so what their
first handed over request takes longer than the next is the connector's and UCX's alone.  vLLM's
processes sleep between looks instead of spinning, as the four of a pair would on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.tools.bench.serving.lineup import CORES
from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import running
from pdconn.tools.lab.model import SPECS, write_model
from pdconn.tools.output.table import table
from tests.throughput.first_request.kinds import (
    ALONE,
    KINDS,
    TWO,
    Taken,
    ask,
    running_alone,
    specs_of,
)

DEFAULT_KINDS = [name for name in KINDS if not name.endswith("-used")]

Round = Mapping[str, list[Taken]]


@dataclass(frozen=True)
class Row:
    """One kind over all rounds; medians, in seconds.

    Attributes:
        first_s, next_s: time to first token of the first request, and of those after it.
        beyond_alone_s: ``first_s`` beyond the engine alone's, round by round.
        beyond_two_s: the same beyond two engines without connector.
        beyond_next_s: the first request beyond the next ones of the same engines.
        answer_s: the first request to its last token.
    """

    kind: str
    words: str
    first_s: float
    next_s: float
    beyond_alone_s: float
    worst_beyond_alone_s: float
    beyond_two_s: float
    beyond_next_s: float
    answer_s: float


def measure(options: argparse.Namespace) -> list[Round]:
    """Fresh engines of every kind in every round."""
    model = write_model(options.directory / "models", SPECS[options.model])
    rounds = []
    for number in range(options.rounds):
        names = list(dict.fromkeys([ALONE, TWO, *options.kinds]))
        specs = {name: specs_of(name, model, options.cores) for name in names}
        every = [spec for of_kind in specs.values() for spec in of_kind]
        run = options.directory / "run"
        with running(every, run, timeout_s=900) as started:
            left = list(started)
            engines = {name: [left.pop(0) for _ in specs[name]] for name in names}
            for engine in started:
                engine.pause()
            taken: dict[str, list[Taken]] = {}
            for at, name in enumerate(names[number % len(names) :] + names[: number % len(names)]):
                seed = 1000 * options.seed + 100 * number + at
                prompts = make_prompts([options.tokens] * options.requests, seed=seed)
                with running_alone(engines[name], options.settle):
                    taken[name] = ask(name, engines[name], prompts, run)
                shown = ", ".join(f"{1e3 * each.first_token_s:.0f}" for each in taken[name])
                print(f"round {number}: {name}: {shown} ms", file=sys.stderr, flush=True)
        rounds.append(taken)
    return rounds


def rows(rounds: Sequence[Round]) -> list[Row]:
    """A row per kind.

    >>> fast, slow = Taken(0.1, 0.2), Taken(0.3, 0.4)
    >>> found = rows([{"alone": [fast, fast], "two": [fast, fast], "cold": [slow, fast]}])
    >>> [round(row.beyond_alone_s, 6) for row in found]
    [0.0, 0.0, 0.2]
    """
    made = []
    for name in rounds[0]:
        firsts = [taken[name][0] for taken in rounds]
        later = [one.first_token_s for taken in rounds for one in taken[name][1:]]
        beyond, beyond_two = (
            [taken[name][0].first_token_s - taken[base][0].first_token_s for taken in rounds]
            for base in (ALONE, TWO)
        )
        first, then = (
            statistics.median(one.first_token_s for one in firsts),
            statistics.median(later),
        )
        made.append(
            Row(
                name,
                KINDS[name].words,
                first,
                then,
                statistics.median(beyond),
                max(beyond),
                statistics.median(beyond_two),
                first - then,
                statistics.median(one.last_token_s for one in firsts),
            )
        )
    return made


def render(made: Sequence[Row]) -> str:
    """A row per kind, in milliseconds."""
    lines = [
        [row.kind]
        + [
            f"{1e3 * value:.0f}"
            for value in (
                row.first_s,
                row.next_s,
                row.beyond_next_s,
                row.beyond_alone_s,
                row.worst_beyond_alone_s,
                row.beyond_two_s,
                row.answer_s,
            )
        ]
        for row in made
    ]
    head = [
        "",
        "first\nms",
        "next\nms",
        "beyond\nnext",
        "beyond\nalone",
        "worst",
        "beyond\ntwo",
        "answer\nms",
    ]
    return table(head, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=DEFAULT_KINDS,
        help="beside the engine alone and two of them",
    )
    add("--rounds", type=int, default=2, help="starts of all engines (%(default)s)")
    add("--requests", type=int, default=3, help="of each kind (%(default)s)")
    add("--tokens", type=int, default=200, help="of each prompt (%(default)s)")
    add("--settle", type=float, default=0.5, help="seconds between waking engines and the first")
    add("--cores", choices=CORES, default="apart", help=f"how engines share them: {dict(CORES)}")
    add("--model", choices=SPECS, default="handover")
    add("--seed", type=int, default=1)
    add("--directory", type=Path, default=Path(".work/first_request"), help="for models and logs")
    add("--json", type=Path, help="where to write all measurements")
    options = parser.parse_args(arguments)
    rounds = measure(options)
    made = rows(rounds)
    print(render(made))
    if options.json is not None:
        document = {
            "settings": {key: str(value) for key, value in vars(options).items()},
            "kinds": [asdict(row) for row in made],
            "rounds": [
                {name: [asdict(one) for one in taken] for name, taken in of_round.items()}
                for of_round in rounds
            ],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
