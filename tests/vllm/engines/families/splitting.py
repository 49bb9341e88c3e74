"""``PdconnConnector`` in an engine whose attention kernels take blocks of 32 tokens and no other.

So vLLM splits larger blocks, as it does on GPUs for kernels of one size.
"""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from pdconn.vllm import PdconnConnector

__all__ = ["PdconnConnector"]

KERNEL_TOKENS = 32

CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(  # type: ignore[method-assign]
    lambda kv_cache_spec=None: [KERNEL_TOKENS]
)
