"""Benchmarks of the router: what it costs, and what its choices save."""

from __future__ import annotations

import os

from tests.multinode.namespaces import why_not
from tests.throughput.index.__main__ import RIVAL_VARIABLE as DYNAMO_VARIABLE
from tests.throughput.measured.catalog.entry import Benchmark, Command, Need, Table
from tests.throughput.measured.catalog.shared import ENGINE, ENGINES, NIXL
from tests.throughput.mooncake.__main__ import TRACE_VARIABLE
from tests.throughput.proxy_cpu.__main__ import RIVAL_VARIABLE

_MOONCAKE = (
    "python -m tests.throughput.mooncake --requests 500 --tokens-per-block 512 --prefill-rate 40000"
)
_LINKS = "python -m tests.throughput.links"

ROUTING = Benchmark(
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
)  # fmt: skip

ROLES = Benchmark(
    "roles",
    "The load shifts from prompts to answers and back: what do roles that follow it gain?",
    "Real vLLM, three engines of both roles behind `pdconn proxy`, each with half a core (by "
    "cgroups, as root), on two cores: three equal machines. An open load that needs 1.25 engines "
    "of the role that a phase is heavy on, at full use, or less: 0.85 of the first rate, in steps "
    "of 0.85, of which the best fixed ratio serves 98 % for half a minute. Prompts of 1500 tokens "
    "with answers of 8, prompts of 64 with answers of 150, and the first again, at random times. "
    "Targets: the first token within 6 times what one engine alone takes for a prompt, and twice "
    "the inter-token latency of four streams. Goodput: the share of requests that are answered as "
    "by one engine alone, within both targets. Fixed ratios (prefill:decode) run each phase by "
    "itself, from an idle start and for shorter, which flatters them.",
    (Command("roles", "python -m tests.throughput.roles --minutes 10 --fixed-minutes 2"),),
    45,
    (
        Table(
            ("roles",),
            "rows",
            {"goodput": "{way:s}", "minutes a phase": "{minutes:.1f}",
             "prompts": "{prompts:%.1f} %", "answers": "{answers:%.1f} %",
             "prompts again": "{again:%.1f} %", "whole": "{whole:%.1f} %",
             "requests": "{requests}", "lost": "{lost}", "wrong": "{wrong}",
             "changes of roles": "{changes}"},
        ),
    ),
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip

INDEX = Benchmark(
    "index",
    "How many blocks does the index store and remove in a second, and how long does a look-up "
    "take, beside Dynamo's?",
    "The first 2000 requests of Mooncake's trace of conversations over 16 simulated caches of "
    "20 000 blocks of 16 tokens, with a window group of 1024 tokens: vLLM's batches for ours, "
    "JSON of the same blocks of full attention for Dynamo's RadixTree (ai-dynamo-runtime 1.6.1, "
    "by its Python bindings), whose evictions in a row are one event. One core each, in turns, "
    "medians of 3 processes; processor time with all threads, from the bytes of a batch until a "
    "look-up sees it. Look-ups are of hashes, and are between the batches. "
    "The variable `PDCONN_DYNAMO_PYTHON` names the Python that has Dynamo's package, "
    "`PDCONN_MOONCAKE_TRACE` the trace (`conversation_trace.jsonl` of Mooncake's repository).",
    (Command("index", "python -m tests.throughput.index"),),
    2,
    (
        Table(
            ("index",),
            "index",
            {"": "{name:s}", "blocks stored or removed": "{ops}",
             "1000 of them a second": "{kops_s:.0f}", "look-up p50, µs": "{p50_us:.0f}",
             "p99, µs": "{p99_us:.0f}", "by the clock p50, p99":
             "{wall_p50_us:.0f}, {wall_p99_us:.0f}", "bytes a held block": "{block_nbytes:.0f}",
             "wrong": "{wrong} of {look_ups}", "best match cut by a window": "{shorter}"},
        ),
    ),
    packages=("numpy", "msgspec"),
    needs=tuple(
        Need(name, lambda name=name: name in os.environ)  # type: ignore[misc]
        for name in (DYNAMO_VARIABLE, TRACE_VARIABLE)
    ),
)  # fmt: skip

PROXY_COST = Benchmark(
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
)  # fmt: skip

PROXY_CPU = Benchmark(
    "proxy_cpu",
    "How much processor time does the proxy take for a request and for a streamed chunk?",
    "Prefill answers a ticket at once, decode one JSON answer or 64 chunks, 10 ms apart, each a "
    "write of its own; the routers in turns, medians of 5 rounds. Processor time of the router's "
    "process, user and system. A look-up is of a prompt whose first half prefill holds. The "
    "variable `PDCONN_VLLM_ROUTER` names the program of vllm-router 0.1.17, in P/D mode with "
    "round-robin.",
    (Command("cpu", "python -m tests.throughput.proxy_cpu"),),
    5,
    (
        Table(
            ("cpu",),
            "router",
            {"": "{name:s}", "prompt, tokens": "{prompt_tokens}",
             "one JSON answer, ms": "{json_ms:.2f}", "64 chunks, ms": "{stream_ms:.2f}",
             "of the rounds": "{spread_ms[0]:.2f} to {spread_ms[1]:.2f}",
             "a chunk, µs": "{chunk_us:.0f}"},
        ),
    ),
    packages=("aiohttp", "httptools", "uvloop"),
    needs=(Need(RIVAL_VARIABLE, lambda: RIVAL_VARIABLE in os.environ),),
)  # fmt: skip

TRACE = Benchmark(
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
    needs=(ENGINE,),
)  # fmt: skip

LINKS = Benchmark(
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
    needs=(NIXL, Need("root, for network namespaces", lambda: why_not() is None)),
)  # fmt: skip

MOONCAKE_TRACE = Benchmark(
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
    needs=(ENGINE, Need(TRACE_VARIABLE, lambda: TRACE_VARIABLE in os.environ)),
)  # fmt: skip

REAL_TRACE = Benchmark(
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
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip
