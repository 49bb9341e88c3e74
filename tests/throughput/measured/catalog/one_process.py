"""Benchmarks of work that one process does alone: planning, checksums."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import Benchmark, Command, Table

PLANNING = Benchmark(
    "planning",
    "How long does decode plan a pull, and prepare a peer's template?",
    "Gemma 3 27B's shape, random blocks of 16 tokens. LBHNC is layer-outermost, the other "
    "layouts are cross-layer. A template is made once per peer.",
    (Command("planning", "python -m tests.throughput.planning"),),
    0.5,
    (
        Table(
            ("planning",),
            "rows",
            {"": "{what:s}", "runs": "{runs}", "median, ms": "{median_ms:3}",
             "worst, ms": "{worst_ms:3}"},
        ),
        Table(
            ("planning",),
            "memory",
            {"": "{what:s}", "runs": "{runs}",
             "peak MB, cache of {caches[0]} blocks": "{small_nbytes:MB3}",
             "peak MB, cache of {caches[1]} blocks": "{large_nbytes:MB3}"},
        ),
    ),
    packages=("numpy",),
)  # fmt: skip

CHECKSUMS = Benchmark(
    "checksums",
    "How fast does one core gather and hash KV for `verify`?",
    "256 MiB of KV in this process, by memory order and block size; GB/s at prefill (lender) "
    "and at decode (reader). BLNHC keeps tokens before heads.",
    (Command("checksums", "python -m tests.throughput.checksums"),),
    0.5,
    (
        Table(
            ("checksums",),
            "rows",
            {"`verify`": "`{verify:s}`", "layout": "{layout:s}",
             "tokens a block": "{block_tokens}", "prefill, GB/s": "{lender_gbps:2}",
             "decode, GB/s": "{reader_gbps:2}"},
        ),
    ),
    packages=("numpy",),
)  # fmt: skip
