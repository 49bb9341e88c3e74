"""The layout that vLLM takes for an engine: of those that its pages and its backend allow.

vLLM asks every attention backend for the layouts that its kernels read, best first; most read
any.  Of what all of them offer it takes the connector's preference if that is among them, and
the first otherwise.  pdconn prefers :data:`PREFERRED`, as vLLM's own connectors do: heads lie
outside tokens, so that a head's share of a block is one piece, no backend reads it slower, and it
is never a reason to refuse a model.  Where layers keep an MLA latent there is one head, and
nothing to prefer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

PREFERRED = "LBHNC"

_DEFAULT = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
"""vLLM's order without a preference; backends whose pages need blocks outermost name BLHNC."""

OFFERED: Mapping[str, tuple[str, ...] | None] = MappingProxyType(
    {
        "FLASH_ATTN": None,
        "TRITON_ATTN": None,
        "FLASHINFER": None,
        "FLASHINFER_SM100": ("LBHNC", "BLHNC"),
        "B12X": ("LBHNC", "BLHNC"),
        "FLEX_ATTENTION": ("LBNHC",),
        "HPC_ATTN": ("LBNHC",),
        "TURBOQUANT": ("LBNHC",),
        "CPU_ATTN": ("LBHNC",),
        "ROCM_ATTN": ("LHBNC", "LBHNC"),
        "ROCM_AITER_FA": ("LBHNC", "LHBNC"),
        "ROCM_AITER_UNIFIED_ATTN": ("LBHNC",),
    }
)
"""Layouts that the kernels of a backend read, best first; None for any.

FlashInfer is there twice, as its kernels for data-centre Blackwell read fewer.  Of ROCm's backends
pdconn takes the first: the others go without their native kernels.
"""


def chosen_layout(possible: Sequence[str], backend: str, *, is_latent: bool) -> str | None:
    """What vLLM takes of the layouts that pages can be kept in; None if the backend reads none.

    Args:
        backend: a key of :data:`OFFERED`; empty for one that reads any layout.
        is_latent: whether all attention keeps latents, of one head.

    >>> chosen_layout(("LBHNC", "LBNHC", "BLHNC"), "", is_latent=False)
    'LBHNC'
    >>> chosen_layout(("LBHNC", "LBNHC", "BLHNC"), "FLEX_ATTENTION", is_latent=False)
    'LBNHC'
    """
    offered = (OFFERED[backend] if backend else None) or _DEFAULT
    candidates = [layout for layout in offered if layout in possible]
    if not is_latent and not backend.startswith("ROCM") and PREFERRED in candidates:
        return PREFERRED
    return candidates[0] if candidates else None
