"""KV memory in the layouts that vLLM names: L(ayer), B(lock), H(ead), N (tokens), C(ontent).

A name is a memory order from outer to inner.  It decides two things at different places: the
order of a layer's own axes, and how layers lie beside each other::

    LBHNC LBNHC LHBNC    every layer has memory of its own
    BLHNC BLNHC          a block of all layers lies together
    BHLNC                a block and head of all layers does
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from registration.allocation.allocate import HeadMajor, KVCacheAllocation, allocate
from registration.allocation.contents import AttentionTensor
from registration.allocation.layers import GroupPages
from registration.allocation.strided import Axis
from registration.references import RegistrationError

_AXES = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CONTENT)

STRIDE_ORDERS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "LBHNC": (0, 1, 2, 3),
        "LBNHC": (0, 2, 1, 3),
        "LHBNC": (1, 0, 2, 3),
        "BLHNC": (0, 1, 2, 3),
        "BLNHC": (0, 2, 1, 3),
        "BHLNC": (0, 1, 2, 3),
    }
)
"""Of each layout, the axes block, head, token and content of a layer, outermost first."""


def attention_in(
    layout: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    first_head: int = 0,
) -> AttentionTensor:
    """A layer's tensor of ``shape`` (blocks, heads, tokens, content), in the order of ``layout``.

    Raises:
        RegistrationError: there is no such layout, or no such tensor.
    """
    return AttentionTensor(shape, _AXES, STRIDE_ORDERS[_known(layout)], dtype, first_head)


def allocate_in(
    layout: str,
    groups: Sequence[GroupPages],
    num_blocks: int,
    *,
    device: torch.device | None = None,
    overlay: bool = False,
    empty: Callable[[int], torch.Tensor] | None = None,
) -> KVCacheAllocation:
    """As :func:`~registration.allocation.allocate.allocate`, with layers where ``layout`` says.

    Args:
        groups: their attention layers are made by :func:`attention_in` of this layout.

    Raises:
        RegistrationError: there is no such layout; else as ``allocate``.
    """
    return allocate(
        groups,
        num_blocks,
        device=device or torch.device("cpu"),
        head_major=HeadMajor.REQUIRE if _known(layout)[:2] == "BH" else HeadMajor.NEVER,
        overlay=overlay,
        layers_apart=layout[0] == "L",
        empty=empty,
    )


def _known(layout: str) -> str:
    if layout not in STRIDE_ORDERS:
        raise RegistrationError(f"layout: expected one of {', '.join(STRIDE_ORDERS)}, got {layout}")
    return layout
