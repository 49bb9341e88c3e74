"""How fast a rank loads rows that are encrypted, beside the same rows as they are.

    python -m tests.throughput.store.encryption --json encryption.json

A rank with its own threads loads two prompts at a time: it opens, reads and verifies (or decrypts,
which verifies) their rows, and copies them to KV blocks of 16 tokens in host memory.  One thread or
two read, plain and encrypted rows in turns within each round; what is compared is a round's ratio.
Cold: dropped from the page cache before.  Warm: read just before.  Saved are the rows of a prompt,
by the rank's one writer: gathered, hashed (and encrypted), written to the page cache.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.throughput.store.loaders import (
    HEADS,
    PROMPTS,
    ROW_TOKENS,
    SHAPES,
    Loader,
    median_ratio,
    references_of,
    run_models,
)

THREADS = (1, 2)


@dataclass(frozen=True)
class Rate:
    """Medians over the rounds, GB/s; ``ratio`` is that of the rounds' ratios."""

    model: str
    what: str
    threads: int
    row_nbytes: int
    slab_nbytes: int
    plain_gb_s: float
    encrypted_gb_s: float
    ratio: float


def measure(model: str, rounds: int, mib: int, root: Path) -> list[Rate]:
    """Plain and encrypted in turns, in changing order."""
    layers, token_nbytes = SHAPES[model]
    row_nbytes = layers * HEADS * ROW_TOKENS * token_nbytes
    rows = max(1, (mib << 20) // (PROMPTS * row_nbytes))
    references, memory = references_of(layers, token_nbytes, rows)
    key_file = root / "keys"
    key_file.write_text(f"names {secrets.token_hex(32)}\nkey {secrets.token_hex(32)}\n", "utf-8")
    key_file.chmod(0o600)
    loaders = {
        "plain": Loader(root / "plain", references, rows),
        "encrypted": Loader(root / "encrypted", references, rows, key_file=str(key_file)),
    }
    os.sync()
    rates: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    order = list(loaders)
    for threads in THREADS:
        for loader in loaders.values():
            loader.use_threads(threads)
        for _, pages in product(range(rounds), ("warm", "cold")):
            for which in order:
                loader = loaders[which]
                loader.prepare_pages(pages)
                rate = PROMPTS * loader.nbytes / loader.load() / 1e9
                rates[f"load, {pages}", threads, which].append(rate)
            order = order[::-1]
    for _ in range(rounds):
        for which in order:
            loader = loaders[which]
            rates["save", 1, which].append(loader.nbytes / loader.save(0) / 1e9)
        order = order[::-1]
    for loader in loaders.values():
        loader.close()
    del memory
    slab_nbytes = ROW_TOKENS * token_nbytes
    return [
        Rate(
            model, what, threads, row_nbytes, slab_nbytes, statistics.median(plain),
            statistics.median(rates[what, threads, "encrypted"]),
            median_ratio(rates[what, threads, "encrypted"], plain),
        )
        for (what, threads, which), plain in sorted(rates.items())
        if which == "plain"
    ]  # fmt: skip


CELLS: dict[str, Callable[[Rate], str]] = {
    "model": lambda rate: rate.model,
    "what": lambda rate: rate.what,
    "threads": lambda rate: str(rate.threads),
    "plain\nGB/s": lambda rate: f"{rate.plain_gb_s:.2f}",
    "encrypted\nGB/s": lambda rate: f"{rate.encrypted_gb_s:.2f}",
    "ratio": lambda rate: f"{rate.ratio:.2f}",
}


if __name__ == "__main__":
    sys.exit(run_models(__doc__ or "", measure, CELLS, rounds=10, mib=256))
