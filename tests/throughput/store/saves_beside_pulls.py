"""What saves to files cost the pulls beside them.

    python -m tests.throughput.store.saves_beside_pulls --json saves_beside_pulls.json

A puller pulls a prompt from a lender in another process again and again, as
:mod:`tests.throughput.waterfall` does, while a rank in the same process saves rows of other KV to
files: as fast as it can, giving way to the pulls (each row, copied and written in chunks, waits
while one is under way), or not at all.  The three take turns in changing order within each round.
Between pulls nothing is pulled for as long as a pull takes alone, so that saves go on there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pdconn.lifecycle.turns import Urgency
from pdconn.protocol.ticket import BlockList
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.store.engine.build import replicas_of
from pdconn.store.format.row import RowKind, store_layout
from pdconn.store.rank.store import RankStore
from pdconn.store.rank_commands import OpenStore, SaveRow, SaveRows
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.open import open_shelf
from pdconn.store.store_keys import load_keys
from pdconn.tools.bench.percentile import percentile
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.workload import extent, placed
from pdconn.tools.output.table import table
from tests.throughput.store.loaders import BLOCK_TOKENS, ROW_TOKENS, SHAPES, references_of
from tests.throughput.waterfall import TRAITS, Waterfall, pull_once, workload_of

MODEL, ROWS = "gpt-oss-120b", 4
"""Rows of 9 MiB, so many in each save."""
AHEAD = 3
"""Saves that wait or are under way while pulls are timed."""
MODES = ("alone", "saves give way", "saves do not give way")


@dataclass(frozen=True)
class Cost:
    """Pulls of all rounds; ``ratio`` is the median of the rounds' ratios of medians to alone."""

    what: str
    pulls: int
    p50_s: float
    p99_s: float
    ratio: float
    saved_gb_s: float


