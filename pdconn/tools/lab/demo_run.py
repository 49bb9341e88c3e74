"""The demo: prefill, decode and a proxy on this machine, compared with one engine alone.

Every prompt is sent through the proxy, and to an engine without a connector.  Tokens must be equal
and log-probabilities within a tolerance.  Bytes come from the decode engine's ``/metrics``, read
before and after each request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.demo_report import DemoRow, EarlyPart
from pdconn.tools.lab.engine import Engine, missing_libraries, running
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.lab_errors import MissingBuild, MissingDependency, MissingLibrary, PortInUse
from pdconn.tools.lab.ports import LOCALHOST, free_ports, is_free
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.lab.spec import SERVED_NAME, EngineSpec
from pdconn.tools.lab.starting import StartingEngines
from pdconn.tools.output.progress_line import LogStep
from transport.nixl.builds import installed_versions, missing_build, torch_cuda_major

LENGTHS = (1, 31, 65, 200, 500, 1000, 2000, 3000)
EXTENDED = 1000
"""Tokens of the prompt that is repeated, alone and then extended, to show prefix hits."""
MORE = 120
"""Those tokens."""


@dataclass(frozen=True)
class DemoAddresses:
    """The URLs of the running demo's proxy."""

    url: str
    admin_url: str


Ended = Callable[[list[DemoRow], DemoAddresses], None]
"""Called with the results while everything is running; all processes stop when it returns."""

_COUNTED = {
    "full_bytes": "pdconn:full_attention_bytes_total",
    "window_bytes": "pdconn:window_bytes_total",
    "saved_by_window_bytes": "pdconn:saved_by_window_bytes_total",
    "saved_by_hits_bytes": "pdconn:saved_by_hits_bytes_total",
    "descriptors": "vllm:nixl_num_descriptors_sum",
    "pull_s": "pdconn:pull_seconds_sum",
    "transfer_s": "vllm:nixl_xfer_time_seconds_sum",
    "visible_s": "pdconn:pull_visible_seconds_sum",
    "early_bytes": "pdconn:early_bytes_total",
    "followed": "pdconn:pulls_followed_total",
}
_SERIES = (
    ("full_bytes", "full attention, pulled", "#1f5fa8"),
    ("window_bytes", "windows, pulled", "#56a3e8"),
    ("saved_by_window_bytes", "not moved: outside every window", "#d9d9d9"),
    ("saved_by_hits_bytes", "not moved: decode had it", "#efe3b0"),
)

_EARLY_COLOUR = "#e08a3c"


@dataclass(frozen=True)
class DemoPlan:
    """The settings of a demo.

    ``vocab`` bounds the prompts' random token ids, ``layout`` is None for the engine's own choice,
    ``args`` are further arguments of all three engines; ``streams``: the proxy asks decode while
    prefill computes.
    """

    model: str | Path
    directory: Path
    vocab: int
    device: str = "cpu"
    layout: str | None = "BHLNC"
    max_tokens: int = 16
    max_model_len: int = 4096
    tolerance: float = 1e-3
    port: int | None = None
    streams: bool = False
    args: tuple[str, ...] = ()
    prefill_env: Mapping[str, str] = field(default_factory=dict)
    decode_env: Mapping[str, str] = field(default_factory=dict)
    decode_extra_config: Mapping[str, Any] = field(default_factory=dict)


