"""Every benchmark whose table stands in the README, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.throughput.tables import alone, handover, router, serving, transfer
from tests.throughput.tables.benchmark import Benchmark, Command
from tests.throughput.tables.needs import ENGINE, NIXL, library, package

_HANDOVER = "python -m tests.throughput.handover"
_TRANSFER = "pdconn bench transfer --layout BLHNC"
_SAMPLES = frozenset({"settings", "first_s", "prefill_s", "between_tokens_s"})
_WIRE = ("nixl",)
_ENGINES = ("vllm", "nixl")

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        each.name: each
        for each in (
            Benchmark(
                "planning",
                (Command("planning", "python -m tests.throughput.planning"),),
                minutes=0.5,
                table=alone.planning,
                packages=("numpy",),
            ),
            Benchmark(
                "checksums",
                (Command("checksums", "python -m tests.throughput.checksums"),),
                minutes=0.5,
                table=alone.checksums,
                packages=("numpy",),
            ),
            Benchmark(
                "waterfall",
                (Command("pull", "python -m tests.throughput.waterfall"),),
                minutes=0.4,
                table=transfer.waterfall,
                drop=frozenset({"pulls"}),
                packages=_WIRE,
                needs=(NIXL,),
            ),
            Benchmark(
                "lender_load",
                (
                    Command("in_all", "python -m tests.throughput.lender_load --rate 333.3"),
                    Command("each", "python -m tests.throughput.lender_load"),
                ),
                minutes=2,
                table=transfer.lender_load,
                drop=frozenset({"phases"}),
            ),
            Benchmark(
                "transfer",
                (
                    Command(
                        "blocks",
                        f"{_TRANSFER} --prompt 4096 --block 2,8 --path shm-huge,shm,tcp",
                    ),
                    Command(
                        "at_once",
                        f"{_TRANSFER} --prompt 512 --block 16 --concurrency 32 --path shm-huge,tcp",
                    ),
                ),
                minutes=3,
                table=transfer.transfer,
                drop=frozenset({"manifest", "transports", "walls_s"}),
                packages=_WIRE,
                needs=(NIXL,),
            ),
            Benchmark(
                "mooncake",
                (
                    Command(
                        "mooncake",
                        f"{_TRANSFER} --prompt 2048 --block 2,8 --path shm-huge,tcp --mooncake",
                    ),
                ),
                minutes=1,
                table=transfer.mooncake,
                drop=frozenset({"manifest", "transports", "walls_s"}),
                packages=(*_WIRE, "mooncake-transfer-engine-non-cuda"),
                needs=(NIXL, package("mooncake"), library("libibverbs.so.1")),
            ),
            Benchmark(
                "warm",
                (Command("warm", "python -m tests.throughput.warm"),),
                minutes=1,
                table=transfer.warm,
                drop=frozenset({"turns"}),
                packages=_WIRE,
                needs=(NIXL,),
            ),
            Benchmark(
                "ucx_backend",
                (Command("ucx", "python -m tests.throughput.ucx_backend"),),
                minutes=1,
                table=transfer.ucx_backend,
                drop=frozenset({"gb_per_s"}),
                packages=(*_WIRE, "ucxx-cu12"),
                needs=(NIXL,),
            ),
            Benchmark(
                "engine_thread",
                (Command("thread", "python -m tests.throughput.engine_thread"),),
                minutes=2,
                table=serving.engine_thread,
                drop=frozenset({"hooks"}),
                packages=_ENGINES,
                needs=(ENGINE, NIXL),
            ),
            Benchmark(
                "itl",
                (Command("itl", "python -m tests.throughput.itl --rounds 16"),),
                minutes=6,
                table=serving.itl,
                drop=frozenset({"phases", "settings"}),
                packages=_ENGINES,
                needs=(ENGINE, NIXL),
            ),
            Benchmark(
                "serve",
                (Command("serve", "pdconn bench serve --rounds 3 --requests 4"),),
                minutes=5,
                table=serving.serve,
                drop=frozenset({"turns", "manifest"}),
                packages=_ENGINES,
                needs=(ENGINE, NIXL),
            ),
            Benchmark(
                "routing",
                (Command("routing", "python -m tests.throughput.routing"),),
                minutes=1,
                table=router.routing,
            ),
            Benchmark(
                "proxy_cost",
                (Command("cost", "python -m tests.throughput.proxy_cost"),),
                minutes=4,
                table=router.proxy_cost,
                packages=("aiohttp",),
            ),
            Benchmark(
                "trace",
                (Command("trace", "python -m tests.throughput.trace"),),
                minutes=3,
                table=router.trace,
                packages=("vllm",),
                needs=(ENGINE,),
            ),
            Benchmark(
                "real_trace",
                (Command("trace", "python -m tests.throughput.real_trace"),),
                minutes=3,
                table=router.real_trace,
                packages=_ENGINES,
                needs=(ENGINE, NIXL),
            ),
            Benchmark(
                "demo",
                (Command("demo", "pdconn demo"),),
                minutes=2,
                table=handover.demo,
                packages=_ENGINES,
                needs=(ENGINE, NIXL, package("matplotlib")),
            ),
            Benchmark(
                "verify",
                (
                    Command(
                        "handover",
                        f"{_HANDOVER} --connectors pdconn pdconn-sample pdconn-always"
                        " --cores apart --rounds 8 --lengths 1000 3000",
                    ),
                ),
                minutes=5,
                table=handover.verify,
                drop=_SAMPLES,
                packages=_ENGINES,
                needs=(ENGINE, NIXL),
            ),
            Benchmark(
                "handover",
                (
                    Command("reserved", _HANDOVER),
                    Command("apart", f"{_HANDOVER} --cores apart"),
                ),
                minutes=40,
                table=handover.handover,
                drop=_SAMPLES,
                packages=_ENGINES,
                needs=(ENGINE, NIXL),
            ),
        )
    }
)
