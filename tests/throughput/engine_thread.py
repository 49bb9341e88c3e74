"""Time of the connector on the engine's own thread: every hook of every step, real vLLM.

    python -m tests.throughput.engine_thread --json engine_thread.json

One real engine at a time, its worker inside the engine core's process so that both halves
of the connector run on one thread, and a stopwatch around each hook that vLLM calls
(``engines.timed``).  A request without a ticket streams all along, so that steps compute
something.  Beside it, from a process without a model (``engines.partner``), over real sockets
and real NIXL:

decode
    32 clients send requests in a loop, each with a ticket for a new prompt.  Reads begin
    ``--hold`` seconds late, so that nearly all of the 32 requests wait or are read in every
    step, while some arrive and some end.
prefill
    32 clients have a new prompt computed and lent, wait ``--hold`` seconds, and pull it,
    which frees it.

Only steps that compute are counted, with at least 90 % of the requests in flight: a step
that computes nothing waits for a pull on purpose.  A step's work is the sum of its hooks,
as wall time (with waits for the GIL while threads of pdconn hold it) and as processor time.
In a *quiet* step no request arrives, gets blocks or ends: the cost of every step.  The rest
is counted per request.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.model import SPECS, write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from pdconn.tools.output.table import table
from tests.throughput.engines.partner import LendingPartner, PullingPartner, described
from tests.throughput.engines.pinned import pin

_WALL, _CPU = 1, 2
ROOT = Path(__file__).parents[2]
WORKER = frozenset(
    {
        "handle_preemptions", "bind_connector_metadata", "clear_connector_metadata",
        "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
        "get_transfer_results", "get_block_ids_with_load_errors",
        "get_kv_connector_kv_cache_events", "build_connector_worker_meta",
        "has_connector_metadata", "finish_forward",
    }
)  # fmt: skip
PER_REQUEST = (
    "on_new_request", "get_num_new_matched_tokens", "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc", "request_finished", "request_finished_all_groups",
)  # fmt: skip
"""Called for a request; ``get_num_new_matched_tokens`` again for one that must wait."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of many steps."""

    mean: float
    p50: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Of at least one step."""
        ordered = sorted(seconds)
        middle, late = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
        at = (statistics.mean(ordered), middle, late, ordered[-1])
        return cls(*(round(1e3 * each, 4) for each in at))


def engine_spec(name: str, role: str, options: argparse.Namespace, **extra: Any) -> EngineSpec:
    """A real engine with a timed connector; ``connector`` is its class."""
    port, side = free_ports(2)
    model = write_model(options.directory / "models", SPECS[options.model])
    timed = options.directory / "run" / f"{name}.steps.json"
    extra["description_file"] = str((options.directory / "run" / f"{name}.kv.json").resolve())
    return EngineSpec(
        name=name,
        model=model,
        port=port,
        side_channel_port=side,
        kv_transfer_config={
            "kv_connector": extra.pop("connector", "TimedConnector"),
            "kv_connector_module_path": "tests.throughput.engines.timed",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        },
        layout=options.layout,
        prefix_caching=True,
        one_process=True,
        kv_cache_mib=options.kv_cache_mib,
        env={"PDCONN_TIMED_FILE": str(timed.resolve()), "PYTHONPATH": str(ROOT)},
    )


def steps_of(engine: Engine) -> list[dict[str, Any]]:
    """The steps that its connector recorded, after the engine stopped."""
    path = Path(engine.spec.env["PDCONN_TIMED_FILE"])
    steps: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return steps


def description_of(engine: Engine) -> Path:
    """Its description file."""
    assert engine.spec.kv_transfer_config is not None
    return Path(engine.spec.kv_transfer_config["kv_connector_extra_config"]["description_file"])


# What clients do


@contextmanager
def streaming(engine: Engine) -> Iterator[None]:
    """Requests without a ticket, one after the other, for the whole block."""
    over = threading.Event()

    def stream() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            [prompt] = make_prompts([32], seed=number)
            Client(engine.url).stream(prompt, 400)

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def crowd(
    clients: int, seconds: float, ask: Callable[[int], None], first: int = 0
) -> tuple[float, float]:
    """Call ``ask`` in a loop on ``clients`` threads; returns begin and end.

    ``ask`` gets consecutive numbers from ``first`` on.
    """
    numbers, over, failures = itertools.count(first), threading.Event(), []

    def go_on() -> None:
        try:
            while not over.is_set():
                ask(next(numbers))
        except Exception as error:  # noqa: BLE001 - raised below, by the main thread
            failures.append(error)
            over.set()

    threads = [threading.Thread(target=go_on) for _ in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    ended = time.monotonic()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return began, ended


def decode_side(options: argparse.Namespace) -> tuple[Engine, float, float]:
    """Pulls in flight on a decode engine."""
    late = {"seed": 1, "reads": {"delay": 1.0, "delay_s": options.hold}}
    spec = engine_spec("decode", "kv_consumer", options, debug_faults=late)
    with running([spec], options.directory / "run") as (engine,):
        pin(engine.pid)
        with LendingPartner(described(description_of(engine))) as partner, streaming(engine):

            def ask(number: int) -> None:
                [prompt] = make_prompts([options.prompt], seed=10_000 + number)
                Client(engine.url).complete(prompt, 1, kv_transfer_params=partner.lend(prompt))

            crowd(4, 1.0, ask)  # greet, and warm up
            began, ended = crowd(options.clients, options.seconds, ask, first=10_000)
    return engine, began, ended


def prefill_side(options: argparse.Namespace) -> tuple[Engine, float, float]:
    """Prompts lent by a prefill engine."""
    spec = engine_spec("prefill", "kv_producer", options)
    with running([spec], options.directory / "run") as (engine,):
        pin(engine.pid)
        with PullingPartner(described(description_of(engine))) as partner, streaming(engine):

            def ask(number: int) -> None:
                [prompt] = make_prompts([options.prompt], seed=10_000 + number)
                ticket = prefill_only(Client(engine.url), prompt)
                assert ticket is not None
                held = partner.hold(ticket)
                time.sleep(options.hold)
                partner.pull(held)

            crowd(4, 1.0, ask)  # greet, and warm up
            began, ended = crowd(options.clients, options.seconds, ask, first=10_000)
    return engine, began, ended


# Results


@dataclass(frozen=True)
class Side:
    """One engine's steps; milliseconds."""

    name: str
    steps: int
    requests: int
    in_flight: float
    all_steps: Times
    processor: Times
    quiet_steps: int
    quiet: Times
    scheduler: Times
    worker: Times
    per_request: float
    hooks: dict[str, list[float]]


