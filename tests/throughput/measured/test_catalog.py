"""Every measured table, from a small result to the Markdown that it makes, written by hand."""

from __future__ import annotations

import re

import pytest

from tests.throughput.measured.catalog import BENCHMARKS
from tests.throughput.measured.record import MissingField, Node, Record, Run
from tests.throughput.render import digits, filled, markdown, spaced


def record(name: str, **results: object) -> Record:
    runs = {run: Run("python", 1.0, result) for run, result in results.items()}
    return Record(name, "2026-01-02", {}, {}, runs)


def made(name: str, **results: object) -> list[str]:
    """The lines of a benchmark's tables; an empty one between two tables."""
    text = markdown(BENCHMARKS[name], record(name, **results))
    return lines(text[text.index("\n|") :])


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def row(contestant: str, tokens: int, *numbers: float, failed: int = 0) -> dict[str, object]:
    median, worst, prefill = numbers
    return {"contestant": contestant, "tokens": tokens, "median_s": median, "worst_s": worst,
            "prefill_median_s": prefill, "failed": failed}  # fmt: skip


def test_above_the_tables_stand_question_configuration_command_and_result() -> None:
    found = lines(markdown(BENCHMARKS["routing"], record("routing", routing=[])))
    assert found[:4] == [
        f"- **Question**: {BENCHMARKS['routing'].question}",
        f"- **Configuration**: {BENCHMARKS['routing'].configuration}",
        "- **Command**: `python`",
        "- **Result**: `tests/throughput/results/routing.json`, 2026-01-02, python unknown.",
    ]


def test_every_benchmark_says_what_is_asked_and_how() -> None:
    for name, each in BENCHMARKS.items():
        assert each.question.endswith("?"), name
        assert each.configuration.endswith("."), name
        runs = {command.name for command in each.commands}
        assert runs == {run for table in each.tables for run in table.runs}, name


# Engines


def test_handover() -> None:
    claim = "pdconn, 3000 tokens: median handover / full prefill"
    reserved = {
        "measured": [row("alone", 1, 0.0117, 0.044, 0.0),
                     row("in-tree", 3000, 30.107, 68.4, 1.6, failed=2)],
        "ratios": [{"claim": claim, "ratio": 0.0668, "bound": 0.15, "holds": True}],
    }  # fmt: skip
    apart = {
        "measured": [row("in-tree", 3000, 0.0883, 3.391, 1.923),
                     row("alone", 1, 0.0125, 0.067, 0.0)],
        "ratios": [{"claim": claim, "ratio": 0.2, "bound": 0.15, "holds": False}],
    }  # fmt: skip
    assert made("handover", reserved=reserved, apart=apart) == lines(
        """
        | binding | | tokens | prefill, ms | median, ms | worst, ms | failed |
        | --- | --- | --- | --- | --- | --- | --- |
        | vLLM's own, one core reserved | one engine alone | 1 | 0 | 11.7 | 44.0 | 0 |
        | vLLM's own, one core reserved | vLLM's in-tree NixlConnector | 3 000 | 1 600 | 30 107 | 68 400 | 2 |
        | one core for each engine | vLLM's in-tree NixlConnector | 3 000 | 1 923 | 88.3 | 3 391 | 0 |
        | one core for each engine | one engine alone | 1 | 0 | 12.5 | 67.0 | 0 |

        | binding | ratio | measured | target, at most |
        | --- | --- | --- | --- |
        | vLLM's own, one core reserved | pdconn, 3000 tokens: median handover / full prefill | 0.067 | 0.15 |
        | one core for each engine | pdconn, 3000 tokens: median handover / full prefill | 0.20 | 0.15 |
        """  # noqa: E501
    )


def test_verify() -> None:
    measured = [
        row("alone", 1, 0.01, 0.02, 0.0),
        row("pdconn", 3000, 0.0297, 0.05, 0.4),
        row("pdconn-sample", 1000, 0.03, 0.1, 0.1),
        row("pdconn-always", 3000, 0.0355, 0.2, 0.1),
    ]
    assert made("verify", handover={"measured": measured}) == lines(
        """
        | | tokens | median, ms | worst, ms |
        | --- | --- | --- | --- |
        | one engine alone | 1 | 10.0 | 20.0 |
        | **pdconn** | 3 000 | 29.7 | 50.0 |
        | pdconn, `verify: sample` | 1 000 | 30.0 | 100 |
        | pdconn, `verify: always` | 3 000 | 35.5 | 200 |
        """
    )


