"""Processor time of the proxy for a request in two legs, and for a chunk of its answer.

    PDCONN_VLLM_ROUTER=.rival/bin/vllm-router python -m tests.throughput.proxy_cpu --json cpu.json

Prefill answers a ticket at once, and decode one JSON answer or a stream of 64 chunks, each a write
of its own 10 ms after the last.  Engines, client and router are processes of their own; engines and
client are bare protocols of asyncio.  The routers are asked in turns.  What is counted is the
processor time (user and system, all threads) of the router's process over the run, divided by the
requests; the median of the rounds.  A chunk's time is the difference between a streamed request and
one with a JSON answer, divided by 64.

``look-up`` means that prefill publishes events, and that every prompt is hashed and scored: the
engine holds its first half.  The rival, which the variable names, is of an environment of its own
(``pip install vllm-router==0.1.17``) and runs in its P/D mode with round-robin.  ``--beside``
names another source tree of pdconn, such as the one before a change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from pdconn.tools.output.table import table
from tests.router.picker.gateway import BUFFERED
from tests.throughput.proxy_cpu.knee import knee_shown, measure_knee
from tests.throughput.proxy_cpu.pair import measure_pairs, pairs_shown
from tests.throughput.proxy_cpu.raw_client import ask_all, request
from tests.throughput.proxy_cpu.raw_engines import CHUNKS
from tests.throughput.proxy_cpu.routers import (
    RawFleet,
    RunningRouter,
    our_router,
    raw_fleet,
    rival_router,
)

AT_ONCE, STREAMS_AT_ONCE = 16, 32
PROMPTS = 8
"""Different prompts of a run, sent in turn."""
JSON_REQUESTS, STREAMS = 640, 96
LONG_TOKENS = 32_000
RIVAL_VARIABLE = "PDCONN_VLLM_ROUTER"
"""The variable that names vllm-router's program."""


