"""The settings of an engine, and its command line and environment.

Pure: nothing is started or looked up here.

Cores.  On a CPU vLLM binds a worker's OpenMP threads to its assigned cores; other processes are not
bound.  By default an engine with a connector gets *all* cores of a small machine, so two engines
would compute on the same cores.  ``cpus=(0,)`` for prefill and ``cpus=(1,)`` for decode assigns one
core to each; with ``cpus=None`` threads are not bound, one per rank, which suits several ranks on
few cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pdconn.tools.lab.ports import LOCALHOST

SERVED_NAME = "lab"

_NOT_INHERITED = ("VLLM_", "PDCONN_", "OMP_", "GOMP_", "KMP_")
"""Prefixes of environment variables that an engine gets from its spec only."""


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM engine on this machine.

    Attributes:
        name: for messages and the log's file name.
        model: a model's directory, or its name on a hub.
        port: HTTP port.
        kv_transfer_config: in vLLM's form; None for an engine without connector.
        side_channel_port: port of the connector's side channel, if any.
        layout: KV memory order, e.g. ``BHLNC``; None for vLLM's own choice.
        prefix_caching: whether to reuse KV of earlier requests.
        tensor_parallel: number of ranks.
        cpus: one core for each rank's model threads; None does not bind them.
        one_process: run the worker inside the engine core's process, as vLLM does
            for one GPU.  On a CPU it starts in two thirds of the time.  For one rank.
        kv_cache_mib: memory for KV, in MiB.
        num_blocks: overrides the number of blocks.
        block_tokens: tokens per block; the CPU's kernels need multiples of 32.
        max_model_len: maximum tokens of prompt and answer together.
        drain_s: vLLM's shutdown time-out for running requests and its own processes;
            they take about three seconds.
        device: with ``gpu`` vLLM chooses memory, cores and dtype.
        env: further environment variables; they override all others.
        args: further command line arguments.
        within: prefix of the command line, such as ``ip netns exec NAME``; its ports are then not
            checked.
    """

    name: str
    model: str | Path
    port: int
    host: str = LOCALHOST
    kv_transfer_config: Mapping[str, Any] | None = None
    side_channel_port: int | None = None
    layout: str | None = None
    prefix_caching: bool = False
    tensor_parallel: int = 1
    cpus: tuple[int, ...] | None = None
    one_process: bool = False
    kv_cache_mib: int = 256
    num_blocks: int | None = None
    block_tokens: int = 32
    max_model_len: int = 4096
    drain_s: int = 10
    device: Literal["cpu", "gpu"] = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    within: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.cpus is not None and len(self.cpus) != self.tensor_parallel:
            raise ValueError(
                f"{self.name}: {len(self.cpus)} cores given for {self.tensor_parallel} ranks"
            )
        if self.one_process and self.tensor_parallel != 1:
            raise ValueError(
                f"{self.name}: {self.tensor_parallel} ranks do not fit into one process"
            )

    def command(self) -> list[str]:
        """The command line, for this interpreter."""
        words = [*self.within, sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for option, value in self._options().items():
            words += [f"--{option}", str(value)]
        for option, on in self._switches().items():
            words += [f"--{option}" if on else f"--no-{option}"]
        return [*words, "--disable-uvicorn-access-log", *self.args]

    def _options(self) -> dict[str, object]:
        options: dict[str, object] = {
            "model": self.model,
            "served-model-name": SERVED_NAME,
            "host": self.host,
            "port": self.port,
            "block-size": self.block_tokens,
            "max-model-len": self.max_model_len,
            "tensor-parallel-size": self.tensor_parallel,
            "shutdown-timeout": self.drain_s,
        }
        if self.device == "cpu":
            # With a given size, vLLM does not run the model to determine it.
            options["kv-cache-memory-bytes"] = self.kv_cache_mib << 20
            options["dtype"] = "float32"
        if self.num_blocks is not None:
            options["num-gpu-blocks-override"] = self.num_blocks
        if self.kv_transfer_config is not None:
            options["kv-transfer-config"] = json.dumps(dict(self.kv_transfer_config))
        return options

    def _switches(self) -> dict[str, bool]:
        switches = {
            "enable-prefix-caching": self.prefix_caching,
            "enable-log-requests": False,
        }
        if self.device == "cpu":
            switches["enforce-eager"] = True  # compiling takes minutes and is not faster here
        return switches

    def environment(self, inherited: Mapping[str, str], cache: Path) -> dict[str, str]:
        """All environment variables; ``inherited`` are those of this process.

        ``cache`` is vLLM's cache folder; without the cached inspection of the model's class, a
        start takes ten seconds longer.
        """
        env = {
            name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)
        }
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # importing vLLM without bytecode takes minutes
        env |= {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(cache),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if isinstance(self.model, Path):
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.side_channel_port is not None:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = self.host
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
        if self.layout is not None:
            env |= {"VLLM_KV_CACHE_LAYOUT": self.layout, "PDCONN_CPU_LAYOUTS": "1"}
        if self.device == "cpu":
            # Otherwise vLLM compiles its samplers at the first request, which takes half a minute.
            env |= {"TORCHDYNAMO_DISABLE": "1", "PDCONN_FORK_ENGINES": "1"} | self._cores()
        if self.device == "cpu" and self.tensor_parallel > 1:
            env["PDCONN_PATIENT_READERS"] = "1"  # more processes than a small machine has cores
        return env | dict(self.env)

    def _cores(self) -> dict[str, str]:
        if self.one_process:
            # vLLM binds the threads of separate worker processes only.
            return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        if self.cpus is None:
            return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        # One thread per rank; vLLM's other processes need no more either.
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, self.cpus)), "OMP_NUM_THREADS": "1"}