def test_demo() -> None:
    fields = ("prompt_tokens", "full_bytes", "window_bytes", "saved_by_window_bytes",
              "saved_by_hits_bytes", "descriptors")  # fmt: skip
    rows = [
        dict(zip(fields, numbers, strict=True))
        for numbers in (
            (31, 32768, 65536, 0, 0, 3),
            (1000, 1_048_576, 196_608, 1_900_544, 0, 6),
            (1000, 32768, 65536, 1_900_544, 1_146_880, 3),
        )
    ]
    assert made("demo", demo=rows)[2:] == [
        "| 31 | 0.033 | 0.066 | 0.000 | 0.000 | 3 |",
        "| 1 000 | 1.049 | 0.197 | 1.901 | 0.000 | 6 |",
        "| 1 000 | 0.033 | 0.066 | 1.901 | 1.147 | 3 |",
    ]


# Moving bytes


def line(name: str, gbps: float, of_raw: float | None, **more: object) -> dict[str, object]:
    return {"line": name, "nbytes": 1 << 29, "runs": 500, "bytes_per_s": gbps * 1e9,
            "of_raw": of_raw, **more}  # fmt: skip


def test_transfer() -> None:
    blocks = {
        "path": "shm-huge",
        "prompt_tokens": 4096,
        "block_tokens": 8,
        "lines": [line("pdconn", 4.654, 0.99), line("layered", 0.643, 0.405),
                  line("raw", 5.18, 1.0), line("memcpy", 10.06, None)],
    }  # fmt: skip
    at_once = {
        "path": "tcp",
        "requests": 32,
        "lines": [line("pdconn", 1.5, 0.7, of_alone=1.236, slowest_pull=1.7)],
    }
    assert made("transfer", blocks={"cases": [blocks]}, at_once={"cases": [at_once]}) == lines(
        """
        | path | KiB a block | pdconn | layer by layer | single READ | memcpy |
        | --- | --- | --- | --- | --- | --- |
        | CMA, huge pages | 1 024 | **4.65**, 0.99 | 0.64, 0.41 | 5.18 | 10.1 |

        | pulls at once | path | together, of one pull's throughput | slowest, of the median's time |
        | --- | --- | --- | --- |
        | 32 | TCP on loopback | 1.24 | 1.70 |
        """  # noqa: E501
    )


def test_waterfall() -> None:
    pull = {
        "settings": {"model": "gpt-oss-20b", "prompt": 32768},
        "nbytes": 808_452_096,
        "overhead_s": 0.00584,
        "stages": [
            {"stage": "claim", "median_s": 0.00071, "worst_s": 0.0039},
            {"stage": "read", "median_s": 0.3105, "worst_s": 0.4016},
        ],
    }
    assert made("waterfall", pull=pull) == lines(
        """
        | gpt-oss-20b, 32 768 tokens, 808 MB | median, ms | worst, ms |
        | --- | --- | --- |
        | claim | 0.710 | 3.90 |
        | read | 310 | 402 |

        | all but the read, median, ms |
        | --- |
        | **5.84** |
        """
    )


def test_lender_load() -> None:
    summary = {"lender_cpu": 0.2812, "lender_cpu_least": 0.2006, "lender_cpu_idle": 0.0,
               "step_p50_ratio": 0.958, "step_p99_ratio": 1.31, "claim_p50_ms": 2.96,
               "claim_p99_ms": 8.1}  # fmt: skip
    each = {"readers": 64, "renew": "along", "rate": 1000.0, "summary": summary}
    in_all = {**each, "rate": 333.3, "summary": {**summary, "lender_cpu": 0.0912}}
    alone = {**each, "renew": "alone"}
    assert made("lender_load", each=each, in_all=in_all, alone=alone)[2:] == [
        "| 64 | along | 333 | 9.1 % | 20.1 % | 0.0 % | 0.96 | 1.31 | 3.0 | 8.1 |",
        "| 64 | along | 1000 | 28.1 % | 20.1 % | 0.0 % | 0.96 | 1.31 | 3.0 | 8.1 |",
        "| 64 | alone | 1000 | 28.1 % | 20.1 % | 0.0 % | 0.96 | 1.31 | 3.0 | 8.1 |",
    ]