def run_demo(plan: DemoPlan, log_step: LogStep, ended: Ended) -> None:
    """Start the engines and the proxy, send every prompt, call ``ended``, stop them.

    Raises:
        LabError: a process could not be started, or died; nothing is left running.
    """
    # The admin pages' port too.
    for port in () if plan.port is None else (plan.port, plan.port + 1):
        if not is_free(port):
            raise PortInUse("proxy", LOCALHOST, port)
    options = ("--streams", "on") if plan.streams else ()
    with (
        _engines(plan, log_step) as (prefill, decode, alone),
        running_proxy([prefill.url], [decode.url], plan.directory, plan.port, options) as url,
    ):
        log_step(f"proxy ready at {url}, its live page at {admin_url(url)}/")
        log_step(f"send a request: {curl(url)}")
        through, reference = Client(url), Client(alone.url)
        log_step("warming up: an engine's first request is its slowest")
        for client in (through, reference):
            client.complete(make_prompts([70], seed=9, vocab=plan.vocab)[0], 2)
        rows = []
        for label, prompt in _prompts(plan):
            before = _counted(decode, url)
            seen = through.stream(prompt, plan.max_tokens, top=5).answer
            after = _counted(decode, url)
            expected = reference.stream(prompt, plan.max_tokens, top=5).answer
            mismatch = compare(expected, seen, plan.tolerance)
            rows.append(
                _row(label, len(prompt), before, after, None if mismatch is None else str(mismatch))
            )
            log_step(f"{label}: {'agrees' if mismatch is None else mismatch}")
        ended(rows, DemoAddresses(url, admin_url(url)))
        log_step("stopping")


def curl(url: str) -> str:
    """A command that sends a request to the proxy at ``url``."""
    body = json.dumps({"model": SERVED_NAME, "prompt": "Once upon a time", "max_tokens": 16})
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"


def check_dependencies() -> None:
    """Check installed packages before the engines start, which takes minutes.

    Raises:
        MissingDependency: naming the package.
        MissingLibrary: vLLM would not load.
        MissingBuild: NIXL would not load beside this torch.
    """
    for package in ("vllm", "nixl", "torch", "transformers"):
        if find_spec(package) is None:
            raise MissingDependency(package)
    for library, packages in missing_libraries().items():
        raise MissingLibrary(library, packages)
    missing = missing_build(installed_versions(), torch_cuda_major())
    if missing is not None:
        raise MissingBuild(missing)


def _prompts(plan: DemoPlan) -> Iterator[tuple[str, tuple[int, ...]]]:
    lengths = [n for n in LENGTHS if n + plan.max_tokens <= plan.max_model_len]
    prompts = make_prompts(lengths, seed=1, vocab=plan.vocab)
    for number, prompt in enumerate(prompts, 1):
        yield f"prompt {number} of {len(prompts) + 2}, {len(prompt)} tokens", prompt
    room = plan.max_model_len - plan.max_tokens - MORE
    seen = max((one for one in prompts if len(one) <= min(room, EXTENDED)), key=len)
    more = make_prompts([MORE], seed=2, vocab=plan.vocab)[0]
    total = len(prompts) + 2
    yield f"prompt {total - 1} of {total}, asked before", seen
    yield f"prompt {total} of {total}, asked before and {len(more)} tokens more", seen + more


def _row(
    label: str,
    prompt_tokens: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
    mismatch: str | None,
) -> DemoRow:
    change = {name: after[name] - before[name] for name in after}
    whole = {
        name: int(change[name])
        for name in (
            "full_bytes", "window_bytes", "saved_by_window_bytes", "saved_by_hits_bytes",
            "descriptors",
        )
    }  # fmt: skip
    return DemoRow(
        label=label,
        prompt_tokens=prompt_tokens,
        **whole,
        pull_s=change["pull_s"],
        transfer_s=change["transfer_s"],
        handover_s=change["handover_s"],
        mismatch=mismatch,
        early=_early(change),
    )


def _early(change: Mapping[str, float]) -> EarlyPart:
    if not change["followed"]:
        return EarlyPart()
    hidden_s = max(0.0, change["pull_s"] - change["visible_s"])
    return EarlyPart(True, int(change["early_bytes"]), hidden_s)


def _counted(decode: Engine, proxy_url: str) -> dict[str, float]:
    samples = Client(decode.url).metrics()
    counted = {name: samples.get(sample, 0.0) for name, sample in _COUNTED.items()}
    proxied = Client(admin_url(proxy_url)).metrics()
    counted["handover_s"] = proxied.get("pdconn_router_decode_first_byte_seconds_sum", 0.0)
    return counted


