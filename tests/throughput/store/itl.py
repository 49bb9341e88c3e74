"""Effect of saving on running requests: the time from one of their tokens to the next.

    python -m tests.throughput.store.itl --json store_itl.json

Two real engines, alike but for a store, asked in turns within one run: a few requests stream
while new prompts arrive at a steady rate, each for one token.  The engine with a store saves
every row of these prompts.  Intervals are those that clients see; passes over the new prompts are
in both, so the ratio of the engines is the effect of saving.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.model import HANDOVER, write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from pdconn.tools.output.table import table
from tests.throughput.itl.phases import stream
from tests.vllm.engines.engines import transfer_config
from tests.vllm.engines.store.stores import rows

_LEAD = 8
"""Tokens of a stream that do not count."""


@dataclass(frozen=True)
class Round:
    """Intervals of one phase of each engine, in milliseconds, and their ratio."""

    saving_p50: float
    off_p50: float
    saving_p99: float
    off_p99: float
    rows_saved: int

    @property
    def ratios(self) -> tuple[float, float]:
        """Saving / off, of p50 and p99."""
        return self.saving_p50 / self.off_p50, self.saving_p99 / self.off_p99


def _spec(name: str, model: Path, store: dict[str, object] | None) -> EngineSpec:
    port, side = free_ports(2)
    extra = {} if store is None else {"store": store}
    return EngineSpec(
        name=name,
        model=model,
        port=port,
        side_channel_port=side,
        kv_transfer_config=transfer_config("kv_both", **extra),
        cpus=(0,),
        kv_cache_mib=512,
        max_model_len=4096,
        layout="BHLNC",
    )


def phase(engine: Engine, options: argparse.Namespace, seed: int) -> list[float]:
    """Intervals of the streams in ms while prompts arrive."""
    client = Client(engine.url)
    streams = make_prompts([32] * options.streams, seed=seed)
    prompts = make_prompts([options.prompt] * 200, seed=seed + 1)
    over = threading.Event()

    def arrive() -> None:
        for prompt in prompts:
            if over.wait(1 / options.rate):
                return
            client.complete(prompt, 1)

    with ThreadPoolExecutor(options.streams + 1) as pool:
        came = [pool.submit(stream, engine, prompt, options.tokens) for prompt in streams]
        pacing = pool.submit(arrive)
        times = [each.result() for each in came]
        over.set()
        pacing.result()
    began, ended = max(t[_LEAD] for t in times), min(t[-_LEAD] for t in times)
    return [
        (b - a) * 1e3 for t in times for a, b in itertools.pairwise(t) if began < a and b < ended
    ]


def measure(options: argparse.Namespace, work: Path) -> list[Round]:
    """Both engines in turns, in changing order."""
    model, root = write_model(work, HANDOVER), work / "root"
    specs = [
        _spec("saving", model, {"root": str(root), "capacity": "4GiB"}),
        _spec("off", model, None),
    ]
    found = []
    with running(specs, work, cache=work / "cache") as engines:
        for engine in engines:
            Client(engine.url).complete((5, 6, 7), 1)
        for number in range(options.rounds):
            before = len(rows(root, "fa")) + len(rows(root, "wa"))
            seen: dict[str, list[float]] = {}
            for engine in engines if number % 2 else engines[::-1]:
                seen[engine.spec.name] = phase(engine, options, 1000 + 10 * number)
                time.sleep(1.0)
            saved = len(rows(root, "fa")) + len(rows(root, "wa")) - before
            saving, off = seen["saving"], seen["off"]
            found.append(
                Round(*_quantiles(saving, off, 50), *_quantiles(saving, off, 99), saved)
            )  # fmt: skip
    return found


def _quantiles(saving: Sequence[float], off: Sequence[float], percent: int) -> tuple[float, float]:
    cuts = [statistics.quantiles(each, n=100)[percent - 1] for each in (saving, off)]
    return cuts[0], cuts[1]


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1200, help="of each stream")
    parser.add_argument("--prompt", type=int, default=800, help="tokens of each new prompt")
    parser.add_argument("--rate", type=float, default=2.0, help="new prompts a second")
    parser.add_argument("--json", type=Path, help="write the rounds there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = measure(options, Path(work))
    heads = [
        "saving\np50 ms",
        "off\np50 ms",
        "ratio",
        "saving\np99 ms",
        "off\np99 ms",
        "ratio",
        "rows",
    ]
    body = [
        [
            f"{each.saving_p50:.2f}", f"{each.off_p50:.2f}", f"{each.ratios[0]:.2f}",
            f"{each.saving_p99:.2f}", f"{each.off_p99:.2f}", f"{each.ratios[1]:.2f}",
            str(each.rows_saved),
        ]
        for each in found
    ]  # fmt: skip
    print(table(heads, body))
    medians = [statistics.median(each.ratios[at] for each in found) for at in (0, 1)]
    print(f"median of the ratios: p50 {medians[0]:.2f}, p99 {medians[1]:.2f}")
    if options.json:
        options.json.write_text(
            json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
