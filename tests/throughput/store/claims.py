"""What waiting for the claim costs a hand-over: decode with a store beside decode without one.

    python -m tests.throughput.store.claims --json claims.json

An engine with a store promises a ticket once every rank was granted its claim, at a later step
than the one in which the request arrived; one without promises it at once.  Each round lends a
prompt to each of the two and asks them in turns, at idle and while another request generates
tokens.  The store is read-only and empty: nothing but the waiting differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import running
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.model import HANDOVER, write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from pdconn.tools.output.table import table
from tests.vllm.engines.engines import transfer_config

TOKENS = 500
BUSY_TOKENS = 3000
_WARM_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """Medians over the rounds, in milliseconds; ``later`` of the differences within a round."""

    load: str
    rounds: int
    without_ms: float
    with_ms: float
    later_ms: float
    later_p90_ms: float
    step_ms: float


def measure(rounds: int, work: Path) -> list[Row]:
    """Ask at idle, then beside a request that generates."""
    model = write_model(work, HANDOVER)
    store = {"root": str(work / "root"), "capacity": "1GiB", "read_only": True}
    specs = [
        _spec("prefill", model, "kv_producer", 0),
        _spec("without", model, "kv_consumer", 1),
        _spec("with", model, "kv_consumer", 1, store=store),
    ]
    found = []
    with running(specs, work, cache=work / "cache") as (prefill, *decodes):
        lender = Client(prefill.url)
        readers = [Client(decode.url) for decode in decodes]
        _rounds(lender, readers, _WARM_ROUNDS, seed=1)
        found.append(_row("idle", _rounds(lender, readers, rounds, seed=1000), 0.0))
        with _generating(readers) as step_ms:
            found.append(_row("busy", _rounds(lender, readers, rounds, seed=5000), step_ms))
        for reader in readers:
            pulled = reader.metrics()["pdconn:pulls_total"]
            assert pulled == _WARM_ROUNDS + 2 * rounds, f"{pulled} pulls"
    return found


def _spec(name: str, model: Path, role: str, core: int, **extra: Any) -> EngineSpec:
    port, side = free_ports(2)
    return EngineSpec(
        name=name,
        model=model,
        port=port,
        side_channel_port=side if role == "kv_producer" else None,
        kv_transfer_config=transfer_config(role, **extra),
        one_process=False,
        cpus=(core,),
        kv_cache_mib=512,
        max_model_len=4096,
        layout="BHLNC",
    )


@contextmanager
def _generating(readers: list[Client]) -> Iterator[float]:
    """Both generate beside what is asked; the time of a step, from a short run before."""
    [prompt] = make_prompts([50], seed=9)
    with ThreadPoolExecutor(2) as pool:
        began = time.perf_counter()
        list(pool.map(lambda reader: reader.complete(prompt, 50), readers))
        step_ms = (time.perf_counter() - began) * 1e3 / 50
        running = [pool.submit(reader.complete, prompt, BUSY_TOKENS) for reader in readers]
        time.sleep(0.5)
        yield step_ms
        assert not any(each.done() for each in running), "they were not busy to the end"


def _rounds(
    lender: Client, readers: list[Client], rounds: int, seed: int
) -> list[tuple[float, float]]:
    """Seconds of each reader's first token, by round."""
    seen = []
    for number in range(rounds):
        prompts = make_prompts([TOKENS] * 2, seed=seed + number)
        order = (0, 1) if number % 2 else (1, 0)
        took = [0.0, 0.0]
        for at in order:
            ticket = prefill_only(lender, prompts[at])
            began = time.perf_counter()
            readers[at].complete(prompts[at], 1, kv_transfer_params=ticket)
            took[at] = time.perf_counter() - began
        seen.append((took[0], took[1]))
    return seen


def _row(load: str, seen: list[tuple[float, float]], step_ms: float) -> Row:
    later = sorted((with_s - without_s) * 1e3 for without_s, with_s in seen)
    return Row(
        load,
        len(seen),
        statistics.median(without_s for without_s, _ in seen) * 1e3,
        statistics.median(with_s for _, with_s in seen) * 1e3,
        statistics.median(later),
        later[len(later) * 9 // 10],
        step_ms,
    )


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(options.rounds, Path(work))
    heads = ["load", "rounds", "without ms", "with ms", "later ms", "later p90 ms", "step ms"]
    lines = [
        [each if isinstance(each, str) else f"{each:.4g}" for each in asdict(row).values()]
        for row in found
    ]
    print(table(heads, lines))
    if options.json:
        options.json.write_text(
            json.dumps([asdict(row) for row in found], indent=1), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
