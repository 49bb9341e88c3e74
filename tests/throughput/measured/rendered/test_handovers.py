"""Measured tables of handovers, from a small result to the Markdown, by hand."""

from __future__ import annotations

from tests.throughput.measured.rendered.made import lines, made


def row(contestant: str, tokens: int, *numbers: float, failed: int = 0) -> dict[str, object]:
    median, worst, prefill = numbers
    return {"contestant": contestant, "tokens": tokens, "median_s": median, "worst_s": worst,
            "prefill_median_s": prefill, "failed": failed}  # fmt: skip


def test_handover() -> None:
    claim = "pdconn, 3000 tokens: median handover / full prefill"
    apart = {
        "measured": [row("in-tree-tuned", 3000, 0.0883, 3.391, 1.923, failed=2),
                     row("alone", 1, 0.0125, 0.067, 0.0)],
        "ratios": [{"claim": claim, "ratio": 0.2, "bound": 0.15, "holds": False}],
    }  # fmt: skip
    assert made("handover", apart=apart) == lines(
        """
        | | tokens | prefill, ms | median, ms | worst, ms | failed |
        | --- | --- | --- | --- | --- | --- |
        | NixlConnector, NIXL's progress thread at rest | 3 000 | 1 923 | 88.3 | 3 391 | 2 |
        | one engine alone | 1 | 0 | 12.5 | 67.0 | 0 |

        | ratio | measured | target, at most |
        | --- | --- | --- |
        | pdconn, 3000 tokens: median handover / full prefill | 0.20 | 0.15 |
        """
    )


def test_handover_reserved() -> None:
    claim = "pdconn, 3000 tokens: median / in-tree median"
    reserved = {
        "measured": [row("alone", 1, 0.0117, 0.044, 0.0),
                     row("in-tree", 3000, 30.107, 68.4, 1.6, failed=2)],
        "ratios": [{"claim": claim, "ratio": 0.00112, "bound": 0.1, "holds": True}],
    }  # fmt: skip
    assert made("handover_reserved", reserved=reserved) == lines(
        """
        | | tokens | prefill, ms | median, ms | worst, ms | failed |
        | --- | --- | --- | --- | --- | --- |
        | one engine alone | 1 | 0 | 11.7 | 44.0 | 0 |
        | vLLM's in-tree NixlConnector | 3 000 | 1 600 | 30 107 | 68 400 | 2 |

        | ratio | measured | target, at most |
        | --- | --- | --- |
        | pdconn, 3000 tokens: median / in-tree median | 0.0011 | 0.10 |
        """
    )


def test_followed() -> None:
    fields = ("mbits", "tokens", "mode", "first_token_s", "handover_s", "prefill_s", "visible_s",
              "held_s", "early_share")  # fmt: skip
    alone = (None, 3000, "alone", 0.4466, 0.4466, 0.0, 0.0, 0.0, 0.0)
    off = (None, 3000, "off", 0.4454, 0.0199, 0.4244, 0.0024, 0.0024, 0.0)
    on = (200.0, 4096, "on", 1.6211, 0.2339, 1.3892, 0.2219, 1.5887, 0.846)
    cores, chunks, links = (
        {"measured": [dict(zip(fields, one, strict=True)) for one in rows]}
        for rows in ([alone], [off], [on])
    )
    head = "prompt, tokens | decode is asked | first token, ms | after prefill's answer | prefill"
    head += " | visible | held | read early"
    assert made("followed", cores=cores, chunks=chunks, links=links) == lines(
        f"""
        | {head} |
        | --- | --- | --- | --- | --- | --- | --- | --- |
        | 3 000 | one engine alone | 447 | 447 | 0 | 0 | 0 | 0 % |

        | {head} |
        | --- | --- | --- | --- | --- | --- | --- | --- |
        | 3 000 | after prefill | 445 | 19.9 | 424 | 2.40 | 2.40 | 0 % |

        | link, Mbit/s | {head} |
        | --- | --- | --- | --- | --- | --- | --- | --- | --- |
        | 200 | 4 096 | at once, with a stream | 1 621 | 234 | 1 389 | 222 | 1 589 | 85 % |
        """
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


def test_serve_streams() -> None:
    times = {"p50_s": 0.18, "p99_s": 9.749}
    row = {"ttft": times, "itl": times, "handover": times, "requests": 576, "wrong": 0}
    load = {**row, "contestant": "pdconn-streams", "met": 471, "goodput_per_s": 10.119}
    rate = {**row, "contestant": "pdconn", "met": 300, "goodput_per_s": 8.3}
    found = made("serve_streams", load={"contestants": [load]}, rate={"contestants": [rate]})
    shown = "180, 9 749 | 180, 9 749 | 180, 9 749"
    assert f"| pdconn, `--streams on` | {shown} | 471 of 576 | 10.12 | 0 |" in found
    assert found[-1] == f"| **pdconn** | {shown} | 300 of 576 | 8.30 | 0 |"
