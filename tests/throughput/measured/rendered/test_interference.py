"""Measured tables of what an engine notices, from a small result to the Markdown, by hand."""

from __future__ import annotations

from tests.throughput.measured.rendered.made import lines, made


def test_lender_load() -> None:
    summary = {"lender_cpu": 0.2812, "lender_cpu_least": 0.2006, "lender_cpu_idle": 0.0,
               "step_p50_ratio": 0.958, "step_p99_ratio": 1.31, "claim_p50_ms": 2.96,
               "claim_p99_ms": 8.1}  # fmt: skip
    each = {"readers": 64, "renew": "along", "rate": 1000.0, "slices": 8, "summary": summary}
    plain = {**each, "lender": "ours"}
    found = made(
        "lender_load",
        each=each,
        in_all={**each, "rate": 333.3, "summary": {**summary, "lender_cpu": 0.0912}},
        alone={**each, "renew": "alone"},
        long_steps={**each, "slices": 80},
        plain=plain,
        python={**plain, "lender": "python"},
        c={**plain, "lender": "c", "summary": {**summary, "lender_cpu": 0.0151}},
    )
    assert found[2:] == lines(
        """
        | 64 | along | 8 | 333 | 9.1 % | 20.1 % | 0.0 % | 0.96 | 1.31 | 3.0 | 8.1 |
        | 64 | along | 8 | 1000 | 28.1 % | 20.1 % | 0.0 % | 0.96 | 1.31 | 3.0 | 8.1 |
        | 64 | alone | 8 | 1000 | 28.1 % | 20.1 % | 0.0 % | 0.96 | 1.31 | 3.0 | 8.1 |
        | 64 | along | 80 | 1000 | 28.1 % | 20.1 % | 0.0 % | 0.96 | 1.31 | 3.0 | 8.1 |

        | lender | its thread, of a core: median | least | scheduler steps, times: median | p99 |
        | --- | --- | --- | --- | --- |
        | ours | 28.1 % | 20.1 % | 0.96 | 1.31 |
        | python | 28.1 % | 20.1 % | 0.96 | 1.31 |
        | c | 1.5 % | 20.1 % | 0.96 | 1.31 |
        """
    )


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
                  {"what": "NIXL's create", "us": 80.4, "calls": 1.0},
                  {"what": "NIXL's post", "us": 500.2, "calls": 1.0}],
    }  # fmt: skip
    assert made("pull_cost", pull={"summary": summary})[2:] == lines(
        """
        | **1 234** | 999 | 2 000 | 1 500 | 3.46 |

        | of a pull | µs | calls |
        | --- | --- | --- |
        | the puller's thread | 1 500 | 0.0 |
        | of them NIXL's check of the descriptors | 80.4 | 1.0 |
        | NIXL's post | 500 | 1.0 |
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
