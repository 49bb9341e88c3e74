"""Benchmarks of what lending and pulling cost the engine that runs beside them."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import Benchmark, Command, Table
from tests.throughput.measured.catalog.shared import ENGINES, NIXL

_PLAIN = "python -m tests.throughput.lender_load --ranks 8 --insecure --renew alone --rounds 3"

LENDER_LOAD = Benchmark(
    "lender_load",
    "What do readers cost a lender, and the scheduler in its process?",
    "64 readers of 8 ranks over loopback, with a secret, sending claims, renewals and dones "
    "at the same rate, each rank's renewals together. Times of scheduler steps are relative to "
    "steps without readers, some 20 µs for each of their slices; times of claims are the readers', "
    "which look for answers once a millisecond. The second table is without a secret, each renewal "
    "in a frame of its own: our lender beside two that answer every frame with the same bytes.",
    (
        Command("in_all", "python -m tests.throughput.lender_load --ranks 8 --rate 333.3"),
        Command("each", "python -m tests.throughput.lender_load --ranks 8"),
        Command(
            "alone", "python -m tests.throughput.lender_load --ranks 8 --renew alone --rounds 3"
        ),
        Command(
            "long_steps", "python -m tests.throughput.lender_load --ranks 8 --slices 80 --rounds 3"
        ),
        Command("plain", _PLAIN),
        Command("python", f"{_PLAIN} --lender python"),
        Command("c", f"{_PLAIN} --lender c"),
    ),
    4,
    (
        Table(
            ("in_all", "each", "alone", "long_steps"),
            "",
            {"readers": "{readers}",
             "renewals": "{renew:s}",
             "slices of a step": "{slices}",
             "claims, renewals and dones a second, each": "{rate:.0f}",
             "lender thread, of a core: median": "{summary.lender_cpu:%.1f} %",
             "least": "{summary.lender_cpu_least:%.1f} %",
             "without readers": "{summary.lender_cpu_idle:%.1f} %",
             "scheduler steps, times: median": "{summary.step_p50_ratio:.2f}",
             "p99": "{summary.step_p99_ratio:.2f}",
             "claims, ms: median": "{summary.claim_p50_ms:.1f}",
             "p99 of claims": "{summary.claim_p99_ms:.1f}"},
        ),
        Table(
            ("plain", "python", "c"),
            "",
            {"lender": "{lender:s}",
             "its thread, of a core: median": "{summary.lender_cpu:%.1f} %",
             "least": "{summary.lender_cpu_least:%.1f} %",
             "scheduler steps, times: median": "{summary.step_p50_ratio:.2f}",
             "p99": "{summary.step_p99_ratio:.2f}"},
        ),
    ),
    drop=frozenset({"phases"}),
)  # fmt: skip

ENGINE_THREAD = Benchmark(
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
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip

PULL_COST = Benchmark(
    "pull_cost",
    "What does a pull compute with the interpreter's lock held, beside a model?",
    "20 pulls a second of 1024 tokens, 2.5 MB, from another process, beside a thread of Python "
    "and hashes on a core of its own, without vLLM. Processor time of the puller's and the "
    "reader's thread but for what lets go of the lock: functions of NIXL, `send`, `recv`, "
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
                "NIXL's create": "of them NIXL's check of the descriptors",
                "NIXL's post": "NIXL's post",
                "NIXL's status": "NIXL's status",
                "send": "`send`",
                "recv": "`recv`",
                "epoll_wait": "`epoll_wait`",
                "engine: post, collect": "the engine's thread, in `post` and `collect`",
            },
        ),
    ),
    drop=frozenset({"phases"}),
    packages=("nixl", "numpy"),
    needs=(NIXL,),
)  # fmt: skip

ITL = Benchmark(
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
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip

ITL_LENDING = Benchmark(
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
    **ENGINES,  # type: ignore[arg-type]
)  # fmt: skip
