"""Measured tables of one process's work, from a small result to the Markdown, by hand."""

from __future__ import annotations

from tests.throughput.measured.rendered.made import lines, made


def test_planning() -> None:
    planning = {
        "caches": [8192, 1 << 20],
        "rows": [{"what": "plan of 131072 tokens", "runs": 85238, "median_ms": 7.436,
                  "worst_ms": 12.1}],
        "memory": [{"what": "plan", "runs": 9, "small_nbytes": 1_390_000,
                    "large_nbytes": 1_400_000}],
    }  # fmt: skip
    assert made("planning", planning=planning) == lines(
        """
        | | runs | median, ms | worst, ms |
        | --- | --- | --- | --- |
        | plan of 131072 tokens | 85 238 | 7.44 | 12.1 |

        | | runs | peak MB, cache of 8 192 blocks | peak MB, cache of 1 048 576 blocks |
        | --- | --- | --- | --- |
        | plan | 9 | 1.39 | 1.40 |
        """
    )


def test_checksums() -> None:
    rows = [
        {"layout": layout, "block_tokens": 16, "verify": verify, "lender_gbps": lender,
         "reader_gbps": 2 * lender}
        for verify, layout, lender in (
            ("always", "LBHNC", 5.46), ("always", "BLNHC", 1.7), ("sample", "BLNHC", 3.2),
        )
    ]  # fmt: skip
    assert made("checksums", checksums={"rows": rows}) == lines(
        """
        | `verify` | layout | tokens a block | prefill, GB/s | decode, GB/s |
        | --- | --- | --- | --- | --- |
        | `always` | LBHNC | 16 | 5.5 | 11 |
        | `always` | BLNHC | 16 | 1.7 | 3.4 |
        | `sample` | BLNHC | 16 | 3.2 | 6.4 |
        """
    )


def test_encryption() -> None:
    rows = [
        {"model": "small", "what": what, "threads": threads, "row_nbytes": 1 << 20,
         "slab_nbytes": 65536, "plain_gb_s": 4.0, "encrypted_gb_s": 3.125, "ratio": ratio}
        for what, threads, ratio in (("load, warm", 2, 0.777), ("save", 1, 0.5))
    ]  # fmt: skip
    assert made("encryption", encryption={"rows": rows}) == lines(
        """
        | model | KiB a slab | | threads | plain, GB/s | encrypted, GB/s | ratio |
        | --- | --- | --- | --- | --- | --- | --- |
        | small | 64.0 | load, warm | 2 | 4.00 | 3.12 | **0.78** |
        | small | 64.0 | save | 1 | 4.00 | 3.12 | **0.50** |
        """
    )
