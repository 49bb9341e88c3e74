"""A trace of Mooncake's over two prefill and two decode engines, policy by policy.

    python -m tests.throughput.mooncake --trace conversation_trace.jsonl --requests 500

The engines are those of ``sim_engine``: caches and evictions are vLLM's own, computing is a
sleep.  Prompts are made from the ids of the trace.  ``--tokens-per-block`` makes prompts, answers,
caches and computing smaller alike; ``--speed-up`` brings requests and computing nearer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import aiohttp

from pdconn.tools.lab.proxy import running_proxy
from pdconn.tools.output.table import table
from pdconn.tools.plan.store.curve import TracedRequest
from pdconn.tools.plan.store.trace import MOONCAKE_BLOCK, BadTrace, TraceCounts, read_trace
from tests.throughput.mooncake.lines import ideal_reuse, prompt, scaled
from tests.throughput.trace import POLICIES, PULLS, Client

ENGINE_BLOCK = 16
TRACE_VARIABLE = "PDCONN_MOONCAKE_TRACE"
"""Names the file of the trace, which this repository has no copy of."""


@dataclass(frozen=True)
class Scale:
    """How much smaller and faster than the trace; cache and rate in tokens of the trace."""

    block: int
    speed_up: float
    cache_tokens: int
    prefill_rate: float

    @property
    def num_blocks(self) -> int:
        """Of an engine's cache."""
        return scaled(self.cache_tokens, self.block) // ENGINE_BLOCK

    @property
    def tokens_per_s(self) -> float:
        """That an engine computes of prompts."""
        return self.prefill_rate * self.block / MOONCAKE_BLOCK * self.speed_up


@dataclass(frozen=True)
class Row:
    """One policy; tokens are those that the engines saw."""

    policy: str
    requests: int
    prompt_tokens: int
    computed: int
    ideal_share: float | None
    pulled: int
    ttft_ms: float
    ttft_p95_ms: float


async def run(policy: str, trace: Sequence[TracedRequest], scale: Scale) -> Row:
    """One policy over new engines."""
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape
    from tests.fakes.simulated.sim_engine import Speed, sim_engines

    shape = CacheShape((GroupShape(ENGINE_BLOCK),), scale.num_blocks, retention=0)
    async with sim_engines(4, shape, Speed(scale.tokens_per_s)) as engines:
        words = [engine.word for engine in engines]
        with tempfile.TemporaryDirectory() as directory:
            proxy = running_proxy(words[:2], words[2:], Path(directory), args=POLICIES[policy])
            url = await asyncio.to_thread(proxy.__enter__)
            try:
                client = await _replay(url, policy, trace, scale)
            finally:
                await asyncio.to_thread(proxy.__exit__, None, None, None)
        computed = sum(engine.counts.computed for engine in engines)
        pulled = sum(engine.counts.pulled for engine in engines)
    total, ideal = sum(one.num_tokens for one in client.asked), ideal_reuse(trace, scale.block)
    waits = sorted(1000 * one.ttft_s for one in client.asked)
    share = (total - computed) / ideal if ideal else None
    p95 = waits[int(0.95 * len(waits))]
    return Row(
        policy, len(waits), total, computed, share, pulled, statistics.median(waits), p95
    )  # fmt: skip


async def _replay(url: str, policy: str, trace: Sequence[TracedRequest], scale: Scale) -> Client:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(url, session)

        async def send(request: TracedRequest) -> None:
            await asyncio.sleep((request.at_s - trace[0].at_s) / scale.speed_up)
            answer = scaled(request.answer_tokens, scale.block)
            await client.ask(prompt(request, scale.block), answer)

        async def tell() -> None:
            while True:
                await asyncio.sleep(5.0)
                done = f"{len(client.asked)} of {len(trace)} requests"
                print(f"{policy}: {done}", file=sys.stderr, flush=True)

        progress = asyncio.create_task(tell())
        try:
            await asyncio.gather(*map(send, trace))
        finally:
            progress.cancel()
    return client


def shown(rows: Sequence[Row]) -> str:
    """The table."""
    headings = ["policy", "requests", "prompt\ntokens", "computed\ntokens", "of ideal\nreuse",
                "pulled\ntokens", "TTFT\nms", "TTFT p95\nms"]  # fmt: skip
    cells = [
        [
            row.policy,
            str(row.requests),
            str(row.prompt_tokens),
            str(row.computed),
            "-" if row.ideal_share is None else f"{row.ideal_share:.1%}",
            str(row.pulled),
            f"{row.ttft_ms:.0f}",
            f"{row.ttft_p95_ms:.0f}",
        ]
        for row in rows
    ]
    return table(headings, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 where the trace cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = os.environ.get(TRACE_VARIABLE)
    parser.add_argument(
        "--trace", type=Path, required=known is None, default=known and Path(known),
        help=f"the file, a request a line (the variable {TRACE_VARIABLE})",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, help="so many first ones only")
    parser.add_argument("--speed-up", type=float, default=1.0)
    parser.add_argument("--tokens-per-block", type=int, default=32, help="instead of 512")
    parser.add_argument("--cache-tokens", type=int, default=1_000_000, help="of the trace")
    parser.add_argument("--prefill-rate", type=float, default=20_000.0, help="of the trace, a s")
    default = [PULLS, "prefix", "round-robin"]
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=default)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(argv)
    if args.tokens_per_block < ENGINE_BLOCK or args.tokens_per_block % ENGINE_BLOCK:
        parser.error(
            f"--tokens-per-block: expected a multiple of {ENGINE_BLOCK}, "
            f"got {args.tokens_per_block}"
        )
    for name in ("requests", "speed_up", "cache_tokens", "prefill_rate"):
        if (given := getattr(args, name)) is not None and not 0 < given < math.inf:
            parser.error(f"--{name.replace('_', '-')}: expected more than 0, got {given}")
    try:
        with args.trace.open("rb") as lines:
            trace = list(islice(read_trace(lines, TraceCounts()), args.requests))
    except (OSError, BadTrace) as error:
        print(f"--trace {args.trace}: {error}", file=sys.stderr)
        return 2
    if not trace:
        print(f"--trace {args.trace}: expected requests, got none", file=sys.stderr)
        return 2
    scale = Scale(args.tokens_per_block, args.speed_up, args.cache_tokens, args.prefill_rate)
    longest = max(scaled(one.num_tokens + one.answer_tokens, scale.block) for one in trace)
    if longest > (scale.num_blocks - 2) * ENGINE_BLOCK:
        needed = math.ceil((longest + 2 * ENGINE_BLOCK) * MOONCAKE_BLOCK / scale.block)
        parser.error(f"--cache-tokens: expected at least {needed}, got {args.cache_tokens}")
    print(
        f"{scale.block} tokens for {MOONCAKE_BLOCK}; each engine {scale.num_blocks} blocks of "
        f"{ENGINE_BLOCK} tokens, {scale.tokens_per_s:.0f} tokens/s"
    )
    rows = [asyncio.run(run(policy, trace, scale)) for policy in args.policies]
    print(shown(rows))
    if args.json:
        args.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
