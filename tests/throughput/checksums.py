"""How fast KV in host memory is gathered and hashed, by layout and block size.

    python -m tests.throughput.checksums --json checksums.json

The shape is one KV cache group of a model with 8 KV heads of 128 numbers of bfloat16, K
and V fused.  Block ids are random.  All work is on one thread, and its CPU time is measured,
so that other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdconn.integrity.checks import Checks
from pdconn.integrity.lent import lent_sums
from pdconn.integrity.memory import HostMemory
from pdconn.integrity.sums import Terms
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.tools.output.table import table
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory

LAYERS, HEADS, TOKEN_NBYTES = 8, 8, 2 * 128 * 2


@dataclass(frozen=True)
class Row:
    """GB/s of the lender's sums and of the reader's, the answer, and the sums' size."""

    layout: str
    block_tokens: int
    verify: str
    lender_gbps: float
    reader_gbps: float
    lender_ms: float
    reader_ms: float
    answer_ms: float
    sums_mib_per_gib: float


def cache(layout: str, block_tokens: int, memory: NDArray[np.uint8]) -> KVCacheReferences:
    """References of a cache that fills ``memory``."""
    layers = layout_memory(
        layout,
        base=memory.ctypes.data,
        num_blocks=memory.nbytes // (LAYERS * HEADS * block_tokens * TOKEN_NBYTES),
        layers=[f"layers.{layer}" for layer in range(LAYERS)],
        num_heads=HEADS,
        block_tokens=block_tokens,
        token_nbytes=TOKEN_NBYTES,
    )
    return build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, block_tokens, layers)])


def timed(work: Callable[[], object], times: int) -> float:
    """Median CPU seconds of this thread over ``times`` runs, after a warm-up."""
    work()
    taken = []
    for _ in range(times):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


def measured(layout: str, block_tokens: int, sampled: bool, nbytes: int, times: int) -> Row:
    """One row: all blocks of a cache of ``nbytes`` bytes, in random order."""
    memory = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    references = cache(layout, block_tokens, memory)
    ids = np.random.default_rng(2).permutation(np.arange(1, references.num_blocks(0))).tolist()
    blocks = (BlockList(0, tuple(ids)),)
    terms = Terms("cmpl-1", len(ids) * block_tokens, sampled)
    read = HostMemory()
    lender_s = timed(lambda: lent_sums(read, references, blocks, terms), times)
    lent = lent_sums(read, references, blocks, terms)
    need = Need.for_range(0, terms.num_tokens, blocks)
    (expected,) = Checks.between(references, [references]).expect(need, terms)
    reader_s = timed(lambda: expected.ours(read), times)
    answer_s = timed(lambda: [lent.answer(ask) for ask in expected.asks], times)
    covered = expected.nbytes
    return Row(
        layout, block_tokens, "sample" if sampled else "always",
        covered / lender_s / 1e9, covered / reader_s / 1e9,
        1e3 * lender_s, 1e3 * reader_s, 1e3 * answer_s, 1024 * lent.nbytes / covered,
    )  # fmt: skip


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write all measurements")
    parser.add_argument("--times", type=int, default=5, help="runs of each (%(default)s)")
    parser.add_argument("--mib", type=int, default=256, help="size of the cache (%(default)s)")
    options = parser.parse_args()
    rows = [
        measured(layout, block_tokens, sampled, options.mib << 20, options.times)
        for sampled in (False, True)
        for layout in ("LBHNC", "BHLNC", "BLHNC", "BLNHC")
        for block_tokens in (16, 32)
    ]
    lines = [
        [r.layout, str(r.block_tokens), r.verify, f"{r.lender_gbps:.2f}", f"{r.reader_gbps:.2f}",
         f"{r.lender_ms:.1f}", f"{r.reader_ms:.1f}", f"{r.answer_ms:.2f}",
         f"{r.sums_mib_per_gib:.2f}"]
        for r in rows
    ]  # fmt: skip
    heads = ["layout", "block\ntokens", "verify", "lender\nGB/s", "reader\nGB/s", "lender\nms",
             "reader\nms", "answer\nms", "sums\nMiB per GiB"]  # fmt: skip
    print(table(heads, lines))
    if options.json is not None:
        document = {"mib": options.mib, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
