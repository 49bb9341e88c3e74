"""What vLLM's CPU workers do with the kernels of every module, done once before the fork.

Without Triton each worker replaces some kernels by functions, wherever a module refers to one: a
look at every name of every module, a quarter of a second in which all engines do the same.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


def _already(cls: type[CpuPlatform]) -> None:
    """The modules of which a fork begins refer to the functions."""


CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = classmethod(_already)