def test_mooncake() -> None:
    case = {
        "path": "tcp",
        "prompt_tokens": 4096,
        "block_tokens": 8,
        "lines": [line("pdconn", 1.5, 0.75), line("raw", 2.0, 1.0), line("memcpy", 10.0, None),
                  line("mooncake", 1.2, 0.6)],
    }  # fmt: skip
    cases = {"small": {"cases": [case | {"path": "shm-huge"}]}, "mooncake": {"cases": [case]}}
    assert made("mooncake", **cases)[2:] == [
        "| CMA, huge pages | 1 024 | 1.50 | 2.00 | 1.20 | **1.25** |",
        "| TCP on loopback | 1 024 | 1.50 | 2.00 | 1.20 | **1.25** |",
    ]


def test_warm() -> None:
    medians = [
        {"path": path, "kind": kind, "overhead_s": seconds}
        for path, kind, seconds in (
            ("tcp", "warmed", -0.00004),
            ("tcp", "cold", 0.0172),
            ("shm", "warmed", 0.0001),
            ("shm", "connected", 0.0043),
            ("tcp", "elsewhere", 0.0153),
        )
    ]
    assert made("warm", warm={"medians": medians}) == lines(
        """
        | path | lender | first pull beyond the next, ms |
        | --- | --- | --- |
        | TCP on loopback | **`warm_peers`** | 0.0 |
        | TCP on loopback | cold | 17.2 |
        | CMA, 4 KiB pages | **`warm_peers`** | 0.1 |
        | CMA, 4 KiB pages | connected, nothing read ahead | 4.3 |
        | TCP on loopback | `warm_peers` names another lender | 15.3 |
        """
    )


def test_first_request() -> None:
    kinds = [
        {
            "words": words,
            "first_s": first,
            "next_s": then,
            "beyond_alone_s": beyond,
            "worst_beyond_alone_s": worst,
            "beyond_two_s": beyond - 0.0101,
        }
        for words, first, then, beyond, worst in (
            ("one engine", 0.0922, 0.0311, 0.0, 0.0),
            ("a pair", 0.1094, 0.0784, 0.0172, 0.0514),
        )
    ]
    assert made("first_request", first_request={"kinds": kinds}) == lines(
        """
        | engines | first, ms | next, ms | beyond one cold engine, ms | worst | beyond two, ms |
        | --- | --- | --- | --- | --- | --- |
        | one engine | 92 | 31 | 0 | 0 | -10 |
        | a pair | 109 | 78 | 17 | 51 | 7 |
        """
    )  # fmt: skip


def test_ucx_backend() -> None:
    size = {"block_kib": 1024, "nixl": 1.6823, "ucx": 1.7688, "ratio": 1.0614, "low": 0.894,
            "high": 1.3076}  # fmt: skip
    assert made("ucx_backend", ucx={"sizes": [size]})[2:] == [
        "| 1 024 | 1.68 | 1.77 | **1.06** | 0.89 to 1.31 |"
    ]


def test_tcp_progress() -> None:
    quiet = {"setting": "spin", "kib_256": 2.4567, "kib_1024": 3.0, "single": 4.128}
    busy = {"setting": "rest", "kib_256": 1.2, "kib_1024": 1.5, "single": 2.0}
    step = {"setting": "adaptive", "step_us": 2678.61, "times": 1.01}
    lines = made(
        "tcp_progress",
        quiet={"settings": [quiet], "model_steps": []},
        busy={"settings": [busy], "model_steps": [step]},
    )
    assert "| `spin` | 2.46 | 3.00 | 4.13 |" in lines
    assert "| `rest` | 1.20 | 1.50 | 2.00 |" in lines
    assert "| adaptive | 2679 | 1.010 |" in lines


# Engines and their users


def test_serve() -> None:
    spread = {"p50_s": 0.1796, "p99_s": 9.7489}
    contestant = {"requests": 12, "wrong": 0, "ttft": spread, "itl": spread, "handover": None}
    rows = [
        {**contestant, "contestant": "pdconn", "met": 12, "goodput_per_s": 1.7619},
        {**contestant, "contestant": "other", "met": 1, "goodput_per_s": 0.0238, "wrong": 3},
    ]
    assert made("serve", serve={"contestants": rows})[2:] == [
        "| **pdconn** | 180, 9 749 | 180, 9 749 | | 12 of 12 | 1.76 | 0 |",
        "| other | 180, 9 749 | 180, 9 749 | | 1 of 12 | 0.02 | 3 |",
    ]