def summed(step: dict[str, Any], column: int, hooks: Callable[[str], bool]) -> float:
    """Sum over the selected hooks of a step."""
    return sum(float(seen[column]) for hook, seen in step["hooks"].items() if hooks(hook))


def is_quiet(step: dict[str, Any]) -> bool:
    """Whether no request arrived, got blocks or ended in it."""
    return not any(hook in step["hooks"] for hook in PER_REQUEST)


def times_of(
    steps: Sequence[dict[str, Any]], column: int, hooks: Callable[[str], bool] = lambda _: True
) -> Times:
    """Times of the selected hooks in each step."""
    return Times.of([summed(step, column, hooks) for step in steps])


def account(name: str, steps: Sequence[dict[str, Any]], at_least: int) -> Side:
    """Sum up the steps that computed with ``at_least`` requests in flight."""
    counted = [s for s in steps if s["scheduled"] and s["in_flight"] >= at_least]
    quiet = [s for s in counted if is_quiet(s)]
    if not quiet or len(counted) < 100:
        raise RuntimeError(f"{name}: {len(counted)} steps, {len(quiet)} of them quiet: too few")
    requests = round(sum(s["hooks"].get("on_new_request", [0])[0] for s in counted))
    hooks: dict[str, list[float]] = {}
    for step in counted:
        for hook, seen in step["hooks"].items():
            hooks[hook] = [a + b for a, b in zip(hooks.get(hook, [0, 0, 0]), seen, strict=True)]
    wall, idle = times_of(counted, _WALL), times_of(quiet, _WALL)
    return Side(
        name,
        len(counted),
        requests,
        statistics.median(s["in_flight"] for s in counted),
        wall,
        times_of(counted, _CPU),
        len(quiet),
        idle,
        times_of(counted, _WALL, lambda hook: hook not in WORKER),
        times_of(counted, _WALL, WORKER.__contains__),
        (wall.mean - idle.mean) * len(counted) / max(1, requests),
        hooks,
    )