@contextmanager
def _engines(plan: DemoPlan, log_step: LogStep) -> Iterator[tuple[Engine, ...]]:
    log_step(f"model: {plan.model}, served as {SERVED_NAME!r}")
    log_step(
        "starting three vLLM engines: prefill, decode, and one alone to compare with; "
        f"their logs are {plan.directory}/NAME.log"
    )
    progress = StartingEngines(log_step)
    with running(demo_specs(plan), plan.directory, progress=progress.show) as engines:
        for engine in engines:
            log_step(f"{engine.spec.name} ready at {engine.url} after {engine.boot_s:.0f} s")
        yield engines


def demo_specs(plan: DemoPlan) -> list[EngineSpec]:
    """Prefill, decode, and one engine alone."""
    ports = free_ports(4)
    cores = os.cpu_count() or 1
    common: dict[str, Any] = {
        "model": plan.model,
        "max_model_len": plan.max_model_len,
        "prefix_caching": True,
        "device": plan.device,
        "args": plan.args,
    }
    pinned = plan.device == "cpu" and cores > 1
    return [
        EngineSpec(
            name="prefill",
            port=ports[0],
            side_channel_port=ports[3],
            layout=plan.layout,
            cpus=(0,) if pinned else None,
            kv_transfer_config=_transfer("kv_producer", {}),
            env=plan.prefill_env,
            **common,
        ),
        EngineSpec(
            name="decode",
            port=ports[1],
            layout=plan.layout,
            cpus=(1,) if pinned else None,
            kv_transfer_config=_transfer("kv_consumer", plan.decode_extra_config),
            env=plan.decode_env,
            **common,
        ),
        EngineSpec(
            name="alone",
            port=ports[2],
            cpus=(0,) if pinned else None,
            **{**common, "prefix_caching": False},
        ),
    ]


def _transfer(role: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "PdconnConnector",
        "kv_connector_module_path": "pdconn.vllm",
        "kv_role": role,
        "kv_connector_extra_config": dict(extra),
    }


def draw(rows: Sequence[DemoRow], path: Path) -> None:
    """Write a PNG: bytes that moved and did not, and times; what lay behind prefill is below 0.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{row.prompt_tokens}" for row in rows]
    places = range(len(rows))
    figure, (bytes_axes, time_axes) = plt.subplots(1, 2, figsize=(12, 4.5))
    bottom = [0.0] * len(rows)
    for name, label, colour in _SERIES:
        heights = [getattr(row, name) / 1e6 for row in rows]
        bytes_axes.bar(places, heights, bottom=bottom, label=label, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    is_streamed = any(row.early.is_followed for row in rows)
    if is_streamed:
        early = [row.early.nbytes / 1e6 for row in rows]
        label = "of it, read while prefill computed"
        bytes_axes.bar(places, early, label=label, fill=False, hatch="///", edgecolor=_EARLY_COLOUR)
    bytes_axes.set_ylabel("MB per request")
    bytes_axes.set_title("KV of a prompt: what moved and what did not")
    bytes_axes.legend(fontsize=8)
    handover = [1e3 * row.handover_s for row in rows]
    pull = [1e3 * row.visible_s for row in rows]
    time_axes.bar(
        places, handover, color="#c8c8c8", label="handover: prefill's answer to first byte"
    )
    time_axes.bar(places, pull, color="#1f5fa8", label="of it, the pull")
    if is_streamed:
        hidden = [-1e3 * row.early.seconds for row in rows]
        time_axes.bar(places, hidden, color=_EARLY_COLOUR, label="the pull while prefill computed")
        time_axes.axhline(0, color="black", linewidth=0.8)
    time_axes.set_ylabel("ms from prefill's end" if is_streamed else "ms")
    time_axes.set_title("Handover from prefill to decode")
    time_axes.legend(fontsize=8)
    for axes in (bytes_axes, time_axes):
        axes.set_xticks(list(places), names, rotation=45)
        axes.set_xlabel("prompt tokens (the last two were sent before)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
