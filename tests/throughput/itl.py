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
import http.client
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdconn.lab.client import Client, lend_prefix
from pdconn.lab.compare import make_prompts
from pdconn.lab.engine import Engine, running
from pdconn.lab.model import SPECS
from pdconn.lab.spec import SERVED_NAME
from pdconn.lab.table import table
from tests.throughput.engine_thread import description_of, engine_spec, steps_of
from tests.throughput.engines.partner import LendingPartner, PullingPartner, described
from tests.throughput.engines.pinned import engine_core, pin, threads_of

Prompt = tuple[int, ...]
Asking = Callable[[], Mapping[str, Any] | None]

KINDS = ("quiet", "cached", "instant", "pulled")
LENT = "lent"
PAIRS = (
    ("pulled", "instant"),
    ("pulled", "cached"),
    ("pulled", "quiet"),
    ("lent", "cached"),
    ("cached", "quiet"),
)
INSTANT = "instant"
"""As ``tests.throughput.engines.timed`` reads it; that imports vLLM."""

_CACHED = 8
_LEAD = 8
"""Tokens of a stream that do not count: until all streams run, and when the first ends."""


@dataclass
class Phase:
    """One phase; seconds.

    Attributes:
        began, ended: while every stream ran, as ``time.monotonic`` tells.
        seen: between tokens, as clients saw them.
        asked: how many requests came beside the streams.
        loop_s, others_s: processor time of the loop, and of the process's other threads.
        late_s: how long the loop waited for its core.
        steps: between ends of steps, without waiting for the core; ``raw``: with it.
    """

    kind: str
    began: float
    ended: float
    seen: list[float]
    asked: int
    loop_s: float
    others_s: float
    late_s: float
    steps: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)