class Saver:
    """A rank that saves rows of one prompt again and again, and keeps none."""

    def __init__(self, root: str) -> None:
        layers, token_nbytes = SHAPES[MODEL]
        references, self._memory = references_of(layers, token_nbytes, ROWS)
        self._settings = StoreSettings(root, 1 << 40, staging=1 << 20, block_tokens=ROW_TOKENS)
        layout = store_layout([references], ROW_TOKENS)
        self._row_nbytes, self._serial = layout.fa.data_nbytes, itertools.count(1)
        ids = tuple(range(1, 1 + ROWS * ROW_TOKENS // BLOCK_TOKENS))
        self._blocks = (BlockList(0, ids),)
        chain = load_keys(None).names.chain(ROW_TOKENS).extended(range(ROWS * ROW_TOKENS))
        self._names = [chain.name(RowKind.FA, at) for at in range(ROWS)]
        self.store = RankStore(self._settings, references, 0, partial(open_shelf, self._settings))
        self.store.post_command(OpenStore(layout, "ns", "writer", replicas_of([references])))
        self._posted = self._read = 0

    def keep_saving(self) -> None:
        """Post saves until enough of them wait."""
        self._read += len(self.store.take_results())
        while self._posted - self._read < AHEAD:
            number = next(self._serial)
            rows = tuple(SaveRow(name, f"p{number}-{name.index}") for name in self._names)
            self.store.post_command(SaveRows(number, self._blocks, rows))
            self.store.after_pass()
            self._posted += 1

    def written_nbytes(self) -> int:
        """Bytes written since the last call."""
        return self.store.take_rank_counts().get("bytes_written", 0)

    def finish(self) -> None:
        """Wait for the saves under way, and discard what they have written."""
        while self._read < self._posted:
            self.store.wait_for_answer(0.05)
            self._read += len(self.store.take_results())
        with open_shelf(self._settings) as shelf:
            time.sleep(0.1)  # the last row is written after its blocks are free
            for part in list(shelf.parts()):
                shelf.discard(part.writer, part.part)


def phase(
    mode: str, pull: Callable[[], float], saver: Saver, times: int
) -> tuple[list[float], float]:
    """Pulls in one mode: their seconds, and GB/s that were saved meanwhile."""
    if mode == "alone":
        taken = []
        for _ in range(times):
            taken.append(pull())
            time.sleep(taken[-1])
        return taken, 0.0
    saver.keep_saving()
    time.sleep(0.05)
    saver.written_nbytes()
    taken, began = [], time.monotonic()
    for _ in range(times):
        saver.keep_saving()
        if mode == "saves give way":
            saver.store.set_waiting(Urgency.PULL, is_loading=False)
        taken.append(pull())
        saver.store.set_waiting(None, is_loading=False)
        time.sleep(taken[-1])
    rate = saver.written_nbytes() / (time.monotonic() - began) / 1e9
    saver.finish()
    return taken, rate


def measure(options: argparse.Namespace) -> list[Cost]:
    """All modes in turns."""
    workload, path = workload_of(options), PATHS[options.path]
    command = [sys.executable, "-m", "tests.throughput.waterfall", "--lend"]
    for name in ("model", "layout", "block", "prompt", "ids", "path"):
        command += [f"--{name}", str(getattr(options, name))]
    ours = workload.ours()
    with ExitStack() as stack:
        arena = stack.enter_context(BenchMemory(extent(ours), huge_pages=path.huge_pages))
        root = stack.enter_context(tempfile.TemporaryDirectory(dir=options.root))
        child = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert child.stdin is not None
        assert child.stdout is not None
        stack.callback(child.stdin.close)
        port, serial = int(child.stdout.readline()), itertools.count()
        transport = path.open_transport("waterfall-decode")
        transport.register([arena.memory])
        puller = Puller(Rank("decode", 0, 1, 0, placed(ours, arena.memory), TRAITS), transport)
        stack.callback(puller.close)
        saver = Saver(root)
        stack.callback(saver.store.close)

        def pull() -> float:
            found: Waterfall = pull_once(workload, puller, port, child, f"r{next(serial)}")
            return found.all_s

        for _ in range(3):
            pull()
        rounds: list[dict[str, tuple[list[float], float]]] = []
        order = list(MODES)
        for _ in range(options.rounds):
            rounds.append({mode: phase(mode, pull, saver, options.times) for mode in order})
            order = [*order[1:], order[0]]
    return [cost(mode, rounds) for mode in MODES]


def cost(mode: str, rounds: Sequence[dict[str, tuple[list[float], float]]]) -> Cost:
    """A mode over all rounds."""
    taken = sorted(second for each in rounds for second in each[mode][0])
    ratios = [
        statistics.median(each[mode][0]) / statistics.median(each["alone"][0]) for each in rounds
    ]
    rate = statistics.median(each[mode][1] for each in rounds)
    return Cost(
        mode,
        len(taken),
        percentile(taken, 0.5),
        percentile(taken, 0.99),
        statistics.median(ratios),
        rate,
    )


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="gpt-oss-20b", help="a built-in shape that is pulled (%(default)s)")
    add("--layout", default="BLHNC", help="memory order of both engines (%(default)s)")
    add("--block", type=int, default=16, help="tokens per block (%(default)s)")
    add("--prompt", type=int, default=8192, help="tokens (%(default)s)")
    add("--ids", default="random", help="order of block ids (%(default)s)")
    add("--path", default="shm-huge", help=f"one of {', '.join(PATHS)} (%(default)s)")
    add("--times", type=int, default=25, help="pulls in a mode of a round (%(default)s)")
    add("--rounds", type=int, default=12, help="rounds (%(default)s)")
    add("--root", type=Path, help="a folder of the device to save to")
    add("--json", type=Path, help="write the costs there, too")
    options = parser.parse_args()
    found = measure(options)
    body = [
        [one.what, f"{1e3 * one.p50_s:.2f}", f"{1e3 * one.p99_s:.2f}", f"{one.ratio:.2f}",
         f"{one.saved_gb_s:.2f}"]
        for one in found
    ]  # fmt: skip
    print(table(["pulls", "p50\nms", "p99\nms", "ratio", "saved\nGB/s"], body))
    if options.json:
        document = {
            "rounds": options.rounds,
            "times": options.times,
            "rows": list(map(asdict, found)),
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