def test_engine_thread() -> None:
    steps = {"mean": 0.0999, "p50": 0.0567, "p99": 0.5517, "worst": 1.2809}
    side = {"name": "decode", "in_flight": 31.75, "all_steps": steps, "per_request": 0.1713}
    assert made("engine_thread", thread={"sides": [side]})[2:] == [
        "| decode | 31.8 | 0.0999 | 0.0567 | 0.552 | 1.28 | 0.171 |"
    ]


def test_pull_cost() -> None:
    summary = {
        "held_us": 1234.0, "held_least_us": 999.4, "lost_us": 2000.0, "lost_least_us": 1500.0,
        "pull_p50_ms": 3.456,
        "parts": [{"what": "pdconn-puller", "us": 1500.0, "calls": 0.0},
                  {"what": "NIXL's post", "us": 500.2, "calls": 1.0}],
    }  # fmt: skip
    assert made("pull_cost", pull={"summary": summary})[2:] == lines(
        """
        | **1 234** | 999 | 2 000 | 1 500 | 3.46 |

        | of a pull | µs | calls |
        | --- | --- | --- |
        | the puller's thread | 1 500 | 0.0 |
        | of them NIXL's post | 500 | 1.0 |
        """
    )


def test_itl_lending() -> None:
    kinds = [
        {"kind": kind, "per_s": 10.0, "p50": p50, "p99": p99}
        for kind, p50, p99 in (("cached", 8.0, 20.0), ("lent", 10.0, 25.0))
    ]
    assert made("itl_lending", itl={"kinds": kinds})[2:] == lines(
        """
        | `cached`: answered from its cache | 10.0 | 8.00 | 20.0 |
        | `lent`: the same, lent and pulled | 10.0 | 10.0 | 25.0 |

        | lent, times cached: p50 | lent, times cached: p99 |
        | --- | --- |
        | **1.250** | **1.250** |
        """
    )


def test_itl() -> None:
    kinds = [
        {"kind": kind, "per_s": per_s, "p50": p50, "p99": p99}
        for kind, per_s, p50, p99 in (
            ("quiet", 0.0, 8.0, 16.0),
            ("cached", 21.46, 10.0, 32.0),
            ("instant", 21.5, 8.0, 20.0),
            ("pulled", 21.5, 10.0, 30.0),
        )
    ]
    assert made("itl", itl={"kinds": kinds})[2:] == lines(
        """
        | none | 0.0 | 8.00 | 16.0 |
        | `cached`: answered from decode's own cache | 21.5 | 10.0 | 32.0 |
        | `instant`: wait as for a pull, and nothing is pulled | 21.5 | 8.00 | 20.0 |
        | pulled | 21.5 | 10.0 | 30.0 |

        | pulled, times instant: p50 | pulled, times instant: p99 | pulled, times cached: p50 | pulled, times cached: p99 |
        | --- | --- | --- | --- |
        | **1.250** | **1.500** | **1.000** | **0.938** |
        """  # noqa: E501
    )


# One process


def test_planning() -> None:
    planning = {
        "caches": [8192, 1 << 20],
        "rows": [{"what": "plan of 131072 tokens", "runs": 85238, "median_ms": 7.436,
                  "worst_ms": 12.1}],
        "memory": [{"what": "plan", "runs": 9, "small_nbytes": 1_390_000,
                    "large_nbytes": 1_400_000}],
    }  # fmt: skip
    assert made("planning", planning=planning) == lines(
        """
        | | runs | median, ms | worst, ms |
        | --- | --- | --- | --- |
        | plan of 131072 tokens | 85 238 | 7.44 | 12.1 |

        | | runs | peak MB, cache of 8 192 blocks | peak MB, cache of 1 048 576 blocks |
        | --- | --- | --- | --- |
        | plan | 9 | 1.39 | 1.40 |
        """
    )


