"""Every benchmark whose tables stand in ``docs/benchmarks.md``, in the order in which they run."""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from tests.multinode.namespaces import why_not
from tests.throughput.mooncake.__main__ import TRACE_VARIABLE

_PROGRAMS = {
    "python": (sys.executable,),
    "pdconn": (sys.executable, "-m", "pdconn.cli.main"),
}


@dataclass(frozen=True, slots=True)
class Need:
    """What a machine must have: ``words`` for people; ``met`` looks."""

    words: str
    met: Callable[[], bool]


def package(module: str) -> Need:
    """A Python package that can be imported as ``module``."""
    return Need(f"the package {module}", lambda: find_spec(module) is not None)


def library(file: str) -> Need:
    """A shared library that the loader finds, such as ``libibverbs.so.1``."""

    def loads() -> bool:
        try:
            ctypes.CDLL(file)
        except OSError:
            return False
        return True

    return Need(file, loads)


@dataclass(frozen=True, slots=True)
class Command:
    """One program of a benchmark, as a user would type it; ``--json FILE`` is added.

    ``name`` is what its result is called in the record.
    """

    name: str
    line: str

    def argv(self, out: Path) -> list[str]:
        """How it is started, its JSON going to ``out``."""
        program, *words = shlex.split(self.line)
        return [*_PROGRAMS[program], *words, "--json", str(out)]


@dataclass(frozen=True)
class Table:
    """A row for each item below ``rows`` in each of ``runs``; see ``tests.throughput.render``.

    Beside its own fields a row has ``run``, the name of its run.

    Attributes:
        columns: heading -> cell, both templates; a heading's fields are the first run's.
        names: texts of the result -> words for them.
    """

    runs: tuple[str, ...]
    rows: str
    columns: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """One measured place of the page.

    Attributes:
        name: of its markers and its result file.
        question, configuration: a sentence each, Markdown.
        minutes: about how long all commands take on two cores.
        drop: fields of its JSON that the record does without, at any depth: samples.
        packages: whose versions are written beside Python's.
        needs: what a machine must have.
    """

    name: str
    question: str
    configuration: str
    commands: tuple[Command, ...]
    minutes: float
    tables: tuple[Table, ...]
    drop: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()


_NIXL = package("nixl")
_ENGINE = package("vllm")
_ENGINES = {"packages": ("vllm", "nixl"), "needs": (_ENGINE, _NIXL)}
_HANDOVER = "python -m tests.throughput.handover"
_TRANSFER = "pdconn bench transfer --layout BLHNC"
_MOONCAKE = (
    "python -m tests.throughput.mooncake --requests 500 --tokens-per-block 512 --prefill-rate 40000"
)
_LINKS = "python -m tests.throughput.links"
_SAMPLES = frozenset({"settings", "first_s", "prefill_s", "between_tokens_s"})
_PATHS = {
    "shm-huge": "CMA, huge pages",
    "shm": "CMA, 4 KiB pages",
    "tcp": "TCP on loopback",
}
_CONTESTANTS = {
    "alone": "one engine alone",
    "single": "one engine alone",
    "in-tree": "vLLM's in-tree NixlConnector",
    "pdconn": "**pdconn**",
    "pdconn-sample": "pdconn, `verify: sample`",
    "pdconn-always": "pdconn, `verify: always`",
}
_BINDINGS = {"reserved": "vLLM's own, one core reserved", "apart": "one core for each engine"}
_KIB = "{lines[line=pdconn].nbytes/prompt_tokens*block_tokens:KiB3}"


def _gbps(line: str) -> str:
    return f"{{lines[line={line}].bytes_per_s:GB.2f}}"


def _of_raw(line: str) -> str:
    return f"{{lines[line={line}].of_raw:.2f}}"


