"""What a hand-over costs when decode follows prefill's request while it is computed.

    python -m tests.throughput.followed --json followed.json
    python -m tests.throughput.followed --model long --mbits 200 400 --lengths 4096 --chunk 512

One prefill and one decode engine.  Each prompt goes to them in turns: ``off``, prefill first and
decode with its ticket, and ``on``, both at once with a stream, as the router asks.  The order
changes from round to round.  Without ``--mbits`` prefill computes on core 0 and decode on core 1,
and the same prompts go to an engine alone on core 0, too; its one-token prompts are the floor of
any first token.  Engines that are not measured are frozen.

Workers are inside the engine core's process, as vLLM has them for one GPU.  With ``--own-workers``
four processes spin, for up to a second after each request, on two cores.

With ``--mbits`` each engine is in a network namespace of its own, and the cable to decode lets
no more than this pass in a second; that needs root, ``ip`` and ``tc``.

For each length the medians, in milliseconds, of:

first token
    from asking the first engine; ``beyond alone``: less what the engine alone takes.
hand-over
    from prefill's answer to decode's first token.
prefill
    from asking prefill to its answer.
visible
    from the first moment at which decode had the ticket and blocks, to its KV: decode's
    ``pdconn:pull_visible_seconds``.
held
    from decode's blocks to its KV, ``pdconn:pull_seconds``: block-seconds, by block.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pdconn.tools.bench.serving.lineup import engine_specs
from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.model import HANDOVER, ModelSpec, write_model
from pdconn.tools.lab.quiet import Neighbours, wait_for_quiet
from pdconn.tools.lab.spec import EngineSpec
from pdconn.tools.output.table import table
from tests.multinode.namespaces import Network
from tests.throughput.engines.contestants import ALONE, ANSWER_TOKENS, Contestant, Taken, followed
from tests.throughput.followed.links import ADDRESSES, TBF, linked_specs

LONG = ModelSpec(
    "long", hidden=256, intermediate=512, heads=8, kv_heads=8, layers=12, max_positions=1 << 15
)
"""Its full attention keeps 8 KiB of each token, four times as much as that of the other model."""
MODELS = {spec.name: spec for spec in (HANDOVER, LONG)}
T = TypeVar("T")

OFF, ON = "off", "on"
MODES = (OFF, ON)
_SUMS = ("visible", "held", "early_blocks", "bytes", "early_bytes")
_METRICS = {
    "visible": "pdconn:pull_visible_seconds_sum",
    "held": "pdconn:pull_seconds_sum",
    "early_blocks": "pdconn:early_block_seconds_total",
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "early_bytes": "pdconn:early_bytes_total",
    "followed": "pdconn:pulls_followed_total",
    "pulls": "pdconn:pulls_total",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt that was put through; times in seconds.

    Attributes:
        mode: ``alone``, ``off`` or ``on``.
        pull: what decode's metrics tell of its pull.
    """

    mode: str
    tokens: int
    first_token_s: float
    handover_s: float
    prefill_s: float
    between_s: float
    pull: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, mode: str, tokens: int, taken: Taken, pull: dict[str, float] | None = None
    ) -> Asked:
        """From what was timed."""
        timed = taken.timed
        first, prefilled = taken.prefill_s + taken.first_s, taken.prefill_s
        between = (timed.last_token_s - timed.first_token_s) / (ANSWER_TOKENS - 1)
        return cls(mode, tokens, first, taken.first_s, prefilled, between, pull or {})

    def __str__(self) -> str:
        return (
            f"{self.mode}, {self.tokens} tokens: {1e3 * self.first_token_s:.1f} ms, "
            f"{1e3 * self.handover_s:.1f} ms after prefill"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured over one link; ``mbits`` is None without a limit."""

    mbits: float | None
    asked: list[Asked] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def medians(self, mode: str, tokens: int) -> dict[str, float]:
        """By column, of the prompts of this length."""
        ours = [one for one in self.asked if (one.mode, one.tokens) == (mode, tokens)]
        columns: dict[str, list[float]] = {
            "first_token_s": [one.first_token_s for one in ours],
            "handover_s": [one.handover_s for one in ours],
            "prefill_s": [one.prefill_s for one in ours],
            "between_s": [one.between_s for one in ours],
            **{f"{name}_s": [one.pull.get(name, 0.0) for one in ours] for name in _SUMS[:2]},
            "early_share": [
                one.pull["early_bytes"] / one.pull["bytes"] if one.pull.get("bytes") else 0.0
                for one in ours
            ],
        }
        return {name: statistics.median(values) for name, values in columns.items()}

    @property
    def lengths(self) -> list[int]:
        """Prompts' lengths in tokens."""
        return sorted({one.tokens for one in self.asked if one.mode != ALONE})


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each link, length and mode: medians, in seconds; None where there is none."""
    rows = []
    for run in runs:
        keys = [(mode, tokens) for tokens in run.lengths for mode in MODES]
        if any(one.mode == ALONE for one in run.asked):
            keys = [(ALONE, 1), *((m, n) for n in run.lengths for m in (ALONE, *MODES))]
        for mode, tokens in keys:
            row: dict[str, Any] = {"mbits": run.mbits, "tokens": tokens, "mode": mode}
            row |= run.medians(mode, tokens)
            alone = (ALONE, tokens) in keys
            beyond = (
                row["first_token_s"] - run.medians(ALONE, tokens)["first_token_s"]
                if alone
                else None
            )
            rows.append(row | {"beyond_alone_s": beyond})
    return rows


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """For people, in milliseconds."""
    columns = {
        "first\ntoken": "first_token_s", "beyond\nalone": "beyond_alone_s",
        "hand-\nover": "handover_s", "prefill": "prefill_s", "per\ntoken": "between_s",
        "visible": "visible_s", "held": "held_s",
    }  # fmt: skip
    shown = []
    for row in rows:
        times = ["" if row[key] is None else f"{1e3 * row[key]:.1f}" for key in columns.values()]
        link = "" if row["mbits"] is None else f"{row['mbits']:g}"
        share = f"{100 * row['early_share']:.0f} %"
        shown.append([link, str(row["tokens"]), row["mode"], *times, share])
    return table(["link\nMbit/s", "tokens", "mode", *columns, "read\nearly"], shown)


class Pair:
    """Prefill and decode, asked in either mode."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.engines = (prefill, decode)
        self._off = Contestant("pdconn", self.engines)
        self._decode = Client(decode.url)

    def ask(self, mode: str, prompt: Sequence[int]) -> tuple[Taken, dict[str, float]]:
        """One prompt, and what decode's metrics say of it."""
        before = self._metrics()
        if mode == OFF:
            taken = self._off.answer(prompt)
        else:
            taken = followed(*self.engines, prompt, self._off.ticket)
        after = self._metrics()
        return taken, {name: after[name] - before[name] for name in after}

    def awake(self) -> AbstractContextManager[None]:
        """Let them run, and freeze them afterwards."""
        return self._off.awake()

    def _metrics(self) -> dict[str, float]:
        # Metrics are those of the last step: one more request brings them up to date.
        self._decode.complete((4, 5, 6), 1)
        told = self._decode.metrics()
        return {name: told.get(metric, 0.0) for name, metric in _METRICS.items()}


def measure(mbits: float | None, options: argparse.Namespace) -> Run:
    """Everything over one link.

    Raises:
        NetworkFailed, LabError: nothing is left running then.
    """
    model = write_model(options.directory / "models", MODELS[options.model])
    run = Run(mbits)
    with ExitStack() as stack:
        if mbits is None:
            specs = engine_specs([ALONE, "pdconn"], model, "apart")
        else:
            network = stack.enter_context(Network(ADDRESSES))
            network.narrow("decode", round(mbits * 125_000), **TBF)
            stack.enter_context(network["client"].inside())
            specs = linked_specs(network, model)
        specs = [_sized(spec, options) for spec in specs]
        directory = options.directory / "run"
        *others, prefill, decode = stack.enter_context(
            running(specs, directory, timeout_s=900, progress=_booting)
        )
        alone = Contestant(ALONE, tuple(others)) if others else None
        pair = Pair(prefill, decode)
        for engine in (*others, prefill, decode):
            engine.pause()
        _pair(pair, OFF, make_prompts([100], seed=7), options)  # tells where prefill lends
        for number in range(-options.warm_up, options.rounds):
            _round(run, number, alone, pair, options)
    return run


def _round(
    run: Run, number: int, alone: Contestant | None, pair: Pair, options: argparse.Namespace
) -> None:
    """The same prompts, of every length, in every mode."""
    right: dict[int, Answer] = {}
    prompts = make_prompts(options.lengths, seed=1000 * options.seed + number)
    asked = []
    if alone is not None:
        more = [(4 + number % 1000,), *prompts]
        for prompt, taken in zip(more, _alone(alone, more, options), strict=True):
            right[len(prompt)] = taken.timed.answer
            asked.append(Asked.of(ALONE, len(prompt), taken))
    for mode in MODES if number % 2 else MODES[::-1]:
        for prompt, (taken, pull) in zip(prompts, _pair(pair, mode, prompts, options), strict=True):
            expected = right.setdefault(len(prompt), taken.timed.answer)
            if (wrong := compare(expected, taken.timed.answer)) is not None:
                run.wrong.append(f"{mode}, {len(prompt)} tokens: {wrong}")
            if number >= 0 and (pull["pulls"], pull["followed"]) != (1, mode == ON):
                run.wrong.append(f"{mode}, {len(prompt)} tokens: {pull}")
            asked.append(Asked.of(mode, len(prompt), taken, pull))
    for one in asked:
        print(f"round {number}: {one}", file=sys.stderr)
    run.asked.extend(asked if number >= 0 else ())


def _alone(
    alone: Contestant, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[Taken]:
    pids = [engine.pid for engine in alone.engines]
    turn = partial(_each, alone.awake, alone.answer, prompts)
    return _undisturbed(turn, pids, options)


def _pair(
    pair: Pair, mode: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[tuple[Taken, dict[str, float]]]:
    pids = [engine.pid for engine in pair.engines]
    turn = partial(_each, pair.awake, partial(pair.ask, mode), prompts)
    return _undisturbed(turn, pids, options)


def _each(
    awake: Callable[[], AbstractContextManager[None]],
    ask: Callable[[Sequence[int]], T],
    prompts: Sequence[Sequence[int]],
) -> list[T]:
    with awake():
        return [ask(prompt) for prompt in prompts]


def _undisturbed(turn: Callable[[], T], pids: list[int], options: argparse.Namespace) -> T:
    """A turn, again if others used much of the machine; the last counts."""
    for _ in range(options.tries):
        wait_for_quiet(options.others, timeout_s=60.0, ours=pids)
        neighbours = Neighbours(pids)
        done = turn()
        if (share := neighbours.share()) <= options.others:
            break
        print(f"others took {share:.0%} of the machine", file=sys.stderr)
    return done


def _sized(spec: EngineSpec, options: argparse.Namespace) -> EngineSpec:
    longest = max(options.lengths) + 64
    args = spec.args
    if options.chunk is not None and not spec.name.endswith("decode"):
        args += ("--max-num-batched-tokens", str(options.chunk), "--max-num-seqs", "16")
    return replace(
        spec,
        max_model_len=max(4096, longest),
        kv_cache_mib=640,
        one_process=not options.own_workers,
        args=args,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    options = _options(arguments)
    runs = [measure(mbits, options) for mbits in options.mbits or [None]]
    rows = rows_of(runs)
    print(render(rows))
    wrong = [each for run in runs for each in run.wrong]
    print("\n".join([*wrong, f"wrong: {len(wrong)}"]))
    if options.json is not None:
        settings = {key: str(value) for key, value in vars(options).items()}
        document = {"settings": settings, "cores": os.cpu_count(), "measured": rows}
        document["runs"] = [asdict(run) for run in runs]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="where to write all measurements")
    add("--lengths", nargs="+", type=int, default=(200, 1000, 3000), help="prompts, in tokens")
    add("--model", choices=MODELS, default=HANDOVER.name)
    add("--own-workers", action="store_true", help="workers are processes of their own")
    add("--mbits", nargs="*", type=float, default=(), help="limit of the link to decode")
    add("--chunk", type=int, help="tokens that prefill computes in a step; default: vLLM's")
    add("--rounds", type=int, default=12, help="prompts of each length and mode")
    add("--warm-up", type=int, default=3, help="rounds that do not count")
    add("--directory", type=Path, default=Path(".work/followed"), help="for models and logs")
    add("--seed", type=int, default=1)
    add("--others", type=float, default=0.1, help="most of the machine that others may take")
    add("--tries", type=int, default=3, help="how often to take a turn that others disturbed")
    return parser.parse_args(arguments)


def _booting(name: str, seconds: float, line: str) -> None:
    if round(seconds) % 10 == 0:
        print(f"{seconds:4.0f} s  {name}: {line[:100]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