def test_checksums() -> None:
    rows = [
        {"layout": layout, "block_tokens": 16, "verify": verify, "lender_gbps": lender,
         "reader_gbps": 2 * lender}
        for verify, layout, lender in (
            ("always", "LBHNC", 5.46), ("always", "BLNHC", 1.7), ("sample", "BLNHC", 3.2),
        )
    ]  # fmt: skip
    assert made("checksums", checksums={"rows": rows}) == lines(
        """
        | `verify` | layout | tokens a block | prefill, GB/s | decode, GB/s |
        | --- | --- | --- | --- | --- |
        | `always` | LBHNC | 16 | 5.5 | 11 |
        | `always` | BLNHC | 16 | 1.7 | 3.4 |
        | `sample` | BLNHC | 16 | 3.2 | 6.4 |
        """
    )


# The router


def test_trace() -> None:
    policy = {"requests": 320, "alone": 69, "prefill_cached": 0.7061, "computed": 107_337,
              "computed_share": 0.26, "ideal_share": 0.931, "pulled": 0,
              "ttft_ms": 53.4, "ttft_p95_ms": 88.2}  # fmt: skip
    rows = [
        {"policy": "prefix", **policy, "agreement": 0.997},
        {"policy": "random", **policy, "alone": 0, "agreement": None},
    ]
    pulls = [{"policy": "prefix + pulls", **policy, "pulled": 68_784, "agreement": None}]
    shown = "107 337, 26.0 % | 93.1 %"
    full = [{**pulls[0], "pulled": 9}]
    assert made("trace", trace=rows, pulls=pulls, full=full)[2:] == [
        f"| 10 to 40 tokens | prefix | 69 of 320 | {shown} | 0 | 99.7 % of requests | 53, 88 ms |",
        f"| 10 to 40 tokens | random | 0 of 320 | {shown} | 0 | | 53, 88 ms |",
        f"| 100 to 300 tokens | prefix + pulls | 69 of 320 | {shown} | 68 784 | | 53, 88 ms |",
        f"| 100 to 300, no windows | prefix + pulls | 69 of 320 | {shown} | 9 | | 53, 88 ms |",
    ]


def test_mooncake_trace() -> None:
    row = {"policy": "prefix", "prompt_tokens": 445_540, "computed": 414_420, "pulled": 0,
           "ideal_share": 0.4265, "ttft_ms": 873.7, "ttft_p95_ms": 1413.6}  # fmt: skip
    shown = "414 420 of 445 540 | 42.6 % | 0 | 874, 1414 ms |"
    assert made("mooncake_trace", **{"1": [row], "3": [row]})[2:] == [
        f"| 1 million | prefix | {shown}",
        f"| 3 million | prefix | {shown}",
    ]


def test_links() -> None:
    outcome = {"requests": 60, "pull_better": 0.7, "pulled": 0.6667, "right": 0.9667,
               "right_warm": 1.0, "over_best": 0.0041}  # fmt: skip
    slow = [{"gbit_s": 0.2, "outcome": {**outcome, "pull_better": 0.0}},
            {"gbit_s": 10.0, "outcome": outcome}]  # fmt: skip
    assert made(
        "links",
        **{
            "slow": {"links": slow[:1]},
            "others": {"links": slow[1:]},
            "large": {"links": slow[1:]},
        },
    )[2:] == [
        "| 2 500 | 0.2 | 60 | 0 % | 67 % | **96.7 %** | 100.0 % | 0.4 % |",
        "| 2 500 | 10.0 | 60 | 70 % | 67 % | **96.7 %** | 100.0 % | 0.4 % |",
        "| 20 000 | 10.0 | 60 | 70 % | 67 % | **96.7 %** | 100.0 % | 0.4 % |",
    ]


def test_real_trace() -> None:
    policy = {"policy": "prefix", "requests": 36, "alone": 30, "prefill_computed": 1897,
              "decode_computed": 3219, "ttft_ms": 40.1, "ttft_p95_ms": 83.0,
              "wrong": 0}  # fmt: skip
    assert made("real_trace", trace=[policy])[2:] == [
        "| prefix | 30 of 36 | 1 897 | 3 219 | 40, 83 ms | 0 |"
    ]


def test_routing() -> None:
    rows = [
        {"what": "full hit", "ours": 119.4, "scan": 3812.0, "unit": "us"},
        {"what": "stores", "ours": 1432.6, "scan": None, "unit": "k blocks/s"},
    ]
    assert made("routing", routing=rows) == lines(
        """
        | | router | list scan |
        | --- | --- | --- |
        | full hit | 119 µs | 3 812 µs |
        | stores | 1 433 k blocks/s | |
        """
    )


