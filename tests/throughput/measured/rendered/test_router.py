"""Measured tables of the router, from a small result to the Markdown, by hand."""

from __future__ import annotations

from tests.throughput.measured.rendered.made import lines, made


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


def test_proxy_cpu() -> None:
    row = {"name": "pdconn, round-robin", "prompt_tokens": 32_000, "json_ms": 0.8444,
           "stream_ms": 2.8125, "spread_ms": [2.45, 3.311], "chunk_us": 31.34}  # fmt: skip
    assert made("proxy_cpu", cpu={"router": [row]})[2:] == [
        "| pdconn, round-robin | 32 000 | 0.84 | 2.81 | 2.45 to 3.31 | 31 |"
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


def test_index() -> None:
    row = {"name": "Dynamo, RadixTree", "ops": 1_234_567, "kops_s": 5436.2, "p50_us": 26.4,
           "p99_us": 137.0, "wall_p50_us": 27.0, "wall_p99_us": 164.2, "block_nbytes": 111.8,
           "wrong": 0, "look_ups": 2000, "shorter": 0}  # fmt: skip
    assert made("index", index={"index": [row]})[2:] == [
        "| Dynamo, RadixTree | 1 234 567 | 5436 | 26 | 137 | 27, 164 | 112 | 0 of 2 000 | 0 |"
    ]


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


def test_roles() -> None:
    row = {"way": "followed", "minutes": 5.0, "prompts": 0.9312, "answers": 0.98, "again": 0.9,
           "whole": 0.935, "requests": 4000, "lost": 0, "wrong": 0, "changes": 2,
           "first_error": None}  # fmt: skip
    fixed = {**row, "way": "1:2", "minutes": 2.0, "again": None, "changes": 0}
    assert made("roles", roles={"rows": [row, fixed]})[2:] == [
        "| followed | 5.0 | 93.1 % | 98.0 % | 90.0 % | 93.5 % | 4 000 | 0 | 0 | 2 |",
        "| 1:2 | 2.0 | 93.1 % | 98.0 % | | 93.5 % | 4 000 | 0 | 0 | 0 |",
    ]
