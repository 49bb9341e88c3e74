"""Benchmarks of work that one process does alone: planning, checksums, encryption."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import Benchmark, Command, Table, package

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

ENCRYPTION = Benchmark(
    "encryption",
    "How fast does a rank load rows of a store that are encrypted?",
    "Two prompts at a time, 256 MiB of KV in host memory, blocks of 16 tokens; rows of a file "
    "shelf, plain and encrypted in turns, medians of 10 rounds and of the rounds' ratios. Warm: in "
    "the page cache; cold: not. A slab, which is encrypted at once, is a head of a layer.",
    (Command("encryption", "python -m tests.throughput.store.encryption"),),
    2,
    (
        Table(
            ("encryption",),
            "rows",
            {"model": "{model:s}", "KiB a slab": "{slab_nbytes:KiB3}", "": "{what:s}",
             "threads": "{threads}", "plain, GB/s": "{plain_gb_s:3}",
             "encrypted, GB/s": "{encrypted_gb_s:3}", "ratio": "**{ratio:.2f}**"},
        ),
    ),
    packages=("numpy", "cryptography"),
    needs=(package("cryptography"),),
)  # fmt: skip
