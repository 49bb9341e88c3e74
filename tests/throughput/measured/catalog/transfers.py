"""Benchmarks of moving bytes: between two processes, by each transport and its rivals."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import Benchmark, Command, Table, library, package
from tests.throughput.measured.catalog.shared import ENGINE, HANDOVERS, NIXL, PATHS, SAMPLES, UCXX

_TRANSFER = "pdconn bench transfer --layout BLHNC"
_KIB = "{lines[line=pdconn].nbytes/prompt_tokens*block_tokens:KiB3}"


def _gbps(line: str) -> str:
    return f"{{lines[line={line}].bytes_per_s:GB.2f}}"


def _of_raw(line: str) -> str:
    return f"{{lines[line={line}].of_raw:.2f}}"


WATERFALL = Benchmark(
    "waterfall",
    "What does one pull take beyond the read itself?",
    "One pull between two processes over shared memory, from the engine's first call for a "
    "request to its last. `rest` is the hand-over between threads, preparing the read and "
    "noticing its end; `free` runs beside `report`.",
    (Command("pull", "python -m tests.throughput.waterfall"),),
    0.4,
    (
        Table(
            ("pull",),
            "stages",
            {"{settings.model:s}, {settings.prompt} tokens, {nbytes:MB3} MB": "{stage:s}",
             "median, ms": "{median_s:ms3}", "worst, ms": "{worst_s:ms3}"},
        ),
        Table(("pull",), "", {"all but the read, median, ms": "**{overhead_s:ms3}**"}),
    ),
    drop=frozenset({"pulls"}),
    packages=("nixl",),
    needs=(NIXL,),
)  # fmt: skip

TRANSFER = Benchmark(
    "transfer",
    "How close does a pull of many blocks come to one READ of as many bytes?",
    "Llama 3.1 8B, 4 096 tokens, 537 MB, random block ids, two processes, in turns in one "
    "run, medians of 9: GB/s and the part of the single READ. `layer by layer` reads the same "
    "blocks from a cache with a tensor per layer. Then 32 pulls of 512 tokens at once.",
    (
        Command("blocks", f"{_TRANSFER} --prompt 4096 --block 2,8 --path shm-huge,shm,tcp"),
        Command(
            "at_once",
            f"{_TRANSFER} --prompt 512 --block 16 --concurrency 32 --path shm-huge,tcp",
        ),
    ),
    3,
    (
        Table(
            ("blocks",),
            "cases",
            {"path": "{path:s}", "KiB a block": _KIB,
             "pdconn": f"**{_gbps('pdconn')}**, {_of_raw('pdconn')}",
             "layer by layer": f"{_gbps('layered')}, {_of_raw('layered')}",
             "single READ": _gbps("raw"),
             "memcpy": "{lines[line=memcpy].bytes_per_s:GB3}"},
            PATHS,
        ),
        Table(
            ("at_once",),
            "cases",
            {"pulls at once": "{requests}", "path": "{path:s}",
             "together, of one pull's throughput": "{lines[line=pdconn].of_alone:.2f}",
             "slowest, of the median's time": "{lines[line=pdconn].slowest_pull:.2f}"},
            PATHS,
        ),
    ),
    drop=frozenset({"manifest", "transports", "walls_s"}),
    packages=("nixl",),
    needs=(NIXL,),
)  # fmt: skip

MOONCAKE = Benchmark(
    "mooncake",
    "How does a pull compare with Mooncake's transfer engine?",
    "`mooncake-transfer-engine-non-cuda` (TCP for host memory only) reads the same blocks in "
    "the same run: 268 MB (at 64 KiB a block one of two ranks: 134 MB twice), GB/s.",
    (
        Command(
            "small",
            f"{_TRANSFER} --prefill tp=2 --decode tp=2 --prompt 2048 --block 1 "
            "--path tcp,tcp-ucx --mooncake",
        ),
        Command(
            "mooncake",
            f"{_TRANSFER} --prompt 2048 --block 2,8,32 --path tcp,tcp-ucx,shm-huge --mooncake",
        ),
    ),
    2,
    (
        Table(
            ("small", "mooncake"),
            "cases",
            {"path": "{path:s}", "KiB a block": _KIB, "pdconn": _gbps("pdconn"),
             "single READ": _gbps("raw"), "Mooncake, over TCP": _gbps("mooncake"),
             "pdconn, times Mooncake":
             "**{lines[line=pdconn].bytes_per_s/lines[line=mooncake].bytes_per_s:.2f}**"},
            PATHS,
        ),
    ),
    drop=frozenset({"manifest", "transports", "walls_s"}),
    packages=("nixl", "ucxx-cu12", "mooncake-transfer-engine-non-cuda"),
    needs=(NIXL, UCXX, package("mooncake"), library("libibverbs.so.1")),
)  # fmt: skip

WARM = Benchmark(
    "warm",
    "What does the first pull from a lender take beyond the next one, and what does "
    "`warm_peers` save?",
    "256 tokens of gpt-oss-20b. `warm_peers` greets, connects and reads a page ahead.",
    (Command("warm", "python -m tests.throughput.warm"),),
    1,
    (
        Table(
            ("warm",),
            "medians",
            {"path": "{path:s}", "lender": "{kind:s}",
             "first pull beyond the next, ms": "{overhead_s:ms.1f}"},
            {
                **PATHS,
                "connected": "connected, nothing read ahead",
                "warmed": "**`warm_peers`**",
                "elsewhere": "`warm_peers` names another lender",
            },
        ),
    ),
    drop=frozenset({"turns"}),
    packages=("nixl",),
    needs=(NIXL,),
)  # fmt: skip

TCP_PROGRESS = Benchmark(
    "tcp_progress",
    "What does it bring to keep NIXL's progress thread awake while reads over TCP are in "
    "flight, and what does a model beside it notice?",
    "256 MiB between two processes of one host, blocks in random order on the lender's side, "
    "one READ in one piece; medians, GB/s. `rest` never keeps a thread awake "
    "(`progress_cores: 0`), `adaptive` is the default, `spin` keeps both sides' awake "
    "throughout, `ucx` is `transport: ucx`. Then beside a model that is bound to the first of "
    "two cores.",
    (
        Command("quiet", "python -m tests.throughput.tcp.progress --rounds 15"),
        Command("busy", "python -m tests.throughput.tcp.progress --busy"),
    ),
    2,
    (
        Table(
            ("quiet",),
            "settings",
            {"setting": "`{setting:s}`", "blocks of 256 KiB": "{kib_256:.2f}",
             "of 1 MiB": "{kib_1024:.2f}", "one READ": "{single:.2f}"},
        ),
        Table(
            ("busy",),
            "settings",
            {"beside a model": "`{setting:s}`", "blocks of 256 KiB": "{kib_256:.2f}",
             "of 1 MiB": "{kib_1024:.2f}", "one READ": "{single:.2f}"},
        ),
        Table(
            ("busy",),
            "model_steps",
            {"the model's step": "{setting:s}", "µs": "{step_us:.0f}",
             "times that without reads": "{times:.3f}"},
        ),
    ),
    packages=("nixl", "ucxx-cu12"),
    needs=(NIXL, UCXX),
)  # fmt: skip

UCX_BACKEND = Benchmark(
    "ucx_backend",
    "What does `transport: ucx` reach beside NIXL?",
    "TCP between two processes, 64 MiB in random blocks, in turns in one run. Medians of 9 "
    "rounds, and quartiles of the ratio. Then the hand-overs of real engines, as `handover`, one "
    "core for each engine.",
    (
        Command("ucx", "python -m tests.throughput.ucx_backend"),
        Command(
            "handover",
            "python -m tests.throughput.handover --connectors pdconn-tcp pdconn-tcp-ucx"
            " --cores apart --rounds 20 --lengths 200 3000",
        ),
    ),
    5,
    (
        Table(
            ("ucx",),
            "sizes",
            {"KiB a block": "{block_kib}", "NIXL, GB/s": "{nixl:.2f}",
             "UCX, GB/s": "{ucx:.2f}", "UCX of NIXL": "**{ratio:.2f}**",
             "quartiles": "{low:.2f} to {high:.2f}"},
        ),
        HANDOVERS,
    ),
    drop=frozenset({"gb_per_s"}) | SAMPLES,
    packages=("vllm", "nixl", "ucxx-cu12"),
    needs=(ENGINE, NIXL, UCXX),
)  # fmt: skip
