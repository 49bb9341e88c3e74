"""Engines that pdconn does not support: refused at their start, before they lend anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdconn.vllm.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CONTEXT_PARALLEL = ("prefill_context_parallel_size", "decode_context_parallel_size")


def check_supported(config: VllmConfig) -> None:
    """Whether one block id means the same rows on every rank, in one pool of blocks.

    Under context parallelism it does not: a block's tokens are spread over ranks, and
    the ranks of one stage hold different tokens under equal ids.  HiSparse keeps its
    source blocks in a pool of its own on the host.

    Raises:
        ConfigError: naming what was expected and what came.
    """
    for name in _CONTEXT_PARALLEL:
        size = getattr(config.parallel_config, name, 1)
        if size != 1:
            hint = "pdconn cannot tell yet which rank holds which token of a block"
            raise ConfigError(name, 1, size, hint)
    attention = getattr(config, "attention_config", None)
    if getattr(attention, "hisparse_config", None) is not None:
        hint = "pdconn cannot lend blocks of its host pool yet"
        raise ConfigError("attention_config.hisparse_config", "none", "one", hint)
