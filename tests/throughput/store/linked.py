"""What a hand-over takes over a slow link, of which decode's store has a share of the prompt.

    python -m tests.throughput.store.linked --mbits 200 --json linked.json

Prefill and decode are in a network namespace of their own, and the cable to decode lets no more
than this pass in a second; that needs root, ``ip`` and ``tc``.  In each round decode computes the
beginning of a fresh prompt for each share, which its store keeps, and then each prompt is handed
over, in another order from round to round.  Decode has no prefix cache, and the store its default
settings.  A share of 0 is the ticket alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.engine import running
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.model import write_model
from pdconn.tools.output.table import table
from tests.multinode.namespaces import Network
from tests.throughput.followed.__main__ import LONG
from tests.throughput.followed.links import ADDRESSES, TBF, linked_specs

SHARES = (0.0, 0.25, 0.5, 0.9)
ROW_TOKENS = 256
ANSWER_TOKENS = 4
_BYTES, _LOADED = "vllm:nixl_bytes_transferred_sum", "pdconn:store_beside_tokens_total"
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Row:
    """Medians of a share: seconds, and bytes pulled; ``of_alone``: of the time without a store."""

    share: float
    rounds: int
    first_token_s: float
    of_alone: float
    nbytes: float
    tokens_loaded: float


def measure(options: argparse.Namespace, work: Path) -> tuple[list[Row], list[str]]:
    """Hand prompts over; rows, and what was wrong."""
    seen: dict[float, list[tuple[float, float, float]]] = {share: [] for share in SHARES}
    wrong: list[str] = []
    model = write_model(work, LONG)
    with ExitStack() as stack:
        network = stack.enter_context(Network(ADDRESSES))
        network.narrow("decode", round(options.mbits * 125_000), **TBF)
        stack.enter_context(network["client"].inside())
        specs = linked_specs(network, model)
        sizes = {"max_model_len": options.tokens + 64, "kv_cache_mib": 640}
        specs = [replace(one, **sizes, one_process=True, prefix_caching=False) for one in specs]
        transfer: dict[str, Any] = dict(specs[1].kv_transfer_config or {})
        store = {"root": str(work / "root"), "capacity": "4GiB"}
        extra = {**transfer["kv_connector_extra_config"], "store": store}
        transfer["kv_connector_extra_config"] = extra
        specs[1] = replace(specs[1], kv_transfer_config=transfer)
        started = stack.enter_context(running(specs, work / "run", timeout_s=900))
        prefill, decode = (Client(engine.url, 120.0) for engine in started)
        for number in range(-1, options.rounds):
            prompts = make_prompts([options.tokens] * len(SHARES), seed=100 + number)
            order = list(zip(SHARES, prompts, strict=True))
            for share, prompt in order if number % 2 else order[::-1]:
                took, problem = _hand_over(prefill, decode, prompt, share, work / "root")
                if number >= 0:
                    seen[share].append(took)
                wrong += [problem] if problem else []
                print(f"round {number}, {share:.0%}: {took}", file=sys.stderr)
    alone = statistics.median(first for first, _, _ in seen[0.0])
    rows = []
    for share, taken in seen.items():
        first, nbytes, loaded = (statistics.median(column) for column in zip(*taken, strict=True))
        rows.append(Row(share, len(taken), first, first / alone, nbytes, loaded))
    return rows, wrong


def _hand_over(
    prefill: Client, decode: Client, prompt: Sequence[int], share: float, root: Path
) -> tuple[tuple[float, float, float], str]:
    count = int(share * len(prompt)) // ROW_TOKENS
    if count:
        saved = len(list(root.glob("rows/*/fa/*/*")))
        decode.complete(prompt[: count * ROW_TOKENS + 1], 1)
        give_up = time.monotonic() + _PATIENCE_S
        while len(list(root.glob("rows/*/fa/*/*"))) < saved + count:
            assert time.monotonic() < give_up, "its rows are not saved"
            time.sleep(0.05)
    before = _counts(decode)
    ticket = prefill_only(prefill, prompt)
    timed = decode.stream(prompt, ANSWER_TOKENS, kv_transfer_params=ticket)
    after = _counts(decode)
    nbytes, loaded = (after[name] - before[name] for name in (_BYTES, _LOADED))
    difference = compare(prefill.complete(prompt, ANSWER_TOKENS), timed.answer)
    problem = "" if difference is None else f"{share:.0%}: {difference}"
    return (timed.first_token_s, nbytes, loaded), problem


def _counts(decode: Client) -> dict[str, float]:
    decode.complete((4, 5, 6), 1)  # metrics are those of the last step
    told = decode.metrics()
    return {name: told.get(name, 0.0) for name in (_BYTES, _LOADED)}


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mbits", type=float, default=200.0)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rows, wrong = measure(options, Path(work))
    cells = [
        [
            f"{row.share:.0%}", str(row.rounds), f"{1e3 * row.first_token_s:.0f}",
            f"{row.of_alone:.2f}", f"{row.nbytes / 2**20:.1f}", f"{row.tokens_loaded:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["stored", "rounds", "first token, ms", "of the ticket alone", "MiB", "loaded"]
    print(table(columns, cells))
    print("\n".join([*wrong, f"wrong: {len(wrong)}"]))
    if options.json is not None:
        document = {"mbits": options.mbits, "tokens": options.tokens}
        document["measured"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
