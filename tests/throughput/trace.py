"""Conversations over two prefill and two decode engines, policy by policy.

    python -m tests.throughput.trace --json trace.json
    python -m tests.throughput.trace --policies prefix round-robin --conversations 40

Every conversation begins with one of a few system prompts and grows turn by turn.  Each policy
gets the same trace and new engines.  The engines are those of ``sim_engine``: caches, evictions
and events are vLLM's own; computing is a sleep.  The router is ``pdconn proxy`` in a process
of its own; engines and clients share this one.  Cached tokens are those that engines report,
predictions those of the router's ``/debug/route``.  Times depend on the machine and on the speed
of the fake engines; they are not those of real engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.output.table import table

if TYPE_CHECKING:
    from tests.fakes.simulated.sim_engine import Counts, SimEngine

PULLS = "prefix + pulls"
POLICIES: Mapping[str, tuple[str, ...]] = {
    PULLS: ("--policy", "prefix", "--pull-above", "16"),
    "prefix": ("--policy", "prefix"),
    "round-robin": ("--policy", "round-robin"),
    "random": ("--policy", "random"),
}
"""What each row is asked of the router."""
NUM_SYSTEM_PROMPTS = 6
NUM_BLOCKS = 1200
WINDOW = 128
PREFILL_TOKENS_PER_S = 20_000.0
ANSWERS = (10, 40)
"""Tokens of an answer, from and to."""
VOCABULARY = 50_000


@dataclass(frozen=True)
class Turn:
    """A user's pause and tokens, and the length of the answer."""

    pause_s: float
    tokens: list[int]
    answer: int


@dataclass(frozen=True)
class Conversation:
    """When it begins, with which system prompt, and its turns."""

    at_s: float
    system: list[int]
    turns: list[Turn]


@dataclass(frozen=True)
class Asked:
    """One request: what the client saw, and the router's record of it."""

    ttft_s: float
    num_tokens: int
    alone: bool
    predicted: int
    reported: int | None


@dataclass(frozen=True)
class Row:
    """One policy's trace.

    Attributes:
        prefill_cached: of the tokens of prompts that prefill was asked for, what its cache had.
        computed: tokens of prompts that any engine computed.
        computed_share: the same, of all prompts' tokens.
        pulled: tokens that prefill pulled from another engine instead.
        ideal_share: of the tokens that one cache of any size would have served, those that were
            not computed.
        agreement: of requests, where the hit that the router had predicted is what prefill
            reported, or decode that served alone; None for policies that predict nothing.
        off_tokens, predicted_tokens: the mean difference, and the mean hit.
    """

    policy: str
    requests: int
    alone: int
    prefill_cached: float
    computed: int
    computed_share: float
    pulled: int
    ideal_share: float
    agreement: float | None
    off_tokens: float | None
    predicted_tokens: float | None
    ttft_ms: float
    ttft_p95_ms: float
    preempted: int


def draw(
    conversations: int,
    turns: int,
    seed: int,
    per_s: float,
    answers: tuple[int, int] = ANSWERS,
) -> list[Conversation]:
    """The trace: Poisson arrivals, pauses and lengths of a few hundred tokens."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    systems = [text(300, 900) for _ in range(NUM_SYSTEM_PROMPTS)]
    at_s, drawn = 0.0, []
    for _ in range(conversations):
        at_s += rng.expovariate(per_s)
        drawn_turns = [
            Turn(rng.expovariate(1.0), text(60, 400), rng.randint(*answers)) for _ in range(turns)
        ]
        drawn.append(Conversation(at_s, rng.choice(systems), drawn_turns))
    return drawn


class Client:
    """Sends requests to the router, and records them."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.asked: list[Asked] = []

    async def converse(self, conversation: Conversation) -> None:
        """All turns, one after the other."""
        await asyncio.sleep(conversation.at_s)
        prompt = list(conversation.system)
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.pause_s if number else 0.0)
            prompt += turn.tokens
            prompt += await self.ask(prompt, turn.answer)

    async def ask(self, prompt: list[int], answer: int) -> list[int]:
        """One request, and the tokens of its answer."""
        body = {"model": "sim", "prompt": prompt, "max_tokens": answer, "stream": True}
        began, ttft_s = time.perf_counter(), 0.0
        tokens: list[int] = []
        cached = None
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                data = event_data(line)
                if data is None or data == DONE:
                    continue
                chunk = json.loads(data)
                if chunk["choices"]:
                    ttft_s = ttft_s or time.perf_counter() - began
                    tokens += map(int, chunk["choices"][0]["text"].split())
                else:
                    cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            request_id = response.headers["X-Request-Id"]
        assert len(tokens) == answer, f"{request_id}: {len(tokens)} of {answer} tokens"
        await self._note(request_id, len(prompt), ttft_s, cached)
        return tokens

    async def _note(
        self, request_id: str, num_tokens: int, ttft_s: float, cached: int | None
    ) -> None:
        pages = admin_url(self._url)
        async with self._session.get(f"{pages}/debug/route/{request_id}") as response:
            routed: dict[str, Any] = await response.json()
        alone = bool(routed["alone"])
        side = "decode" if alone else "prefill"
        reported = cached if alone else routed["cached_tokens"]
        predicted = routed[f"{side}_hit_tokens"] or 0  # null: the hash scheme is not known yet
        self.asked.append(Asked(ttft_s, num_tokens, alone, predicted, reported))


