"""vLLM's plugin ``pdconn-cpu``: one change of vLLM per variable that is set to 1.

Engines with a GPU or in production need none of them, so the connector's own plugin has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pdconn.tools.lab.cpu_engines.forks import fork_engines

CPU_LAYOUTS = ("LBHNC", "BLHNC", "BHLNC")
"""Layouts that vLLM's CPU kernels run with, since they honour strides."""

_NAP_S = 0.0002
_LOOK_MS = 50


def register(environ: Mapping[str, str] = os.environ) -> None:
    """Called once in every vLLM process, before workers choose their layouts."""
    for variable, change in CHANGES.items():
        if environ.get(variable) == "1":
            change()


def let_readers_sleep() -> None:
    """Make the readers of vLLM's shared-memory queues sleep between polls.

    Readers here are the processes of one engine that wait for each other's messages (its engine
    core and its workers), not the decode engines that read lent blocks.

    A worker and its engine call ``sched_yield`` in a loop for a second after every message.  With
    more such processes than cores that starves all others: on two cores and Linux 6.18, two engines
    of two ranks stopped each other's threads, and the kernel's, for seconds at a time.  A sleep of
    0.2 ms costs less than a step.
    """
    import time

    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    sleeping = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(_NAP_S)
        else:  # a notification can be lost, so poll now and then
            sleeping(self, _LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))

    SpinCondition.wait = wait


def allow_cpu_layouts() -> None:
    """Allow block-outermost layouts on the CPU backend (``VLLM_KV_CACHE_LAYOUT``).

    It declares layer-outermost layouts only, but its kernels take every stride from the tensors;
    the three layouts give identical tokens and log-probabilities.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in CPU_LAYOUTS)

    def supported_kv_cache_layouts(cls: type) -> tuple[KVCacheLayout, ...]:
        return layouts

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported_kv_cache_layouts)


def split_prefills_for_states() -> None:
    """Let vLLM keep the states of Mamba2 layers for its prefix cache on a CPU.

    On a GPU a pass over a prompt exports the states at block boundaries.  The CPU's scan has no
    such states, and the engine ends with an IndexError; without the export vLLM ends the pass
    there, as for other layers.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    exporting = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: MambaMixer2, vllm_config: Any) -> Any:
        spec = exporting(self, vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


CHANGES: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "PDCONN_CPU_LAYOUTS": allow_cpu_layouts,
        "PDCONN_CPU_STATES": split_prefills_for_states,
        "PDCONN_PATIENT_READERS": let_readers_sleep,
        "PDCONN_FORK_ENGINES": fork_engines,
    }
)
"""The changes by the variable that enables each."""
