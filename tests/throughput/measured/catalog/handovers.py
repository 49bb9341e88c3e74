"""Benchmarks of requests that are handed over from prefill to decode, as a user sees them."""

from __future__ import annotations

from tests.multinode.namespaces import why_not
from tests.throughput.measured.catalog.entry import Benchmark, Command, Need, Table, package
from tests.throughput.measured.catalog.shared import (
    CONTESTANTS,
    ENGINE,
    ENGINES,
    HANDOVERS,
    NIXL,
    SAMPLES,
)

_HANDOVER = "python -m tests.throughput.handover"

FIRST_REQUEST = Benchmark(
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
    **ENGINES,
)  # fmt: skip

_SERVED_COLUMNS = {
    "ms": "{contestant:s}",
    **{name: f"{{{key}.p50_s:ms3}}, {{{key}.p99_s:ms3}}"
       for name, key in (("TTFT", "ttft"), ("ITL", "itl"), ("handover", "handover"))},
    "within bounds": "{met} of {requests}",
    "goodput, requests/s": "{goodput_per_s:.2f}", "wrong": "{wrong}",
}  # fmt: skip

SERVE = Benchmark(
    "serve",
    "What do users see: time to first token (TTFT), time between tokens (ITL), goodput?",
    "Small engines behind the same `pdconn proxy`: for each connector a prefill and a decode "
    "engine, on a core each, and one engine on one core. "
    "Prompts of 1000 tokens, answers of 32, one at a time, in turns in one run. Bounds: 500 ms "
    "TTFT, 50 ms ITL. Milliseconds, median and 99th percentile (of 12: the worst).",
    (
        Command(
            "serve",
            "pdconn bench serve --contestants pdconn,in-tree-tuned,in-tree,single"
            " --rounds 3 --requests 4",
        ),
    ),
    7,
    (
        Table(("serve",), "contestants", _SERVED_COLUMNS, CONTESTANTS),
    ),
    drop=frozenset({"turns", "manifest"}),
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip

_SERVED = (
    "pdconn bench serve --contestants pdconn,pdconn-streams,single --prompt 600 --cores one-process"
)
SERVE_STREAMS = Benchmark(
    "serve_streams",
    "What do users see of `--streams on` while many ask at once?",
    "As above, with workers inside the engines' processes: 48 prompts of 600 tokens, 8 at a time, "
    "12 rounds; then 60 requests at 10.7 a second, at random times, 6 rounds, 90 % of what "
    "the ordinary way carries. Milliseconds, median and 99th percentile.",
    (
        Command("load", f"{_SERVED} --requests 48 --concurrency 8 --rounds 12 --seed 1"),
        Command("rate", f"{_SERVED} --requests 60 --rate 10.7 --rounds 6"),
    ),
    6,
    (
        Table(("load",), "contestants", _SERVED_COLUMNS, CONTESTANTS),
        Table(("rate",), "contestants", _SERVED_COLUMNS, CONTESTANTS),
    ),
    drop=frozenset({"turns", "manifest"}),
    **ENGINES,  # type: ignore[arg-type]
)

DEMO = Benchmark(
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
    needs=(ENGINE, NIXL, package("matplotlib")),
)  # fmt: skip

VERIFY = Benchmark(
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
    (HANDOVERS,),
    drop=SAMPLES,
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip

_COLUMNS = {
    "": "{contestant:s}", "tokens": "{tokens}", "prefill, ms": "{prefill_median_s:ms3}",
    "median, ms": "{median_s:ms3}", "worst, ms": "{worst_s:ms3}", "failed": "{failed}",
}  # fmt: skip
_RATIOS = {"ratio": "{claim:s}", "measured": "{ratio:2}", "target, at most": "{bound:.2f}"}

HANDOVER = Benchmark(
    "handover",
    "How long after prefill's answer does decode stream its first token?",
    "Two cores, no GPU, one for each engine, a 6-layer hybrid model (hidden 256, window 64), "
    "prompts of 200, 1000 and 3000 tokens, 15 each, in turns in one run; beside it the median "
    "prefill (0: the same engine computes it). *At rest*: a plugin of the benchmark gives NIXL's "
    "progress thread, which spins in the in-tree connector, the delay that it has in pdconn. The "
    "pushing connector is asked for both legs at once, as its routers ask.",
    (Command("apart", f"{_HANDOVER} --cores apart"),),
    15,
    (
        Table(("apart",), "measured", _COLUMNS, CONTESTANTS),
        Table(("apart",), "ratios", _RATIOS),
    ),
    drop=SAMPLES,
    **ENGINES,  # type: ignore[arg-type]
)

HANDOVER_RESERVED = Benchmark(
    "handover_reserved",
    "The same where vLLM binds the engines itself?",
    "As above, with one core reserved, so that both engines' models share the other.",
    (Command("reserved", f"{_HANDOVER} --connectors in-tree pdconn"),),
    30,
    (
        Table(("reserved",), "measured", _COLUMNS, CONTESTANTS),
        Table(("reserved",), "ratios", _RATIOS),
    ),
    drop=SAMPLES,
    **ENGINES,  # type: ignore[arg-type]
)

_FOLLOWED = "python -m tests.throughput.followed"
_FOLLOWED_COLUMNS = {
    "prompt, tokens": "{tokens}", "decode is asked": "{mode:s}",
    "first token, ms": "{first_token_s:ms3}", "after prefill's answer": "{handover_s:ms3}",
    "prefill": "{prefill_s:ms3}", "visible": "{visible_s:ms3}", "held": "{held_s:ms3}",
    "read early": "{early_share:%.0f} %",
}  # fmt: skip
_MODES = {"alone": "one engine alone", "off": "after prefill", "on": "at once, with a stream"}

FOLLOWED = Benchmark(
    "followed",
    "What does it save that decode follows prefill's request (`--streams on`)?",
    "Two cores, one for each engine, workers inside the engines' processes; the same prompts in "
    "turns, medians. *Visible* is the time from the first moment at which decode had the ticket "
    "and blocks to its KV, *held* that from its blocks to its KV. Then with chunks of 512 tokens "
    "and a model that keeps 8 KiB of each token: 3000 and 16,000 tokens over loopback, and 4096 "
    "between network namespaces, over links of 200 and 400 Mbit/s.",
    (
        Command("cores", f"{_FOLLOWED} --rounds 16"),
        Command("chunks", f"{_FOLLOWED} --model long --lengths 3000 16000 --chunk 512 --rounds 5"),
        Command(
            "links",
            f"{_FOLLOWED} --model long --mbits 200 400 --lengths 4096 --chunk 512 --rounds 7",
        ),
    ),
    10,
    (
        Table(("cores",), "measured", _FOLLOWED_COLUMNS, _MODES),
        Table(("chunks",), "measured", _FOLLOWED_COLUMNS, _MODES),
        Table(("links",), "measured", {"link, Mbit/s": "{mbits:.0f}", **_FOLLOWED_COLUMNS}, _MODES),
    ),
    drop=frozenset({"runs", "settings"}),
    packages=("vllm", "nixl"),
    needs=(ENGINE, NIXL, Need("root, for network namespaces", lambda: why_not() is None)),
)  # fmt: skip
