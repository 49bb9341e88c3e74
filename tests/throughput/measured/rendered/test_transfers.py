"""Measured tables of moving bytes, from a small result to the Markdown, by hand."""

from __future__ import annotations

from tests.throughput.measured.rendered.made import lines, made


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


def test_mooncake() -> None:
    case = {
        "path": "tcp",
        "prompt_tokens": 4096,
        "block_tokens": 8,
        "lines": [line("pdconn", 1.5, 0.75), line("raw", 2.0, 1.0), line("memcpy", 10.0, None),
                  line("mooncake", 1.2, 0.6)],
    }  # fmt: skip
    others = [case | {"path": path} for path in ("shm-huge", "tcp-ucx")]
    cases = {"small": {"cases": others}, "mooncake": {"cases": [case]}}
    assert made("mooncake", **cases)[2:] == [
        "| CMA, huge pages | 1 024 | 1.50 | 2.00 | 1.20 | **1.25** |",
        "| the same, `transport: ucx` | 1 024 | 1.50 | 2.00 | 1.20 | **1.25** |",
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


def test_ucx_backend() -> None:
    size = {"block_kib": 1024, "nixl": 1.6823, "ucx": 1.7688, "ratio": 1.0614, "low": 0.894,
            "high": 1.3076}  # fmt: skip
    taken = {"contestant": "pdconn-tcp-ucx", "tokens": 200, "median_s": 0.0254, "worst_s": 0.1}
    rows = made("ucx_backend", ucx={"sizes": [size]}, handover={"measured": [taken]})
    assert "| 1 024 | 1.68 | 1.77 | **1.06** | 0.89 to 1.31 |" in rows
    assert "| pdconn over TCP, `transport: ucx` | 200 | 25.4 | 100 |" in rows


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
