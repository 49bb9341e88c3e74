"""vLLM's plugin entry point: the connector's name, and layouts for the CPU backend."""

from __future__ import annotations

import os

CPU_LAYOUTS = ("LBHNC", "BLHNC", "BHLNC")
"""Layouts that vLLM's CPU kernels run with, since they honour strides."""


def register() -> None:
    """Called once in every vLLM process, before workers name their layouts."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "PdConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("PdConnector", "pdconn.vllm.connector", "PdConnector")
    if os.environ.get("PDCONN_CPU_LAYOUTS") == "1":
        allow_cpu_layouts()


def allow_cpu_layouts() -> None:
    """Let the CPU backend use block-outermost layouts (``VLLM_KV_CACHE_LAYOUT``).

    It declares layer-outermost only, but its kernels take every stride from the
    tensors; the three layouts give identical tokens and log-probabilities.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in CPU_LAYOUTS)

    def supported_kv_cache_layouts(cls: type) -> tuple[KVCacheLayout, ...]:
        return layouts

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported_kv_cache_layouts)
