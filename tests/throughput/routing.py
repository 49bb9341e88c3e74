"""Cost of routing: scoring a prompt over a fleet, and applying events.

    python -m tests.throughput.routing --json routing.json
    python -m tests.throughput.routing --check

Scores are timed with their index look-ups, beside a plain list scan (for each block the list
of its holders, as in published routers) without the cost of its look-ups.  Events are timed
from the index on, and from the bytes of a message on; prompts from their JSON to their hashes.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.chains import Chains
from pdconn.router.prefix.compiled import extension
from pdconn.router.prefix.groups import GroupSpec
from pdconn.router.prefix.hashing import HashScheme, read_token_ids
from pdconn.router.prefix.kv_events import decode_batch
from pdconn.router.prefix.score import Prompt, Scorer
from pdconn.tools.output.table import table
from tests.throughput.index.replay import resident_nbytes

WINDOW = 1024
PROMPT_TOKENS = 32_000
NOISE = 200_000
"""Other hashes in the index, for a realistic size."""


@dataclass(frozen=True)
class Row:
    """One measurement and the bound that we set us."""

    what: str
    ours: float
    scan: float | None
    unit: str
    bound: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.ours >= self.bound if self.at_least else self.ours <= self.bound


@dataclass(frozen=True)
class Fleet:
    """Pods that hold a prompt's blocks, ``share`` of them in the window group."""

    index: Index
    prompt: Prompt
    lists: dict[int, list[tuple[str, int]]]


def fleet(num_pods: int, num_blocks: int, block_tokens: int, window_held: bool) -> Fleet:
    """Every pod holds the whole prompt in group 0; group 1 has its window, or nothing."""
    rng = random.Random(num_blocks)
    hashes = [rng.randrange(2**64) for _ in range(num_blocks)]
    noise = [rng.randrange(2**64) for _ in range(NOISE)]
    index = Index()
    lists: dict[int, list[tuple[str, int]]] = {block: [] for block in hashes}
    for number in range(num_pods):
        name = f"pod{number}"
        index.add_pod(name)
        index.learn_group(name, 0, GroupSpec("full_attention", None, block_tokens))
        index.learn_group(name, 1, GroupSpec("sliding_window", WINDOW, block_tokens))
        index.store_blocks(name, 0, "gpu", noise[number::num_pods])
        index.store_blocks(name, 0, "gpu", hashes)
        for group in (0, 1) if window_held else (0,):
            if group:
                index.store_blocks(name, group, "gpu", hashes)
            for block in hashes:
                lists[block].append((name, group))
    prompt = Prompt(hashes, num_blocks * block_tokens + 1, block_tokens)
    return Fleet(index, prompt, lists)


def list_scan(world: Fleet, need: int) -> dict[str, int]:
    """Hits by walking each block's list of holders, window last."""
    hashes, lists = world.prompt.hashes, world.lists
    alive = {name for name, group in lists[hashes[0]] if group == 0}
    prefix = dict.fromkeys(alive, 0)
    for block in hashes:
        alive &= {name for name, group in lists[block] if group == 0}
        for name in alive:
            prefix[name] += 1
    hits = {}
    for name, longest in prefix.items():
        run = 0
        for i in range(longest - 1, -1, -1):
            run = run + 1 if (name, 1) in lists[hashes[i]] else 0
            if run >= need:
                hits[name] = i + run
                break
        else:
            hits[name] = run
    return hits


def timed(act: Callable[[], object], rounds: int) -> float:
    """Median seconds of one call."""
    took = []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    gc.enable()
    return statistics.median(took)