async def run(
    policy: str,
    trace: Sequence[Conversation],
    num_blocks: int,
    prefill_tokens_per_s: float,
    window: int | None = WINDOW,
) -> Row:
    """One policy over new engines."""
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape
    from tests.fakes.simulated.sim_engine import Speed, sim_engines

    windows = () if window is None else (GroupShape(16, window=window),)
    groups = (GroupShape(16), *windows)
    shape = CacheShape(groups, num_blocks, retention=0)
    async with sim_engines(4, shape, Speed(prefill_tokens_per_s)) as engines:
        words = [engine.word for engine in engines]
        with tempfile.TemporaryDirectory() as directory:
            proxy = running_proxy(words[:2], words[2:], Path(directory), args=POLICIES[policy])
            url = await asyncio.to_thread(proxy.__enter__)
            try:
                asked = await _converse(url, policy, trace)
            finally:
                await asyncio.to_thread(proxy.__exit__, None, None, None)
        return _row(policy, asked, engines, fewest_computed(trace))


async def _converse(url: str, policy: str, trace: Sequence[Conversation]) -> list[Asked]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(url, session)
        total = sum(len(conversation.turns) for conversation in trace)
        progress = asyncio.create_task(_tell(client, policy, total))
        try:
            await asyncio.gather(*(client.converse(one) for one in trace))
        finally:
            progress.cancel()
    return client.asked


async def _tell(client: Client, policy: str, total: int) -> None:
    while True:
        await asyncio.sleep(5.0)
        print(f"{policy}: {len(client.asked)} of {total} requests", file=sys.stderr, flush=True)


def fewest_computed(trace: Sequence[Conversation]) -> int:
    """Tokens of prompts that are computed where everything that ever was is reused.

    Each system prompt once, each turn's own tokens, and of each answer the last token, whose KV
    nobody has.
    """
    systems = {tuple(one.system) for one in trace}
    own = sum(len(turn.tokens) + 1 for one in trace for turn in one.turns)
    return sum(map(len, systems)) + own - len(trace)


def _row(policy: str, asked: Sequence[Asked], engines: Sequence[SimEngine], fewest: int) -> Row:
    prefill = [engine.counts for engine in engines[:2]]
    every = [engine.counts for engine in engines]
    judged = [one for one in asked if one.reported is not None] if policy == "prefix" else []
    off = [abs(one.predicted - (one.reported or 0)) for one in judged]
    waits = sorted(one.ttft_s for one in asked)
    computed, total = _sum(every, "computed"), sum(one.num_tokens for one in asked)
    return Row(
        policy=policy,
        requests=len(asked),
        alone=_sum([engine.counts for engine in engines[2:]], "alone"),
        prefill_cached=_sum(prefill, "cached") / max(1, _sum(prefill, "prompt_tokens")),
        computed=computed,
        computed_share=computed / total,
        pulled=_sum(every, "pulled"),
        ideal_share=(total - computed) / (total - fewest),
        agreement=off.count(0) / len(off) if off else None,
        off_tokens=statistics.fmean(off) if off else None,
        predicted_tokens=statistics.fmean(one.predicted for one in judged) if judged else None,
        ttft_ms=1000 * statistics.median(waits),
        ttft_p95_ms=1000 * waits[int(0.95 * len(waits))],
        preempted=_sum(every, "preempted"),
    )


def _sum(counts: Sequence[Counts], field: str) -> int:
    return sum(getattr(one, field) for one in counts)


def shown(rows: Sequence[Row]) -> str:
    """The table."""
    headings = [
        "policy", "requests", "decode\nalone", "cached on\nprefill", "computed\ntokens",
        "of all\nprompts", "of ideal\nreuse", "pulled\ntokens", "predicted\n= reported",
        "mean off\ntokens", "TTFT\nms",
        "TTFT p95\nms",
    ]  # fmt: skip
    cells = [
        [
            row.policy,
            str(row.requests),
            str(row.alone),
            f"{row.prefill_cached:.1%}",
            str(row.computed),
            f"{row.computed_share:.1%}",
            f"{row.ideal_share:.1%}",
            str(row.pulled),
            "-" if row.agreement is None else f"{row.agreement:.1%}",
            "-" if row.off_tokens is None else f"{row.off_tokens:.1f}",
            f"{row.ttft_ms:.0f}",
            f"{row.ttft_p95_ms:.0f}",
        ]
        for row in rows
    ]
    return table(headings, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a policy does not compute as much less as it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--conversations", type=int, default=80)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-second", type=float, default=4.0, help="conversations that begin")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="of an engine's cache")
    parser.add_argument(
        "--answers", nargs=2, type=int, default=ANSWERS, help="tokens of an answer, from and to"
    )
    parser.add_argument(
        "--prefill-rate", type=float, default=PREFILL_TOKENS_PER_S, help="tokens a second"
    )
    parser.add_argument("--no-window", action="store_true", help="full attention only")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(argv)
    window = None if args.no_window else WINDOW
    answers = args.answers[0], args.answers[1]
    trace = draw(args.conversations, args.turns, args.seed, args.per_second, answers)
    rows = [
        asyncio.run(run(policy, trace, args.blocks, args.prefill_rate, window))
        for policy in args.policies
    ]
    print(shown(rows))
    if args.json:
        args.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    computed = {row.policy: row.computed for row in rows}
    # Without windows decode holds what it generated; with them vLLM keeps no window there.
    pulls_most = 0.75 if args.no_window else 1.02
    beaten = (("prefix", "round-robin", 0.8), (PULLS, "prefix", pulls_most))
    judged = [(a, b, most) for a, b, most in beaten if a in computed and b in computed]
    return 0 if all(computed[a] <= most * computed[b] for a, b, most in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