def render(sides: Sequence[Side]) -> str:
    """Tables: the steps, then where their time goes."""
    rows = []
    for side in sides:
        for what, times, count in (
            ("a step", side.all_steps, side.steps),
            ("its processor time", side.processor, side.steps),
            ("its scheduler side", side.scheduler, side.steps),
            ("its worker side", side.worker, side.steps),
            ("a quiet step", side.quiet, side.quiet_steps),
        ):
            of = (times.mean, times.p50, times.p99, times.worst)
            numbers = (f"{each:.3f}" for each in of)
            rows.append([side.name, what, f"{count:,}", *numbers])
    tables = [table(["", "", "steps", "mean\nms", "p50\nms", "p99\nms", "worst\nms"], rows)]
    for side in sides:
        lines = [
            [
                hook,
                f"{calls / side.steps:.2f}",
                f"{1e6 * wall / calls:.1f}",
                f"{1e6 * cpu / calls:.1f}",
                f"{1e6 * wall / side.steps:.1f}",
            ]
            for hook, (calls, wall, cpu) in sorted(side.hooks.items(), key=lambda of: -of[1][1])
        ]
        headings = ["hook", "calls\na step", "us a call\nwall", "us a call\ncpu", "us a\nstep"]
        tables.append(
            f"{side.name}: {side.in_flight:g} in flight, {side.requests} requests in "
            f"{side.steps} steps, {side.per_request:.3f} ms for each beyond a quiet step's work\n"
            + table(headings, lines)
        )
    return "\n\n".join(tables)


SIDES = {"decode": decode_side, "prefill": prefill_side}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    options = _options(arguments)
    sides = []
    for name in options.sides:
        engine, began, ended = SIDES[name](options)
        steps = [s for s in steps_of(engine) if began < s["ended"] < ended]
        sides.append(account(name, steps, int(0.9 * options.clients)))
    print(render(sides))
    holds = []
    for side in sides:
        for name, took in (("mean", side.all_steps.mean), ("median", side.all_steps.p50)):
            holds.append(took <= options.bound)
            word = "holds" if holds[-1] else "FAILS"
            print(f"{word}  {side.name}: {took:.3f} ms a step ({name}) <= {options.bound:g} ms")
    if options.json is not None:
        document = {"cores": os.cpu_count(), "sides": [asdict(side) for side in sides]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(holds) or not options.check else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    add("--clients", type=int, default=32, help="requests in flight (%(default)s)")
    add("--seconds", type=float, default=12.0, help="that are measured (%(default)s)")
    add("--hold", type=float, default=1.0, help="seconds that a pull is held up (%(default)s)")
    add("--prompt", type=int, default=193, help="tokens (%(default)s)")
    add("--bound", type=float, default=0.2, help="ms of a step, mean and median (%(default)s)")
    add("--check", action="store_true", help="fail if a side is above the bound")
    add("--model", choices=SPECS, default="tiny")
    add("--layout", default="BHLNC", help="memory order (%(default)s)")
    add("--kv-cache-mib", type=int, default=256)
    add("--directory", type=Path, default=Path(".work/engine_thread"), help="for models and logs")
    add("--json", type=Path, help="where to write all measurements")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
