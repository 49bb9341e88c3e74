"""Cost of planning: a long prompt, a large peer, and the memory of a plan.

    python -m tests.throughput.planning --json planning.json
    python -m tests.throughput.planning --check

The shape is Gemma 3 27B's: 62 layers, every sixth with full attention and the others
with windows of 1024 tokens, 16 KV heads of 128 numbers for K and V, in the groups and
row widths that vLLM gives it.  Block ids are random, so runs rarely merge.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pdconn.planning.plan import Need, Pairing
from pdconn.protocol.ticket import BlockList
from pdconn.tools.output.table import table
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory

LAYERS, EVERY, WINDOW, HEADS, TOKEN_NBYTES = 62, 6, 1024, 16, 2 * 128 * 2
BLOCK = 16
CACHES = (8192, 1 << 20)


@dataclass(frozen=True)
class Row:
    """One measurement: what, how many runs, milliseconds, and the bound that we set us."""

    what: str
    runs: int
    median_ms: float
    worst_ms: float
    bound_ms: float

    @property
    def holds(self) -> bool:
        return self.median_ms <= self.bound_ms


@dataclass(frozen=True)
class PlanMemory:
    """The peak of one plan in a small cache and in a large one, and the bounds that we set us.

    A plan may grow with its runs, by ``bound_nbytes`` each, and not with the cache.
    """

    what: str
    runs: int
    small_nbytes: int
    large_nbytes: int
    bound_nbytes: float = 80.0
    bound_growth: float = 1.05

    @property
    def nbytes_per_run(self) -> float:
        return max(self.small_nbytes, self.large_nbytes) / self.runs

    @property
    def growth(self) -> float:
        return self.large_nbytes / self.small_nbytes

    @property
    def holds(self) -> bool:
        return (
            self.nbytes_per_run <= self.bound_nbytes
            and 1 / self.bound_growth <= self.growth <= self.bound_growth
        )


def gemma(layout: str, tp: int, rank: int, num_blocks: int, at: int = 0) -> KVCacheReferences:
    """One rank's memory; a rank of more ranks than heads holds one head, replicated."""
    full = [layer for layer in range(LAYERS) if (layer + 1) % EVERY == 0]
    local = [layer for layer in range(LAYERS) if (layer + 1) % EVERY]
    count = -(-len(local) // len(full))
    groups = []
    for layers in (full, *(local[start::count] for start in range(count))):
        memory = layout_memory(
            layout,
            base=(at + rank + 1) << 42,
            num_blocks=num_blocks,
            layers=[f"layers.{layer}" for layer in layers],
            row_layers=len(full),
            num_heads=max(1, HEADS // tp),
            first_head=rank * HEADS // tp,
            block_tokens=BLOCK,
            token_nbytes=TOKEN_NBYTES,
        )
        kind = AttentionKind.FULL if layers is full else AttentionKind.SLIDING_WINDOW
        window = None if layers is full else WINDOW
        groups.append(GroupMemory(kind, window, BLOCK, memory))
    return build_kv_cache_references(groups)


def tables(
    references: KVCacheReferences, tokens: int, blocks: int, seed: int
) -> tuple[BlockList, ...]:
    """Block lists of one prompt, in random blocks."""
    ids = iter(np.random.default_rng(seed).permutation(np.arange(1, blocks)).tolist())
    made = []
    for group in references.groups:
        first = 0 if group.window is None else max(0, tokens - group.window + 1) // BLOCK
        count = -(-tokens // BLOCK) - first
        made.append(BlockList(first, tuple(next(ids) for _ in range(count))))
    return tuple(made)


def timed(work: Callable[[], object], times: int) -> tuple[float, float]:
    """Median and worst of ``times`` runs, in milliseconds, after one that does not count."""
    work()
    gc.collect()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken), max(taken)


def plan_row(layout: str, tokens: int, bound_ms: float, times: int) -> Row:
    blocks = 2 * tokens // BLOCK + 4096
    ours, theirs = (gemma(layout, 1, 0, blocks, at) for at in range(2))
    pairing = Pairing.between(ours, [theirs])
    need = Need.for_range(0, tokens, tables(ours, tokens, blocks, seed=1))
    lent = tables(theirs, tokens, blocks, seed=2)
    median, worst = timed(lambda: pairing.plan(need, lent), times)
    runs = pairing.plan(need, lent).num_runs
    return Row(f"plan of {tokens} tokens, {layout}", runs, median, worst, bound_ms)


def template_row(layout: str, tp: int, our_tp: int, times: int) -> Row:
    ours = gemma(layout, our_tp, 0, 4096, at=tp)
    theirs = [gemma(layout, tp, rank, 4096) for rank in range(tp)]
    median, worst = timed(lambda: Pairing.between(ours, theirs), times)
    runs = sum(len(template.nbytes) for template in Pairing.between(ours, theirs).templates)
    return Row(f"template, {tp} ranks to {our_tp}, {layout}", runs, median, worst, 50.0)


def memory_row(layout: str, tokens: int) -> PlanMemory:
    """Plan one prompt, with the same block ids, in both caches."""
    small, large = (plan_memory(layout, tokens, blocks) for blocks in CACHES)
    assert small[0] == large[0]
    # Blocks outermost have one run each, which bears alone what is kept of a block: its two ids.
    bound_nbytes = 96.0 if layout[0] == "B" else 80.0
    what = f"plan of {tokens} tokens, {layout}"
    return PlanMemory(what, small[0], small[1], large[1], bound_nbytes)


def plan_memory(layout: str, tokens: int, blocks: int) -> tuple[int, int]:
    """Runs of one plan and the peak bytes that it allocates, in caches of ``blocks`` blocks."""
    ours, theirs = (gemma(layout, 1, 0, blocks, at) for at in range(2))
    pairing = Pairing.between(ours, [theirs])
    need = Need.for_range(0, tokens, tables(ours, tokens, CACHES[0], seed=1))
    lent = tables(theirs, tokens, CACHES[0], seed=2)
    tracemalloc.start()
    try:
        runs = pairing.plan(need, lent).num_runs
        return runs, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write all measurements")
    parser.add_argument("--times", type=int, default=15, help="runs of each (%(default)s)")
    parser.add_argument("--check", action="store_true", help="fail if a bound does not hold")
    options = parser.parse_args(arguments)
    rows = [
        plan_row("LBHNC", 131_072, 15.0, options.times),
        plan_row("BLHNC", 131_072, 2.0, options.times),
        plan_row("BHLNC", 131_072, 2.0, options.times),
        *(template_row(layout, 64, 1, options.times) for layout in ("LBHNC", "BHLNC", "BLNHC")),
        template_row("BHLNC", 64, 8, options.times),
    ]
    lines = [
        [r.what, str(r.runs), f"{r.median_ms:.2f}", f"{r.worst_ms:.2f}", f"{r.bound_ms:g}",
         "holds" if r.holds else "FAILS"]
        for r in rows
    ]  # fmt: skip
    print(table(["", "runs", "median\nms", "worst\nms", "bound\nms", ""], lines))
    memory = [memory_row("LBHNC", 32_768), memory_row("LBHNC", 65_536)]
    lines = [
        [r.what, str(r.runs), f"{r.small_nbytes / 1e6:.2f}", f"{r.large_nbytes / 1e6:.2f}",
         f"{r.nbytes_per_run:.1f}", f"{r.bound_nbytes:g}", "holds" if r.holds else "FAILS"]
        for r in memory
    ]  # fmt: skip
    heads = [f"peak MB,\n{blocks} blocks" for blocks in CACHES]
    print(table(["", "runs", *heads, "bytes\na run", "bound", ""], lines))
    if options.json is not None:
        document = {
            "caches": CACHES,
            "rows": [asdict(row) for row in rows],
            "memory": [asdict(row) for row in memory],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    holds = all(row.holds for row in rows) and all(row.holds for row in memory)
    return 1 if options.check and not holds else 0


if __name__ == "__main__":
    sys.exit(main())
