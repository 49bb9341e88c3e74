"""The memory order that vLLM is asked for, and its effect on transfers.

vLLM asks the connector's class once, before it allocates memory.  ``VLLM_KV_CACHE_LAYOUT`` takes
precedence, and vLLM drops a layout that a backend does not support with a warning, so a preference
never stops an engine.  :mod:`pdconn.tools.plan.layer_memory` explains the default; the key
``layout`` replaces it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.platforms import current_platform

from pdconn.planning.layouts import PREFERRED
from pdconn.vllm.config import read_layout
from pdconn.vllm.values import NO_LAYOUT, OUR_LAYOUT
from registration.references import KVCacheDataReference, KVCacheGroupReference, KVCacheReferences

log = logging.getLogger(__name__)

_I64 = NDArray[np.int64]


def wanted_layout(config: Any) -> str | None:
    """The name of the layout to ask vLLM for; None for the backend's own.

    Args:
        config: vLLM's configuration.

    Raises:
        ConfigError: the key's value is no layout.
    """
    asked = read_layout(config.kv_transfer_config.kv_connector_extra_config)
    if asked == NO_LAYOUT:
        return None
    if asked != OUR_LAYOUT:
        return asked
    model = config.model_config
    # MLA has one head; on ROCm backends prefer the layouts that their native kernels need.
    if model is None or model.use_mla or current_platform.is_rocm():
        return None
    return PREFERRED


def report_layout(asked: str, resolved: str, references: KVCacheReferences) -> None:
    """Log the layout in use, and the size of the pieces in which its blocks move."""
    groups = ", ".join(
        f"{group.kind} {_nbytes(equal)}, {_nbytes(unequal)}"
        for number, group in enumerate(references.groups)
        if group.data
        for equal, unequal in [run_nbytes(references, number)]
    )
    log.info(
        "pdconn: layout %s: smallest run of a block with equal and with unequal tensor "
        "parallelism, by group: %s",
        resolved,
        groups,
    )
    if asked not in (OUR_LAYOUT, NO_LAYOUT, resolved):
        log.warning(
            "pdconn: layout %s is configured and %s is in use: VLLM_KV_CACHE_LAYOUT takes "
            "precedence, and vLLM drops a layout that the attention backend does not support",
            asked,
            resolved,
        )


def run_nbytes(references: KVCacheReferences, number: int) -> tuple[int, int]:
    """Bytes of the smallest piece of a group's block when it moves whole, and when one head does.

    A piece is a descriptor of a read, unless it is merged with neighbouring blocks.
    """
    group = references.groups[number]
    return _smallest(references, group, slice(None)), _smallest(references, group, slice(1))


def _smallest(references: KVCacheReferences, group: KVCacheGroupReference, heads: slice) -> int:
    starts, sizes = (np.concatenate(c) for c in zip(*_cells(references, group, heads), strict=True))
    order = np.argsort(starts)
    starts, ends = starts[order], (starts + sizes)[order]
    first = np.concatenate(([True], starts[1:] != ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return int((ends[last] - starts[first]).min())


def _cells(
    references: KVCacheReferences, group: KVCacheGroupReference, heads: slice
) -> Iterator[tuple[_I64, _I64]]:
    """Addresses and sizes of the cells of the first block, which are contiguous."""
    for data in group.data:
        row = references.tensors[data.tensor].base + data.offset
        head = row + np.arange(data.num_heads)[heads] * data.head_stride
        cells = (head[:, None] + _tokens(data)[None, :]).ravel()
        yield cells, np.full(cells.size, data.token_nbytes or data.head_nbytes)


def _tokens(data: KVCacheDataReference) -> _I64:
    return np.arange(data.num_rows or 1) * (data.token_stride or 0)


def _nbytes(number: int) -> str:
    return f"{number} B" if number < 1024 else f"{number / 1024:.4g} KiB"