def test_proxy_cost() -> None:
    way = {"ratio": 1.0, "added_ms": 0.0, "spread_ms": [0.0, 0.0]}
    routed = {"ratio": 0.9994, "added_ms": 2.07, "spread_ms": [1.96, 2.5], "decided_ms": 0.4}
    cost = {
        "cost": [{"name": "direct", **way, "decided_ms": None}, {"name": "prefix", **routed}],
        "lag": [{"name": "idle", "median_ms": 0.81, "p95_ms": 4.04, "worst_ms": 11.0}],
    }
    assert made("proxy_cost", cost=cost) == lines(
        """
        | | tokens/s beside direct | first token, ms later | of the rounds |
        | --- | --- | --- | --- |
        | direct | 1.000 | 0.0 | 0.0 to 0.0 |
        | prefix | 0.999 | 2.1 | 2.0 to 2.5 |

        | from an engine's event to the index | median, ms | p95 | worst |
        | --- | --- | --- | --- |
        | idle | 0.8 | 4.0 | 11.0 |
        """
    )


def test_every_table_is_made_above() -> None:
    """The control: no benchmark of the catalog is forgotten here."""
    assert {f"test_{name}" for name in BENCHMARKS} <= globals().keys()


# What they are made with


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"rows": {}}, "one.rows: expected a list, got {}"),
        ([], r"one: expected an object, got \[\]"),
        ({}, "one.rows: expected a value, got nothing"),
        ({"rows": [{"what": 1, "ms": 1}]}, r"one.rows\[0\].what: expected a string, got 1"),
        ({"rows": [{"what": "a", "ms": True}]}, r"one.rows\[0\].ms: expected a number, got True"),
        ({"rows": [{"what": "a", "ms": float("nan")}]}, "ms: expected a number, got nan"),
        ({"rows": [{"what": "a"}]}, r"one.rows\[0\].ms: expected a value, got what"),
    ],
)
def test_a_field_that_is_missing_or_strange_is_named(document: object, message: str) -> None:
    def read(node: Node) -> list[str]:
        return [filled("{what:s} {ms:3}", each) for each in node["rows"].rows]

    assert read(Node("one", {"rows": [{"what": "a", "ms": 2}]})) == ["a 2.00"]
    with pytest.raises(MissingField, match=message):
        read(Node("one", document))


@pytest.mark.parametrize("rows", [[], [{"a": 1}, {"a": 1}]])
def test_a_row_that_is_not_there_once_is_named(rows: list[object]) -> None:
    message = f"one: expected one row with a=1, got {len(rows)} of them"
    with pytest.raises(MissingField, match=re.escape(message)):
        Node("one", rows).at("[a=1]")


def test_a_run_that_is_missing_is_named() -> None:
    with pytest.raises(MissingField, match=r"handover\.runs\.apart: expected a run, got reserved"):
        made("handover", reserved={"measured": [], "ratios": []})


def test_a_path_finds_fields_rows_and_items() -> None:
    node = Node("one", {"a": [{"k": "x", "v": [7, 8]}, {"k": "y", "v": None}], "n": 2})
    assert node.at("a[k=x].v[1]").whole == 8
    assert node.at("a[1].v[0].w").value is None, "below null is null"
    assert filled("{a[k=x].v[1]/n:.1f}, {a[k=x].v[0]*n}", node) == "4.0, 14"
    assert filled("{n} {a[1].v[0]:3}", node) == "", "a cell with a null is empty"
    with pytest.raises(MissingField, match=re.escape("one.a[2]: expected a value, got 2 rows")):
        node.at("a[2]")


@pytest.mark.parametrize(
    ("number", "written"),
    [(0, "0"), (0.0006, "0.000600"), (9.996, "10.0"), (99.96, "100"), (999.6, "1 000"),
     (-1.5, "-1.50")],
)  # fmt: skip
def test_numbers_are_written_with_three_digits_that_count(number: float, written: str) -> None:
    assert digits(number) == written


def test_thousands_are_set_apart_and_a_bar_does_not_end_a_cell() -> None:
    assert [spaced(number) for number in (999, 1000, 1_048_576)] == ["999", "1 000", "1 048 576"]
    rows = [{"what": "b | c", "ours": 1, "scan": None, "unit": "x"}]
    assert made("routing", routing=rows)[2] == "| b \\| c | 1.00 x | |"