def stream(engine: Engine, prompt: Prompt, tokens: int) -> list[float]:
    """Arrival time of each token."""
    parts = urlsplit(engine.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    body = {
        "model": SERVED_NAME, "prompt": list(prompt), "max_tokens": tokens,
        "temperature": 0.0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    came = [
        time.monotonic() for line in connection.getresponse() if line.startswith(b'data: {"id"')
    ]
    connection.close()
    return came


@dataclass(frozen=True)
class Used:
    """Processor time of an engine's core so far, in seconds; ``late_s`` as of a phase."""

    loop_s: float
    others_s: float
    late_s: float

    @classmethod
    def of(cls, core: int) -> Used:
        """As the kernel's scheduler counts."""
        others = 0.0
        for thread in threads_of(core):
            try:
                ran, waited, _ = Path(f"/proc/{core}/task/{thread}/schedstat").read_text().split()
            except OSError:
                continue
            if thread == core:
                loop, late = int(ran), int(waited)
            else:
                others += int(ran)
        return cls(loop / 1e9, others / 1e9, late / 1e9)


class Bench:
    """One engine, its partner and their requests."""

    def __init__(
        self,
        engine: Engine,
        partner: LendingPartner,
        reader: PullingPartner,
        options: argparse.Namespace,
    ) -> None:
        self._engine, self._partner, self._options = engine, partner, options
        self._reader = reader
        self._core = engine_core(engine.pid)
        self._client = Client(engine.url)
        self._seeds = itertools.count(1_000)
        self._cached = make_prompts([options.prompt] * _CACHED, seed=5)

    def phase(self, kind: str) -> Phase:
        """Let all streams run to their end, with requests of ``kind`` beside them."""
        options = self._options
        asking = self._prepare(kind)
        streams = make_prompts([32] * options.streams, seed=next(self._seeds))
        over = threading.Event()
        with ThreadPoolExecutor(options.streams + 1) as pool:
            before = Used.of(self._core)
            running = [pool.submit(stream, self._engine, p, options.tokens) for p in streams]
            pacing = pool.submit(self._pace, asking, over)
            came = [each.result() for each in running]
            after = Used.of(self._core)
            over.set()
            asked = pacing.result()
        began, ended = max(c[_LEAD] for c in came), min(c[-_LEAD] for c in came)
        seen = [b - a for c in came for a, b in itertools.pairwise(c) if began < a and b < ended]
        return Phase(
            kind, began, ended, seen, asked,
            after.loop_s - before.loop_s,
            after.others_s - before.others_s,
            after.late_s - before.late_s,
        )  # fmt: skip

    def _prepare(self, kind: str) -> Iterator[Callable[[], Any]]:
        """Requests, encoded before they are sent."""
        if kind in ("cached", LENT):
            for prompt in self._cached:  # pulls since may have pushed them out
                self._client.complete(prompt, 1)
            if kind == LENT:
                return iter([self._be_lent(prompt) for prompt in self._cached] * 500)
            return iter([self._ask(p, lambda: None) for p in self._cached] * 500)
        if kind == "quiet":
            return iter(())
        options = self._options
        count = int(options.rate * options.most_s)
        prompts = make_prompts([options.prompt] * count, seed=next(self._seeds))
        if kind == "instant":
            return iter([self._ask(p, lambda: {INSTANT: True}) for p in prompts])
        return iter([self._ask(p, self._lending(p)) for p in prompts])

    def _lending(self, prompt: Prompt) -> Asking:
        return lambda: self._partner.lend(prompt)

    def _be_lent(self, prompt: Prompt) -> Callable[[], None]:
        """Ask for a prompt but its last token, and pull it."""

        def pull() -> None:
            ticket = lend_prefix(self._client, prompt, len(prompt) - 1)
            if ticket is None or "remote_block_ids" not in ticket:
                raise RuntimeError(f"expected a ticket for {len(prompt) - 1} tokens, got {ticket}")
            self._reader.pull(self._reader.hold(ticket))

        return pull

    def _ask(self, prompt: Prompt, params: Asking) -> Callable[[], Any]:
        return lambda: self._client.complete(prompt, 1, kv_transfer_params=params())

    def _pace(self, asking: Iterator[Callable[[], Any]], over: threading.Event) -> int:
        """Send requests at a steady rate until ``over``; returns the number of answers."""
        futures: list[Future[Any]] = []
        with ThreadPoolExecutor(16) as pool:
            due = time.monotonic()
            for ask in asking:
                if over.wait(max(0.0, due - time.monotonic())):
                    break
                futures.append(pool.submit(ask))
                due += 1 / self._options.rate
        for future in futures:
            future.result()
        return len(futures)


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


# Results


@dataclass(frozen=True)
class Kind:
    """All phases of a kind: milliseconds between tokens, microseconds of processor time."""

    kind: str
    phases: int
    tokens: int
    per_s: float
    p50: float
    p99: float
    raw_p50: float
    raw_p99: float
    seen_p50: float
    seen_p99: float
    loop_us: float
    others_us: float


def quantile(values: Sequence[float], part: float) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def sum_up(kind: str, phases: Sequence[Phase]) -> Kind:
    """One kind's phases, pooled; processor time is for each step."""
    mine = [phase for phase in phases if phase.kind == kind]
    steps = [each for phase in mine for each in phase.steps]
    raw = [each for phase in mine for each in phase.raw]
    seen = [each for phase in mine for each in phase.seen]
    return Kind(
        kind,
        len(mine),
        len(steps),
        sum(phase.asked for phase in mine) / sum(phase.ended - phase.began for phase in mine),
        *(1e3 * quantile(of, part) for of in (steps, raw, seen) for part in (0.5, 0.99)),
        1e6 * sum(phase.loop_s for phase in mine) / len(steps),
        1e6 * sum(phase.others_s for phase in mine) / len(steps),
    )


def ratios(phases: Sequence[Phase], over: str, under: str, part: float) -> list[float]:
    """Of a quantile, round by round."""

    def of(kind: str) -> list[float]:
        return [quantile(phase.steps, part) for phase in phases if phase.kind == kind]

    return [a / b for a, b in zip(of(over), of(under), strict=True)]


def render(kinds: Sequence[Kind], phases: Sequence[Phase]) -> str:
    """A table of the kinds, and one of their ratios with the rounds' spread."""
    rows = [
        [
            kind.kind, f"{kind.per_s:.1f}", f"{kind.tokens:,}",
            *(f"{x:.2f}" for x in (kind.p50, kind.p99, kind.raw_p50, kind.raw_p99)),
            *(f"{x:.2f}" for x in (kind.seen_p50, kind.seen_p99)),
            f"{kind.loop_us:.0f}", f"{kind.others_us:.0f}",
        ]
        for kind in kinds
    ]  # fmt: skip
    headings = [
        "", "asked\na second", "tokens", "p50\nms", "p99\nms", "raw\np50", "raw\np99",
        "client\np50", "client\np99",
        "loop, us\na step", "others, us\na step",
    ]  # fmt: skip
    by_name = {kind.kind: kind for kind in kinds}
    lines = []
    for over, under in PAIRS:
        if over not in by_name or under not in by_name:
            continue
        a, b = by_name[over], by_name[under]
        for name, part, pooled in (("p50", 0.5, a.p50 / b.p50), ("p99", 0.99, a.p99 / b.p99)):
            rounds = ratios(phases, over, under, part)
            spread = [statistics.median(rounds), min(rounds), max(rounds)]
            lines.append(
                [f"{over} / {under}", name, f"{pooled:.3f}", *(f"{each:.3f}" for each in spread)]
            )
    ratio = table(["", "", "pooled", "median of\nrounds", "least", "most"], lines)
    return f"{table(headings, rows)}\n\n{ratio}"


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
        options.json.write_text(json.dumps(document) + "\n")
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
