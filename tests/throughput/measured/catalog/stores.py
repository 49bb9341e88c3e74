"""Benchmarks of what stores cost the pulls beside them, and of rows in fewer bytes."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import Benchmark, Command, Table, package


def _cell(codec: str) -> str:
    """Ratio; GB/s in and out; the same of the codec alone."""
    whole = f"{{{codec}.compress_gbps:2}}, {{{codec}.decompress_gbps:2}}"
    alone = f"{{{codec}.codec_compress_gbps:2}}, {{{codec}.codec_decompress_gbps:2}}"
    return f"{{{codec}.least_ratio:.2f}}; {whole}; {alone}"


SAVES_BESIDE_PULLS = Benchmark(
    "saves_beside_pulls",
    "What do saves to files cost the pulls beside them?",
    "gpt-oss-20b's shape, 8,192 tokens through shared memory, from the first call to the report; a "
    "rank in the puller's process saves rows of 9 MiB to files meanwhile, in chunks of 4 MiB. "
    "Between two pulls it saves for as long as the last one took. 12 rounds of 25 pulls of each, "
    "in turns; the ratio is the median of the rounds' ratios of medians.",
    (Command("saves_beside_pulls", "python -m tests.throughput.store.saves_beside_pulls"),),
    2,
    (
        Table(
            ("saves_beside_pulls",),
            "rows",
            {"pulls": "{what:s}", "p50, ms": "{p50_s:ms3}", "p99, ms": "{p99_s:ms3}",
             "p50 to alone": "**{ratio:.2f}**", "saved, GB/s": "{saved_gb_s:2}"},
        ),
    ),
    packages=("numpy", "nixl"),
    needs=(package("nixl"),),
)  # fmt: skip

COMPRESSION = Benchmark(
    "compression",
    "What does lossless compression give on rows of real models, and how fast is a core?",
    "KV of three models whose weights packages carry (quantised files, made into bfloat16 and "
    "float32 again), four prompts of 2048 tokens (licences, descriptions of packages, Python "
    "sources, a chat), 8 rows each; float8 is cast from bfloat16 without a scale. Compressed at "
    "once: one head's part of a row. A cell is the least ratio of all prompts; median GB/s "
    "compressing and decompressing, numpy's arranging included; the same of the codec alone. "
    "CPU time of one thread; bytes before compression.",
    (Command("compression", "python -m tests.throughput.compression"),),
    12,
    (
        Table(
            ("compression",),
            "rows",
            {"dtype": "{dtype:s}", "arrangement": "{arrangement:s}", "zstd 1": _cell("zstd_1"),
             "zstd 3": _cell("zstd_3"), "lz4": _cell("lz4"),
             "no codec": "{none.least_ratio:.2f}; {none.compress_gbps:2}, "
             "{none.decompress_gbps:2}"},
        ),
        Table(
            ("compression",),
            "models",
            {"model": "{model:s}", "weights": "{weights:s}", "dtype": "{dtype:s}",
             "perplexity": "{perplexity:3}", "exponent, bits": "{exponent}",
             "entropy, bits": "{entropy:3}", "ratio at most": "{limit:3}"},
        ),
    ),
    drop=frozenset({"samples"}),
    packages=("numpy", "torch", "transformers", "zstandard", "lz4"),
    needs=tuple(package(name) for name in ("zstandard", "lz4", "gguf", "accelerate")),
)  # fmt: skip

COMPRESSED = Benchmark(
    "compressed",
    "From which store on do compressed rows pay?",
    "Two prompts at a time are loaded by two threads, 128 MiB of KV in host memory, normally "
    "distributed bfloat16; one is saved by one thread. Rows are plain and compressed in turns, "
    "medians of 8 rounds and of the rounds' ratios; GB/s of KV. A store of a bandwidth is the page "
    "cache behind a shelf that holds every read and write back to that rate.",
    (Command("compressed", "python -m tests.throughput.store.compressed --root /dev/shm"),),
    4,
    (
        Table(
            ("compressed",),
            "rows",
            {"model": "{model:s}", "store, GB/s": "{store_gb_s:2}", "bytes": "{size:.2f} ×",
             "load, plain": "{load_plain_gb_s:2}", "compressed": "{load_compressed_gb_s:2}",
             "ratio": "**{load_ratio:.2f}**", "save, plain": "{save_plain_gb_s:2}",
             "save, compressed": "{save_compressed_gb_s:2}",
             "ratio of saves": "**{save_ratio:.2f}**"},
        ),
    ),
    packages=("numpy",),
)  # fmt: skip
