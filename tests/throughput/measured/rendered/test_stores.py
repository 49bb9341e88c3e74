"""Measured tables of the stores, from a small result to the Markdown, by hand."""

from __future__ import annotations

from tests.throughput.measured.rendered.made import lines, made


def test_compression() -> None:
    cell = {
        "least_ratio": 1.4529, "most_ratio": 1.46, "compress_gbps": 0.59, "decompress_gbps": 1.54,
        "codec_compress_gbps": 0.671, "codec_decompress_gbps": 2.47, "misses": "speed",
    }  # fmt: skip
    alone = {
        "least_ratio": 1.31, "most_ratio": 1.33, "compress_gbps": 2.02, "decompress_gbps": 6.37,
        "codec_compress_gbps": None, "codec_decompress_gbps": None, "misses": "nothing",
    }  # fmt: skip
    result = {
        "rows": [
            {"dtype": "bf16", "arrangement": "planes", "zstd_1": cell, "zstd_3": cell,
             "lz4": cell, "none": None},
            {"dtype": "bf16", "arrangement": "exponents in 4 bits", "zstd_1": None,
             "zstd_3": None, "lz4": None, "none": alone},
        ],
        "models": [{"model": "SmolLM2 135M", "weights": "Q4_1", "dtype": "bf16", "nbytes": 1966080,
                    "perplexity": 12.41, "exponent": 8, "entropy": 2.449, "limit": 1.531}],
    }  # fmt: skip
    same = "1.45; 0.59, 1.5; 0.67, 2.5"
    assert made("compression", compression=result) == lines(
        f"""
        | dtype | arrangement | zstd 1 | zstd 3 | lz4 | no codec |
        | --- | --- | --- | --- | --- | --- |
        | bf16 | planes | {same} | {same} | {same} | |
        | bf16 | exponents in 4 bits | | | | 1.31; 2.0, 6.4 |

        | model | weights | dtype | perplexity | exponent, bits | entropy, bits | ratio at most |
        | --- | --- | --- | --- | --- | --- | --- |
        | SmolLM2 135M | Q4_1 | bf16 | 12.4 | 8 | 2.45 | 1.53 |
        """
    )


def test_compressed() -> None:
    rows = [
        {"model": "small", "store_gb_s": gb_s, "size": 1.273, "load_plain_gb_s": 0.241,
         "load_compressed_gb_s": 0.302, "load_ratio": 1.253, "save_plain_gb_s": 1.125,
         "save_compressed_gb_s": 0.75, "save_ratio": 0.666}
        for gb_s in (0.25, None)
    ]  # fmt: skip
    rest = "1.27 × | 0.24 | 0.30 | **1.25** | 1.1 | 0.75 | **0.67** |"
    heads = (
        "| model | store, GB/s | bytes | load, plain | compressed | ratio | save, plain "
        "| save, compressed | ratio of saves |"
    )
    assert made("compressed", compressed={"rows": rows}) == lines(
        f"""
        {heads}
        | --- | --- | --- | --- | --- | --- | --- | --- | --- |
        | small | 0.25 | {rest}
        | small | | {rest}
        """
    )


def test_saves_beside_pulls() -> None:
    rows = [
        {"what": what, "pulls": 9, "p50_s": p50, "p99_s": 0.1234, "ratio": ratio,
         "saved_gb_s": rate}
        for what, p50, ratio, rate in (("alone", 0.002, 1.0, 0.0), ("beside", 0.003, 1.5, 0.456))
    ]  # fmt: skip
    assert made("saves_beside_pulls", saves_beside_pulls={"rows": rows}) == lines(
        """
        | pulls | p50, ms | p99, ms | p50 to alone | saved, GB/s |
        | --- | --- | --- | --- | --- |
        | alone | 2.00 | 123 | **1.00** | 0 |
        | beside | 3.00 | 123 | **1.50** | 0.46 |
        """
    )