_LIST = (
    Benchmark(
        "planning",
        "How long does decode plan a pull, and prepare a peer's template?",
        "Gemma 3 27B's shape, random blocks of 16 tokens. LBHNC is layer-outermost, the other "
        "layouts are cross-layer. A template is made once per peer.",
        (Command("planning", "python -m tests.throughput.planning"),),
        0.5,
        (
            Table(
                ("planning",),
                "rows",
                {"": "{what:s}", "runs": "{runs}", "median, ms": "{median_ms:3}",
                 "worst, ms": "{worst_ms:3}"},
            ),
            Table(
                ("planning",),
                "memory",
                {"": "{what:s}", "runs": "{runs}",
                 "peak MB, cache of {caches[0]} blocks": "{small_nbytes:MB3}",
                 "peak MB, cache of {caches[1]} blocks": "{large_nbytes:MB3}"},
            ),
        ),
        packages=("numpy",),
    ),
    Benchmark(
        "checksums",
        "How fast does one core gather and hash KV for `verify`?",
        "256 MiB of KV in this process, by memory order and block size; GB/s at prefill (lender) "
        "and at decode (reader). BLNHC keeps tokens before heads.",
        (Command("checksums", "python -m tests.throughput.checksums"),),
        0.5,
        (
            Table(
                ("checksums",),
                "rows",
                {"`verify`": "`{verify:s}`", "layout": "{layout:s}",
                 "tokens a block": "{block_tokens}", "prefill, GB/s": "{lender_gbps:2}",
                 "decode, GB/s": "{reader_gbps:2}"},
            ),
        ),
        packages=("numpy",),
    ),
    Benchmark(
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
        needs=(_NIXL,),
    ),
    Benchmark(
        "lender_load",
        "What do readers cost a lender, and the scheduler in its process?",
        "64 readers of 8 ranks over loopback, with a secret, sending claims, renewals and dones "
        "at the same rate, each rank's renewals together. Times of scheduler steps are relative to "
        "steps without readers; times of claims are the readers', which look for answers once a "
        "millisecond.",
        (
            Command("in_all", "python -m tests.throughput.lender_load --ranks 8 --rate 333.3"),
            Command("each", "python -m tests.throughput.lender_load --ranks 8"),
            Command(
                "alone", "python -m tests.throughput.lender_load --ranks 8 --renew alone --rounds 3"
            ),
        ),
        4,
        (
            Table(
                ("in_all", "each", "alone"),
                "",
                {"readers": "{readers}",
                 "renewals": "{renew:s}",
                 "claims, renewals and dones a second, each": "{rate:.0f}",
                 "lender thread, of a core: median": "{summary.lender_cpu:%.1f} %",
                 "least": "{summary.lender_cpu_least:%.1f} %",
                 "without readers": "{summary.lender_cpu_idle:%.1f} %",
                 "scheduler steps, times: median": "{summary.step_p50_ratio:.2f}",
                 "p99": "{summary.step_p99_ratio:.2f}",
                 "claims, ms: median": "{summary.claim_p50_ms:.1f}",
                 "p99 of claims": "{summary.claim_p99_ms:.1f}"},
            ),
        ),
        drop=frozenset({"phases"}),
    ),
    Benchmark(
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
                _PATHS,
            ),
            Table(
                ("at_once",),
                "cases",
                {"pulls at once": "{requests}", "path": "{path:s}",
                 "together, of one pull's throughput": "{lines[line=pdconn].of_alone:.2f}",
                 "slowest, of the median's time": "{lines[line=pdconn].slowest_pull:.2f}"},
                _PATHS,
            ),
        ),
        drop=frozenset({"manifest", "transports", "walls_s"}),
        packages=("nixl",),
        needs=(_NIXL,),
    ),
    Benchmark(
        "mooncake",
        "How does a pull compare with Mooncake's transfer engine?",
        "`mooncake-transfer-engine-non-cuda` (TCP for host memory only) reads the same blocks in "
        "the same run: 268 MB (at 64 KiB a block one of two ranks: 134 MB twice), GB/s.",
        (
            Command(
                "small",
                f"{_TRANSFER} --prefill tp=2 --decode tp=2 --prompt 2048 --block 1 --path tcp "
                "--mooncake",
            ),
            Command(
                "mooncake",
                f"{_TRANSFER} --prompt 2048 --block 2,8,32 --path tcp,shm-huge --mooncake",
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
                _PATHS,
            ),
        ),
        drop=frozenset({"manifest", "transports", "walls_s"}),
        packages=("nixl", "mooncake-transfer-engine-non-cuda"),
        needs=(_NIXL, package("mooncake"), library("libibverbs.so.1")),
    ),
    Benchmark(
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
                    **_PATHS,
                    "connected": "connected, nothing read ahead",
                    "warmed": "**`warm_peers`**",
                    "elsewhere": "`warm_peers` names another lender",
                },
            ),
        ),
        drop=frozenset({"turns"}),
        packages=("nixl",),
        needs=(_NIXL,),
    ),
    Benchmark(
        "first_request",
        "What does the first request of fresh engines take beyond that of a fresh engine alone?",
        "Prompts of 200 tokens, a small hybrid model on CPUs, one core for each engine; new "
        "engines in every round. *Next* are the requests after the first, of the same engines. "
        "`rehearse` is off where nothing is prepared.",
        (Command("first_request", "python -m tests.throughput.first_request"),),
        10,
        (
            Table(
                ("first_request",),
                "kinds",
                {"engines": "{words:s}", "first, ms": "{first_s:ms.0f}",
                 "next, ms": "{next_s:ms.0f}",
                 "beyond one cold engine, ms": "{beyond_alone_s:ms.0f}",
                 "worst": "{worst_beyond_alone_s:ms.0f}",
                 "beyond two, ms": "{beyond_two_s:ms.0f}"},
                {},
            ),
        ),
        drop=frozenset({"settings", "rounds"}),
        **_ENGINES,
    ),
    Benchmark(
        "tcp_progress",
        "What does it bring to keep NIXL's progress thread awake while reads over TCP are in "
        "flight, and what does a model beside it notice?",
        "256 MiB between two processes of one host, blocks in random order on the lender's side, "
        "one READ in one piece; medians, GB/s. `rest` never keeps a thread awake "
        "(`progress_cores: 0`), `adaptive` is the default, `spin` keeps both sides' awake "
        "throughout. Then beside a model that is bound to the first of two cores.",
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
        packages=("nixl",),
        needs=(_NIXL,),
    ),
    Benchmark(
        "ucx_backend",
        "What does `transport: ucx` reach beside NIXL?",
        "TCP between two processes, 64 MiB in random blocks, in turns in one run. Medians of 9 "
        "rounds, and quartiles of the ratio.",
        (Command("ucx", "python -m tests.throughput.ucx_backend"),),
        1,
        (
            Table(
                ("ucx",),
                "sizes",
                {"KiB a block": "{block_kib}", "NIXL, GB/s": "{nixl:.2f}",
                 "UCX, GB/s": "{ucx:.2f}", "UCX of NIXL": "**{ratio:.2f}**",
                 "quartiles": "{low:.2f} to {high:.2f}"},
            ),
        ),
        drop=frozenset({"gb_per_s"}),
        packages=("nixl", "ucxx-cu12"),
        needs=(_NIXL,),
    ),
    Benchmark(
        "engine_thread",
        "What does the connector do on the engine's own thread?",
        "Real vLLM, every connector hook summed over a step, 32 requests in flight over real "
        "sockets and NIXL; milliseconds a step.",
        (Command("thread", "python -m tests.throughput.engine_thread"),),
        2,
        (
            Table(
                ("thread",),
                "sides",
                {"ms a step": "{name:s}", "in flight": "{in_flight:3}",
                 "mean": "{all_steps.mean:3}", "median": "{all_steps.p50:3}",
                 "p99": "{all_steps.p99:3}", "worst": "{all_steps.worst:3}",
                 "a request, beyond that": "{per_request:3}"},
            ),
        ),
        drop=frozenset({"hooks"}),
        **_ENGINES,  # type: ignore[arg-type]
    ),
    Benchmark(
        "pull_cost",
        "What does a pull compute with the interpreter's lock held, beside a model?",
        "20 pulls a second of 1024 tokens, 2.5 MB, from another process, beside a thread of Python "
        "and hashes on a core of its own, without vLLM. Processor time of the puller's and the "
        "reader's thread but for what lets go of the lock: NIXL's post, `send`, `recv`, "
        "`epoll_wait`. *Lost* is what the other thread's steps take longer for. Medians of the "
        "phases, microseconds a pull.",
        (Command("pull", "python -m tests.throughput.pull_cost"),),
        1,
        (
            Table(
                ("pull",),
                "",
                {"held, µs": "**{summary.held_us:3}**", "least": "{summary.held_least_us:3}",
                 "lost, µs": "{summary.lost_us:3}", "least of them": "{summary.lost_least_us:3}",
                 "a pull takes, ms": "{summary.pull_p50_ms:3}"},
            ),
            Table(
                ("pull",),
                "summary.parts",
                {"of a pull": "{what:s}", "µs": "{us:3}", "calls": "{calls:.1f}"},
                {
                    "pdconn-puller": "the puller's thread",
                    "pdconn-reader": "the reader's thread",
                    "NIXL's post": "of them NIXL's post",
                    "send": "`send`",
                    "recv": "`recv`",
                    "epoll_wait": "`epoll_wait`",
                    "engine: post, collect": "the engine's thread, in `post` and `collect`",
                },
            ),
        ),
        drop=frozenset({"phases"}),
        packages=("nixl", "numpy"),
        needs=(_NIXL,),
    ),
    Benchmark(
        "itl",
        "Do pulls slow down the tokens of requests that are running?",
        "Real vLLM: two requests stream while others, each for one token, come in beside them. "
        "The engine's loop has a core; pdconn's threads, the API server, the lender and the "
        "clients share the other. `instant` is all that vLLM does for a request with external KV, "
        "and nothing of pdconn's. Time between tokens.",
        (Command("itl", "python -m tests.throughput.itl --rounds 16"),),
        6,
        (
            Table(
                ("itl",),
                "kinds",
                {"requests beside the streams": "{kind:s}", "a second": "{per_s:.1f}",
                 "p50, ms": "{p50:3}", "p99, ms": "{p99:3}"},
                {
                    "quiet": "none",
                    "cached": "`cached`: answered from decode's own cache",
                    "instant": "`instant`: wait as for a pull, and nothing is pulled",
                },
            ),
            Table(
                ("itl",),
                "",
                {
                    f"pulled, times {other}: {part}":
                    f"**{{kinds[kind=pulled].{part}/kinds[kind={other}].{part}:.3f}}**"
                    for other in ("instant", "cached")
                    for part in ("p50", "p99")
                },
            ),
        ),
        drop=frozenset({"phases", "settings"}),
        **_ENGINES,  # type: ignore[arg-type]
    ),
    Benchmark(
        "itl_lending",
        "Does lending slow down the tokens of requests that are running?",
        "As above, with an engine that lends: ten requests a second ask for 1024 tokens that its "
        "cache holds, and another process pulls them; or they are asked and nothing is lent.",
        (
            Command(
                "itl", "python -m tests.throughput.itl --rate 10 --kinds cached lent --rounds 16"
            ),
        ),
        4,
        (
            Table(
                ("itl",),
                "kinds",
                {"requests beside the streams": "{kind:s}", "a second": "{per_s:.1f}",
                 "p50, ms": "{p50:3}", "p99, ms": "{p99:3}"},
                {
                    "cached": "`cached`: answered from its cache",
                    "lent": "`lent`: the same, lent and pulled",
                },
            ),
            Table(
                ("itl",),
                "",
                {
                    f"lent, times cached: {part}":
                    f"**{{kinds[kind=lent].{part}/kinds[kind=cached].{part}:.3f}}**"
                    for part in ("p50", "p99")
                },
            ),
        ),
        drop=frozenset({"phases", "settings"}),
        **_ENGINES,  # type: ignore[arg-type]
    ),
    Benchmark(
        "serve",
        "What do users see: time to first token (TTFT), time between tokens (ITL), goodput?",
        "Five small engines behind the same `pdconn proxy`: pdconn and the in-tree NixlConnector, "
        "each a prefill and a decode engine on a core of its own, and one engine on one core. "
        "Prompts of 1000 tokens, answers of 32, one at a time, in turns in one run. Bounds: 500 ms "
        "TTFT, 50 ms ITL. Milliseconds, median and 99th percentile (of 12: the worst).",
        (Command("serve", "pdconn bench serve --rounds 3 --requests 4"),),
        5,
        (
            Table(
                ("serve",),
                "contestants",
                {"ms": "{contestant:s}",
                 **{name: f"{{{key}.p50_s:ms3}}, {{{key}.p99_s:ms3}}"
                    for name, key in (("TTFT", "ttft"), ("ITL", "itl"), ("handover", "handover"))},
                 "within bounds": "{met} of {requests}",
                 "goodput, requests/s": "{goodput_per_s:.2f}", "wrong": "{wrong}"},
                _CONTESTANTS,
            ),
        ),
        drop=frozenset({"turns", "manifest"}),
        **_ENGINES,  # type: ignore[arg-type]
    ),
    Benchmark(
        "routing",
        "How long does the router score a prompt, and how many events does it apply?",
        "Scoring with index look-ups, beside a list scan with free look-ups; windows of 1024 "
        "tokens.",
        (Command("routing", "python -m tests.throughput.routing"),),
        1,
        (
            Table(
                ("routing",),
                "",
                {"": "{what:s}", "router": "{ours:3} {unit:s}", "list scan": "{scan:3} {unit:s}"},
                {"us": "µs"},
            ),
        ),
    ),
    Benchmark(
        "proxy_cost",
        "What does the proxy add to a request, and how old is an event when it counts?",
        "32 streams of 50 tokens a second, one hop (decode alone) and two (prefill and decode): "
        "without look-up, with engines without events, and with prompts of 1000 tokens looked up.",
        (Command("cost", "python -m tests.throughput.proxy_cost"),),
        4,
        (
            Table(
                ("cost",),
                "cost",
                {"": "{name:s}", "tokens/s beside direct": "{ratio:.3f}",
                 "first token, ms later": "{added_ms:.1f}",
                 "of the rounds": "{spread_ms[0]:.1f} to {spread_ms[1]:.1f}"},
            ),
            Table(
                ("cost",),
                "lag",
                {"from an engine's event to the index": "{name:s}", "median, ms": "{median_ms:.1f}",
                 "p95": "{p95_ms:.1f}", "worst": "{worst_ms:.1f}"},
            ),
        ),
        packages=("aiohttp",),
    ),
    Benchmark(
        "trace",
        "How much does routing by prefix compute less than round-robin?",
        "A multi-turn trace with shared system prompts: 80 conversations of 4 turns over 2 prefill "
        "and 2 decode engines, fresh for each policy. The engines are fake but for their caches: "
        "vLLM's own KV cache manager (one full and one window group), its events and its sockets. "
        "Ideal is one cache for all that keeps everything. With answers of 100 to 300 tokens: "
        "larger caches, 5000 tokens computed a second; once with full attention only.",
        (
            Command("trace", "python -m tests.throughput.trace"),
            Command(
                "pulls",
                "python -m tests.throughput.trace --policies 'prefix + pulls' prefix "
                "--answers 100 300 --prefill-rate 5000 --blocks 4000",
            ),
            Command(
                "full",
                "python -m tests.throughput.trace --policies 'prefix + pulls' prefix "
                "--answers 100 300 --prefill-rate 5000 --blocks 4000 --no-window",
            ),
        ),
        3,
        (
            Table(
                ("trace", "pulls", "full"),
                "",
                {"answers": "{run:s}",
                 "policy": "{policy:s}", "by decode alone": "{alone} of {requests}",
                 "tokens computed, of all": "{computed}, {computed_share:%.1f} %",
                 "of ideal reuse": "{ideal_share:%.1f} %", "tokens pulled": "{pulled}",
                 "predicted = reported": "{agreement:%.1f} % of requests",
                 "TTFT median, p95": "{ttft_ms:.0f}, {ttft_p95_ms:.0f} ms"},
                names={
                    "trace": "10 to 40 tokens",
                    "pulls": "100 to 300 tokens",
                    "full": "100 to 300, no windows",
                },
            ),
        ),
        packages=("vllm",),
        needs=(_ENGINE,),
    ),
    Benchmark(
        "links",
        "How often does the router take the better of pulling a prefix and computing it?",
        "A holder and a puller in network namespaces, joined by a cable of each rate (`tbf`): real "
        "pulls by NIXL over TCP, of as many bytes as gpt-oss-120b keeps of 512 to 4096 tokens. "
        "Computing takes a known time: 30 ms and 2500 tokens a second, or 20 000. The planner "
        "begins with what it assumes; both ways are timed, and ways within 5 % are both right.",
        (
            Command("slow", f"{_LINKS} --gbits 0.2 --requests 40"),
            Command("others", f"{_LINKS} --gbits 1 10 --requests 100"),
            Command("large", f"{_LINKS} --gbits 10 --requests 100 --prefill-rate 20000"),
        ),
        5,
        (
            Table(
                ("slow", "others", "large"),
                "links",
                {"computed, tokens/s": "{run:s}", "link, Gbit/s": "{gbit_s:.1f}",
                 "requests": "{outcome.requests}",
                 "pulling is faster": "{outcome.pull_better:%.0f} %",
                 "pulled": "{outcome.pulled:%.0f} %", "right": "**{outcome.right:%.1f} %**",
                 "after the first 10": "{outcome.right_warm:%.1f} %",
                 "time beyond the best choices": "{outcome.over_best:%.1f} %"},
                names={"slow": "2 500", "others": "2 500", "large": "20 000"},
            ),
        ),
        drop=frozenset({"settings", "judged"}),
        packages=("nixl",),
        needs=(_NIXL, Need("root, for network namespaces", lambda: why_not() is None)),
    ),
    Benchmark(
        "mooncake_trace",
        "And of Mooncake's published trace of conversations?",
        "Its first 500 requests over 2 prefill and 2 decode engines as above, with full attention "
        "only, at the trace's sizes and times. Each engine computes 40 000 tokens a second and "
        "caches one million, or three. Ideal is one cache for all that keeps everything. The "
        "variable `PDCONN_MOONCAKE_TRACE` names the file (`conversation_trace.jsonl` of Mooncake's "
        "repository).",
        (
            Command("1", _MOONCAKE),
            Command("3", f"{_MOONCAKE} --cache-tokens 3000000"),
        ),
        18,
        (
            Table(
                ("1", "3"),
                "",
                {"caches, tokens": "{run:s}", "policy": "{policy:s}",
                 "tokens computed, of all": "{computed} of {prompt_tokens}",
                 "of ideal reuse": "{ideal_share:%.1f} %", "tokens pulled": "{pulled}",
                 "TTFT median, p95": "{ttft_ms:.0f}, {ttft_p95_ms:.0f} ms"},
                names={"1": "1 million", "3": "3 million"},
            ),
        ),
        packages=("vllm",),
        needs=(_ENGINE, Need(TRACE_VARIABLE, lambda: TRACE_VARIABLE in os.environ)),
    ),
    Benchmark(
        "real_trace",
        "Does routing by prefix also pay with real engines?",
        "Real vLLM, one prefill and one decode engine on two cores, 36 turns of 6 conversations, "
        "every answer compared with one engine alone. The only choice is whether to hand over.",
        (Command("trace", "python -m tests.throughput.real_trace"),),
        3,
        (
            Table(
                ("trace",),
                "",
                {"policy": "{policy:s}", "by decode alone": "{alone} of {requests}",
                 "tokens computed by prefill": "{prefill_computed}",
                 "by decode": "{decode_computed}",
                 "TTFT median, p95": "{ttft_ms:.0f}, {ttft_p95_ms:.0f} ms", "wrong": "{wrong}"},
            ),
        ),
        **_ENGINES,  # type: ignore[arg-type]
    ),
    Benchmark(
        "demo",
        "What moves, and what does not?",
        "`make demo`: 16 generated tokens, layout BHLNC, two window groups of 64 tokens. "
        "The last two prompts were asked before.",
        (Command("demo", "pdconn demo"),),
        2,
        (
            Table(
                ("demo",),
                "",
                {"prompt tokens": "{prompt_tokens}", "full attention, MB": "{full_bytes:MB.3f}",
                 "windows, MB": "{window_bytes:MB.3f}",
                 "not moved: windows": "{saved_by_window_bytes:MB.3f}",
                 "not moved: prefix hits": "{saved_by_hits_bytes:MB.3f}",
                 "descriptors": "{descriptors}"},
            ),
        ),
        packages=("vllm", "nixl"),
        needs=(_ENGINE, _NIXL, package("matplotlib")),
    ),
    Benchmark(
        "verify",
        "What does `verify` add to the handover?",
        "As `handover`, one core for each engine; milliseconds.",
        (
            Command(
                "handover",
                f"{_HANDOVER} --connectors pdconn pdconn-sample pdconn-always"
                " --cores apart --rounds 8 --lengths 1000 3000",
            ),
        ),
        5,
        (
            Table(
                ("handover",),
                "measured",
                {"": "{contestant:s}", "tokens": "{tokens}", "median, ms": "{median_s:ms3}",
                 "worst, ms": "{worst_s:ms3}"},
                _CONTESTANTS,
            ),
        ),
        drop=_SAMPLES,
        **_ENGINES,  # type: ignore[arg-type]
    ),
    Benchmark(
        "handover",
        "How long after prefill's answer does decode stream its first token?",
        "Two cores, no GPU, a 6-layer hybrid model (hidden 256, window 64), prompts of 200, 1000 "
        "and 3000 tokens, 15 each, in turns in one run, with cores bound in two ways; beside it "
        "the median prefill (0: the same engine computes it).",
        (Command("reserved", _HANDOVER), Command("apart", f"{_HANDOVER} --cores apart")),
        40,
        (
            Table(
                ("reserved", "apart"),
                "measured",
                {"binding": "{run:s}", "": "{contestant:s}", "tokens": "{tokens}",
                 "prefill, ms": "{prefill_median_s:ms3}", "median, ms": "{median_s:ms3}",
                 "worst, ms": "{worst_s:ms3}", "failed": "{failed}"},
                {**_CONTESTANTS, **_BINDINGS},
            ),
            Table(
                ("reserved", "apart"),
                "ratios",
                {"binding": "{run:s}", "ratio": "{claim:s}", "measured": "{ratio:2}",
                 "target, at most": "{bound:.2f}"},
                _BINDINGS,
            ),
        ),
        drop=_SAMPLES,
        **_ENGINES,  # type: ignore[arg-type]
    ),
)  # fmt: skip

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({each.name: each for each in _LIST})