def score_row(
    what: str, size: tuple[int, int, int], window_held: bool, bound_us: float, rounds: int
) -> Row:
    num_pods, num_blocks, block_tokens = size
    world = fleet(num_pods, num_blocks, block_tokens, window_held)
    scorer = Scorer(world.index)
    need = -(-(WINDOW - 1) // block_tokens)
    hits = {name: hit.blocks for name, hit in scorer.score(world.prompt).items()}
    assert hits == list_scan(world, need), "the scan and the scorer disagree"
    ours = timed(lambda: scorer.score(world.prompt), rounds) * 1e6
    scan = timed(lambda: list_scan(world, need), 3) * 1e6
    return Row(what, ours, scan, "us", bound_us)


def linear_row(rounds: int) -> Row:
    """Four times the blocks take at most about four times as long."""
    took = []
    for num_blocks in (1000, 4000):
        world = fleet(32, num_blocks, 16, True)
        scorer = Scorer(world.index)
        took.append(timed(lambda s=scorer, w=world: s.score(w.prompt), rounds))  # type: ignore[misc]
    return Row("4000 blocks beside 1000", took[1] / took[0], None, "times", 5.0)


def event_rows() -> list[Row]:
    rng = random.Random(5)
    hashes = [rng.randrange(2**64) for _ in range(200_000)]
    chunks = [hashes[i : i + 64] for i in range(0, len(hashes), 64)]
    singles = [[block] for block in hashes[:50_000]]
    rows = []
    index = Index()

    def stores() -> None:
        for chunk in chunks:
            index.store_blocks("a", 0, "gpu", chunk)

    def removals() -> None:
        for block in hashes:
            index.remove_blocks("a", 0, "gpu", [block])

    began = time.perf_counter()
    stores()
    stored = time.perf_counter()
    removals()
    removed = time.perf_counter()
    assert index.num_hashes == 0
    rows.append(_rate("stores of 64 blocks", len(hashes), stored - began))
    rows.append(_rate("removals of one block", len(hashes), removed - stored))
    rows.append(_rate("stores of 64 blocks, from bytes", len(hashes), _from_bytes(chunks)))
    rows.append(
        _rate("stores of one block, from bytes", 50_000, _from_bytes(singles), at_least=50.0)
    )
    return rows


def _from_bytes(chunks: Sequence[Sequence[int]]) -> float:
    """Seconds to decode and apply a batch of eight stores at a time, with 16 tokens a block."""
    payloads = []
    for first in range(0, len(chunks), 8):
        events = [
            {
                "type": "BlockStored",
                "block_hashes": list(chunk),
                "parent_block_hash": None,
                "token_ids": list(range(16 * len(chunk))),
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
            for chunk in chunks[first : first + 8]
        ]
        payloads.append(msgspec.msgpack.encode([1.0, events, 0]))
    index = Index()
    began = time.perf_counter()
    for payload in payloads:
        for event in decode_batch(payload).events:
            index.apply_event("a", event)
    took = time.perf_counter() - began
    assert index.num_hashes == sum(map(len, chunks))
    return took


def _rate(what: str, blocks: int, took_s: float, at_least: float = 200.0) -> Row:
    return Row(what, blocks / took_s / 1000, None, "k blocks/s", at_least, at_least=True)


def hash_nbytes(num_hashes: int) -> float:
    """Bytes of the index for one more hash, held by one pod in two groups; in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_grown_nbytes, num_hashes).result() / num_hashes


def _grown_nbytes(num_hashes: int) -> int:
    """Resident memory that an index of so many hashes takes."""
    rng = random.Random(3)
    batches = [array("Q", rng.randbytes(8 * 500)) for _ in range(num_hashes // 500)]
    index = Index()
    before = resident_nbytes()
    for group in (0, 1):
        for batch in batches:
            index.store_blocks("a", group, "gpu", batch)
    assert index.num_hashes == num_hashes
    return resident_nbytes() - before


def prompt_rows(rounds: int) -> list[Row]:
    """From token ids in JSON to the hashes of their blocks, half of which are new."""
    rng = random.Random(7)
    ids = [rng.randrange(50_000) for _ in range(PROMPT_TOKENS)]
    known = ids[: PROMPT_TOKENS // 2]
    rows, module = [], extension.module
    for where, serves, bound_us in (("", module, 3000.0), (", in Python", None, 20_000.0)):
        chains = Chains(HashScheme("sha256", 16), max_tokens=4 * PROMPT_TOKENS)
        chains.hashes_of(ids)
        prompts = iter(
            [
                msgspec.json.encode(known + [rng.randrange(50_000) for _ in known])
                for _ in range(rounds)
            ]
        )
        try:
            extension.module = serves
            took_s = timed(lambda: chains.hashes_of(read_token_ids(next(prompts))), rounds)  # noqa: B023
        finally:
            extension.module = module
        what = f"prompt of {PROMPT_TOKENS} token ids, half of it new{where}"
        rows.append(Row(what, took_s * 1e6, None, "us", bound_us))
    return rows


def measure(rounds: int) -> list[Row]:
    """Every row."""
    small, large = (32, 512, 16), (96, 3750, 64)
    return [
        score_row("32 pods, 512 blocks of 16: full hit", small, True, 300, rounds),
        score_row("32 pods, 512 blocks of 16: no window", small, False, 300, rounds),
        score_row("96 pods, 3750 blocks of 64: full hit", large, True, 2000, rounds),
        score_row("96 pods, 3750 blocks of 64: no window", large, False, 2000, rounds),
        linear_row(rounds),
        *prompt_rows(rounds),
        *event_rows(),
        Row("memory of one hash", hash_nbytes(1_000_000), None, "bytes", 250.0),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; with ``--check`` 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--check", action="store_true", help="1 when a bound is missed")
    args = parser.parse_args(argv)
    rows = measure(args.rounds)
    headings = ["what", "ours", "list scan", "unit", "bound", "holds"]
    cells = [
        [
            row.what,
            f"{row.ours:.4g}",
            "" if row.scan is None else f"{row.scan:.0f}",
            row.unit,
            f"{'>=' if row.at_least else '<='} {row.bound:g}",
            "yes" if row.holds else "NO",
        ]
        for row in rows
    ]
    print(table(headings, cells))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 1 if args.check and not all(row.holds for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
