"""Engines whose block ids mean something else on every rank are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.vllm.config import ConfigError
from pdconn.vllm.supported import check_supported


def config(hisparse: object = None, **parallel: int) -> Any:
    sizes = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1} | parallel
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        attention_config=SimpleNamespace(hisparse_config=hisparse),
    )


def test_an_engine_without_them_is_served() -> None:
    check_supported(config())


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected 1, got 2"):
        check_supported(config(**{name: 2}))


def test_a_host_pool_of_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="hisparse_config: expected none"):
        check_supported(config(hisparse=object()))


def test_vllm_has_these_settings_under_these_names() -> None:
    """Or the checks would look at nothing."""
    from dataclasses import fields

    from vllm.config import AttentionConfig, ParallelConfig

    parallel = {field.name for field in fields(ParallelConfig)}
    assert {"prefill_context_parallel_size", "decode_context_parallel_size"} <= parallel
    assert "hisparse_config" in {field.name for field in fields(AttentionConfig)}
