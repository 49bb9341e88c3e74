"""The routers that are compared, each a process over the same two engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdconn.tools.lab.ports import LOCALHOST, free_ports
from tests.router.picker.gateway import Filter, running_envoy_process
from tests.throughput.proxy_cost.processes import listening, started
from tests.throughput.proxy_cpu.used import used_s

_OURS = Path(__file__).parents[3]


@dataclass(frozen=True)
class RawFleet:
    """Where both engines are asked; ``publishing``: prefill's word with its events."""

    prefill: str
    decode: str
    publishing: str


@contextmanager
def raw_fleet(place: Path, writes: int) -> Iterator[RawFleet]:
    """Both engines; ``writes``: chunks that leave decode in one write."""
    prefill, decode, events, replay = free_ports(4)
    module, words = "tests.throughput.proxy_cpu.raw_engines", (prefill, decode, events, replay)
    with listening("engines", module, (*words, writes), decode, place):
        url = f"http://{LOCALHOST}:{prefill}"
        publishing = f"events=tcp://{LOCALHOST}:{events},replay=tcp://{LOCALHOST}:{replay}"
        yield RawFleet(url, f"http://{LOCALHOST}:{decode}", f"{url},{publishing}")


@dataclass(frozen=True)
class RunningRouter:
    """A router that listens, and its processes by what is shown of them."""

    port: int
    pids: Mapping[str, tuple[int, ...]]

    def used_s(self) -> dict[str, float]:
        """Processor time so far, by what is shown."""
        return {part: sum(map(used_s, pids)) for part, pids in self.pids.items()}


@contextmanager
def our_router(
    name: str,
    fleet: RawFleet,
    place: Path,
    *,
    policy: str,
    looks_up: bool,
    tree: Path | None,
    mode: str | None = None,
) -> Iterator[RunningRouter]:
    """``pdconn proxy``, of another source tree if there is one.

    With a ``mode`` of its filter, ``pdconn picker`` behind an Envoy.
    """
    port, admin = free_ports(2)
    kind = "proxy" if mode is None else "picker"
    prefill = fleet.publishing if looks_up else fleet.prefill
    # -P: the tree that the environment names, not that of the working directory.
    command = [sys.executable, "-P", "-m", "pdconn.tools.cli.main", kind, "--policy", policy]
    command += ["--port", str(port), "--admin-port", str(admin), "--log-level", "info"]
    command += ["--prefill", prefill, "--decode", fleet.decode]
    env = {**os.environ, "PYTHONPATH": str(tree or _OURS)}
    with started(name, command, port, place, env) as process:
        if mode is None:
            yield RunningRouter(port, {"": (process.pid,)})
            return
        with running_envoy_process(port, [fleet.decode], Filter(mode)) as (url, envoy):
            parts = {"": (process.pid, envoy), ", of it the picker": (process.pid,)}
            yield RunningRouter(int(url.rpartition(":")[2]), parts)


@contextmanager
def rival_router(name: str, program: Path, fleet: RawFleet, place: Path) -> Iterator[RunningRouter]:
    """vllm-router in P/D mode."""
    port, metrics = free_ports(2)
    command = [str(program), "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "warning"]
    command += ["--prefill", fleet.prefill, "--decode", fleet.decode]
    with started(name, command, port, place) as process:
        yield RunningRouter(port, {"": (process.pid,)})
