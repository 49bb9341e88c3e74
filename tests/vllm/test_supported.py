"""Engines that would answer wrongly, or not as asked, are refused at their start."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.vllm.config import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pdconn.vllm.memory import sleep
    from pdconn.vllm.supported import check_supported, read_transfer


def config(
    *,
    hisparse: object = None,
    sleeps: bool = False,
    experts: bool = False,
    device: str = "cuda",
    buffer: str = "cuda",
    role: str = "kv_both",
    extra: dict[str, object] | None = None,
    **parallel: int,
) -> Any:
    sizes = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1} | parallel
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        attention_config=SimpleNamespace(hisparse_config=hisparse),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=experts),
        device_config=SimpleNamespace(device_type=device),
        kv_transfer_config=SimpleNamespace(
            kv_buffer_device=buffer,
            kv_connector_extra_config=extra or {},
            kv_role=role,
            is_kv_producer=role != "kv_consumer",
        ),
    )


@pytest.mark.parametrize(
    ("device", "buffer"), [("cuda", "cuda"), ("cpu", "cpu"), ("xpu", "xpu"), ("cpu", "cuda")]
)
def test_an_engine_without_them_is_served(device: str, buffer: str) -> None:
    """A CPU engine's buffers are where its KV memory is, whatever its configuration says."""
    check_supported(config(device=device, buffer=buffer))


def test_sleep_mode_is_refused_where_connectors_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers would read pages that were unmapped; ``memory/test_sleep_checks.py`` has the rest."""
    monkeypatch.setattr(sleep, "IS_TOLD", False)
    with pytest.raises(ConfigError, match="enable_sleep_mode: expected False, got True"):
        check_supported(config(sleeps=True))


def test_routed_experts_are_refused() -> None:
    """Those of the prompt are missing: decode does not compute it."""
    with pytest.raises(ConfigError, match="enable_return_routed_experts: expected False, got True"):
        check_supported(config(experts=True))


def test_buffers_on_the_host_of_a_gpu_are_refused() -> None:
    """GPU memory was registered where the user asked for host buffers."""
    with pytest.raises(ConfigError, match="kv_buffer_device: expected cuda, got cpu"):
        check_supported(config(device="cuda", buffer="cpu"))


def test_who_is_to_lend_answers_must_be_a_lender() -> None:
    lends: dict[str, object] = {"lend_back": {"seconds": 5}}
    read_transfer(config(role="kv_both", extra=lends).kv_transfer_config)
    read_transfer(config(role="kv_consumer", extra={"lend_back": False}).kv_transfer_config)
    with pytest.raises(ConfigError, match="kv_role: expected kv_both, got kv_consumer"):
        read_transfer(config(role="kv_consumer", extra=lends).kv_transfer_config)


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

    from vllm.config import (
        AttentionConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
    )
    from vllm.config.aux_output import AuxOutputConfig

    for kind, name in (
        (ModelConfig, "enable_sleep_mode"),
        (AuxOutputConfig, "enable_return_routed_experts"),
        (VllmConfig, "aux_output_config"),
        (DeviceConfig, "device_type"),
        (KVTransferConfig, "kv_buffer_device"),
    ):
        assert name in {field.name for field in fields(kind)}
    parallel = {field.name for field in fields(ParallelConfig)}
    assert {"prefill_context_parallel_size", "decode_context_parallel_size"} <= parallel
    assert "hisparse_config" in {field.name for field in fields(AttentionConfig)}


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("parallel_config", "prefill_context_parallel_size"),
        ("parallel_config", "decode_context_parallel_size"),
        ("attention_config", "hisparse_config"),
        ("aux_output_config", "enable_return_routed_experts"),
        ("model_config", "enable_sleep_mode"),
        ("device_config", "device_type"),
    ],
)
def test_a_setting_that_vllm_has_no_more_is_refused(part: str, name: str) -> None:
    """It may have another name, and was read as switched off."""
    check_supported(config())
    without = config()
    delattr(getattr(without, part), name)
    with pytest.raises(ConfigError, match=f"vLLM's {part}: expected one with {name}, got none"):
        check_supported(without)
    delattr(without, part)
    with pytest.raises(ConfigError, match=f"vLLM's VllmConfig: expected one with {part}, got none"):
        check_supported(without)
