"""Time to the first token of a stored prefix beside that of a computed one, by length.

    python -m tests.throughput.store.first_token --json first_token.json

One real engine without a prefix cache of its own, and a store.  Each round asks new prompts of
every length, once (computed, and saved), and again when their rows are committed (loaded), so
that both are measured in turns on the same machine.  Answers are compared.  The shortest length
at which loading is faster tells what ``min_tokens`` should be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.engine import running
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.model import HANDOVER, write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from pdconn.tools.output.table import table
from tests.vllm.engines.engines import transfer_config
from tests.vllm.engines.store.stores import hit_tokens, rows, wait_for_rows

LENGTHS = (300, 600, 900, 1200, 1600, 2000, 2500, 3000, 3500)
BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Row:
    """One length; medians over the rounds, in milliseconds."""

    tokens: int
    stored_ms: float
    computed_ms: float
    ratio: float
    loaded_tokens: int
    wrong: int


def measure(rounds: int, root: Path, work: Path) -> list[Row]:
    """Ask every length ``rounds`` times."""
    model = write_model(work, HANDOVER)
    (port,) = free_ports(1)
    store = {"root": str(root), "capacity": "8GiB", "min_tokens": 1, "block_tokens": BLOCK_TOKENS}
    spec = EngineSpec(
        name="engine",
        model=model,
        port=port,
        side_channel_port=free_ports(1)[0],
        kv_transfer_config=transfer_config("kv_both", store=store),
        one_process=False,
        cpus=(0,),
        kv_cache_mib=1024,
        max_model_len=4096,
        layout="BHLNC",
    )
    seen: dict[int, list[tuple[float, float, int, bool]]] = {length: [] for length in LENGTHS}
    with running([spec], work, cache=work / "cache") as (engine,):
        client = Client(engine.url)
        client.complete((5, 6, 7), 1)
        for number in range(rounds):
            prompts = make_prompts(list(LENGTHS), seed=500 + number)
            computed = [_timed(client, prompt) for prompt in prompts]
            more = sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)
            wait_for_rows(root, (number + 1) * more)
            assert rows(root, "wa"), "no window was saved"
            for prompt, (first_s, answer) in zip(prompts, computed, strict=True):
                before = hit_tokens(client)
                again_s, second = _timed(client, prompt)
                loaded = hit_tokens(client) - before
                is_wrong = compare(answer, second) is not None
                seen[len(prompt)].append((again_s, first_s, loaded, is_wrong))
    return [_row(length, found) for length, found in seen.items()]


def _timed(client: Client, prompt: tuple[int, ...]):  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    answer = client.complete(prompt, 1)
    return time.perf_counter() - began, answer


def _row(length: int, found: list[tuple[float, float, int, bool]]) -> Row:
    stored = statistics.median(each[0] for each in found) * 1e3
    computed = statistics.median(each[1] for each in found) * 1e3
    loaded = int(statistics.median(each[2] for each in found))
    wrong = sum(each[3] for each in found)
    return Row(length, stored, computed, stored / computed, loaded, wrong)


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="the store's root; a temporary one by default")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(options.rounds, options.root or Path(work, "root"), Path(work))
    heads = ["tokens", "stored ms", "computed ms", "ratio", "loaded", "wrong"]
    print(
        table(
            heads,
            [
                [
                    str(row.tokens), f"{row.stored_ms:.0f}", f"{row.computed_ms:.0f}",
                    f"{row.ratio:.2f}", str(row.loaded_tokens), str(row.wrong),
                ]
                for row in found
            ],
        )
    )  # fmt: skip
    if options.json:
        options.json.write_text(
            json.dumps([asdict(row) for row in found], indent=1), encoding="utf-8"
        )
    return int(any(row.wrong for row in found))


if __name__ == "__main__":
    sys.exit(main())