@dataclass
class Way:
    """A router and the prompts that it gets, and what each round took.

    Attributes:
        json_ms, stream_ms: processor time a request, by the router's parts.
    """

    name: str
    router: AbstractContextManager[RunningRouter]
    prompt_tokens: int = 1000
    json_ms: list[Mapping[str, float]] = field(default_factory=list)
    stream_ms: list[Mapping[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """The medians of a way; ``chunk_us``: of the differences in each round."""

    name: str
    prompt_tokens: int
    json_ms: float
    stream_ms: float
    chunk_us: float
    spread_ms: tuple[float, float]

    @staticmethod
    def of(way: Way) -> Iterator[Row]:
        """The rows of a way: one for each part of the router."""
        for part in way.json_ms[0]:
            json_ms = [one[part] for one in way.json_ms]
            stream_ms = [one[part] for one in way.stream_ms]
            pairs = zip(json_ms, stream_ms, strict=True)
            yield Row(
                way.name + part,
                way.prompt_tokens,
                median(json_ms),
                median(stream_ms),
                median(1000 * (stream - whole) / CHUNKS for whole, stream in pairs),
                (min(stream_ms), max(stream_ms)),
            )


def ways(args: argparse.Namespace, fleet: RawFleet, place: Path) -> Iterator[Way]:
    """Every router; those of another tree beside ours."""
    trees = [("pdconn", None)]
    if args.beside is not None:
        trees.append(("other", args.beside))
    for name, tree in trees:
        for words, policy, looks_up, tokens in (
            ("round-robin", "round-robin", False, 1000),
            ("prefix, look-up", "prefix", True, 1000),
            ("prefix, look-up", "prefix", True, LONG_TOKENS),
        ):
            if args.only and f"{words} {tokens}" not in args.only:
                continue
            file = f"{name}-{policy}-{tokens}"
            router = our_router(file, fleet, place, policy=policy, looks_up=looks_up, tree=tree)
            yield Way(f"{name}, {words}", router, tokens)
    for name, tree in trees:
        for policy, looks_up, tokens in (
            ("round-robin", False, 1000),
            ("prefix", True, 1000),
            ("prefix", True, LONG_TOKENS),
        ):
            words = "prefix, look-up" if looks_up else policy
            if args.only and f"gateway {words} {tokens}" not in args.only:
                continue
            file = f"gateway-{name}-{policy}-{tokens}"
            router = our_router(
                file, fleet, place, policy=policy, looks_up=looks_up, tree=tree, mode=BUFFERED
            )
            whose = "" if tree is None else f"{name}, "
            yield Way(f"{whose}Envoy + picker, {words}", router, tokens)
    if RIVAL_VARIABLE in os.environ:
        program = Path(os.environ[RIVAL_VARIABLE])
        for tokens in (1000, LONG_TOKENS):
            if not args.only or f"rival {tokens}" in args.only:
                router = rival_router(f"rival-{tokens}", program, fleet, place)
                yield Way("vllm-router, round-robin", router, tokens)


def measure(args: argparse.Namespace, place: Path) -> list[Row]:
    """Every way in turn, ``args.rounds`` times, after one round that is not counted."""
    rng = random.Random(1)
    with raw_fleet(place, args.writes) as fleet, ExitStack() as stack:
        running = [(way, stack.enter_context(way.router)) for way in ways(args, fleet, place)]
        for number in range(args.rounds + 1):
            for way, router in running:
                few = 0.25 if number == 0 or way.prompt_tokens == LONG_TOKENS else 1.0
                json_ms = _run(way, router, rng, few, streams=False)
                stream_ms = _run(way, router, rng, few if number == 0 else 1.0, streams=True)
                if number > 0:
                    way.json_ms.append(json_ms)
                    way.stream_ms.append(stream_ms)
                say = f"{number}: {way.name}, {way.prompt_tokens}: {json_ms['']:.3f}"
                print(say, file=sys.stderr, flush=True)
        return [row for way, _ in running for row in Row.of(way)]


def _run(
    way: Way, router: RunningRouter, rng: random.Random, few: float, *, streams: bool
) -> Mapping[str, float]:
    """Milliseconds of the router's processor time a request, by its parts."""
    messages = [request(way.prompt_tokens, streams=streams, rng=rng) for _ in range(PROMPTS)]
    number = int((STREAMS if streams else JSON_REQUESTS) * few)
    before_s = router.used_s()
    at_once = STREAMS_AT_ONCE if streams else AT_ONCE
    asking = ask_all([router.port], messages, number=number, at_once=at_once, streams=streams)
    asyncio.run(asking)
    return {part: 1000 * (s - before_s[part]) / number for part, s in router.used_s().items()}


def shown(rows: Sequence[Row]) -> str:
    """The table."""
    headings = [
        "", "prompt\ntokens", "one JSON answer\nms", f"{CHUNKS} chunks\nms", "of rounds\nms",
        "a chunk\nus",
    ]  # fmt: skip
    cells = [
        [
            row.name, str(row.prompt_tokens), f"{row.json_ms:.2f}", f"{row.stream_ms:.2f}",
            f"{row.spread_ms[0]:.2f} to {row.spread_ms[1]:.2f}", f"{row.chunk_us:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return table(headings, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way (%(default)s)")
    parser.add_argument("--writes", type=int, default=1, help="chunks a write (%(default)s)")
    parser.add_argument("--pair", action="store_true", help="only two proxies, two ways")
    parser.add_argument("--knee", action="store_true", help="only requests a second of a router")
    parser.add_argument("--beside", type=Path, help="another source tree of pdconn")
    parser.add_argument("--only", nargs="*", help="such as 'round-robin 1000' and 'rival 1000'")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(argv)
    if args.knee:
        with tempfile.TemporaryDirectory() as directory:
            print(knee_shown(measure_knee(args.rounds, Path(directory))))
        return 0
    if args.pair:
        with tempfile.TemporaryDirectory() as directory:
            print(pairs_shown(measure_pairs(args.rounds, Path(directory))))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(args, Path(directory))
    print(shown(rows))
    if args.json:
        document = {"router": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
