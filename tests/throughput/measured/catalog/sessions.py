"""Benchmarks of sessions: what they gain by ``keep`` and prefetches, and what others lose."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import Benchmark, Command, Table
from tests.throughput.measured.catalog.shared import ENGINE, ENGINES

AGENTS = Benchmark(
    "agents",
    "What do agents gain by `keep` and by prefetches, and what does a flood beside them lose?",
    "Real vLLM, one prefill and one decode engine of 24 320 tokens behind `pdconn proxy` on two "
    "cores (`--alone-below 64`, so that turns are handed over); 4 sessions of 4 turns, 2400 tokens "
    "that grow by 128. In each pause comes a flood of "
    "one-off prompts of twice the cache, two at a time, and its throughput is that of the pauses. "
    "Ways in turns, in another order in the second round. Later turns only; tokens hit: of those "
    "that earlier turns had. Every answer is compared with one of an engine alone.",
    (Command("agents", "python -m tests.throughput.agents"),),
    11,
    (
        Table(
            ("agents",),
            "rows",
            {"": "{way:s}", "later turns": "{turns}", "tokens hit": "{hit:%.1f} %",
             "first token, median, p90": "{first_ms:.0f}, {first_p90_ms:.0f} ms",
             "of without": "{of_without:.2f}", "of no pause": "{of_no_pause:.2f}",
             "flood, requests/s": "{flood_per_s:.2f}", "of the flood alone": "{of_alone:.2f}",
             "promises broken": "{broken}", "wrong": "{wrong}"},
        ),
    ),
    drop=frozenset({"settings"}),
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip

AGENTS_SIMULATED = Benchmark(
    "agents_simulated",
    "And 40 agents of 20 turns over a fleet?",
    "8000 tokens that grow by 400, pauses of 1 to 20 s; 12 prefill engines of 128 000 tokens that "
    "compute 25 000 a second, 4 decode engines of 384 000; the default share of half a cache may "
    "be kept. A steady flood of prompts of 2048 tokens, two under way for each prefill engine. In "
    "virtual time: the schedulers, block pools and KV events are vLLM's own, what is kept and "
    "where requests go is decided by our code, and computing and pulling are given times.",
    (Command("agents", "python -m tests.throughput.agents.simulated"),),
    25,
    (
        Table(
            ("agents",),
            "rows",
            {"": "{way:s}", "tokens hit": "{hit:%.1f} %",
             "first token, median, p90": "{first_ms:.0f}, {first_p90_ms:.0f} ms",
             "of without": "{of_without:.2f}", "of no pause": "{of_no_pause:.2f}",
             "flood, requests/s": "{flood_per_s:.1f}",
             "of the flood alone": "{flood_of_alone:.2f}",
             "of hits anyway": "{flood_of_hits_anyway:.2f}",
             "flood, caches a pause": "{flood_caches:.1f}", "promises broken": "{broken}",
             "turns elsewhere": "{moved}"},
        ),
    ),
    drop=frozenset({"settings"}),
    packages=("vllm",),
    needs=(ENGINE,),
)  # fmt: skip
