"""The engine's configuration: what is not supported is refused before anything is lent."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm import envs

from pdconn.sidechannel.advertise import advertised_host
from pdconn.vllm.config import ConfigError, Settings, in_our_keys, read_settings
from pdconn.vllm.memory.sleep import check_sleep

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig

log = logging.getLogger(__name__)

_CONTEXT_PARALLEL = ("prefill_context_parallel_size", "decode_context_parallel_size")


def settings_of(config: VllmConfig) -> Settings:
    """Our settings in an engine's configuration.

    Raises:
        ConfigError: naming the key, the expected and the seen value.
    """
    index = config.parallel_config.data_parallel_index
    return read_transfer(config.kv_transfer_config, index)


def read_transfer(transfer: KVTransferConfig, data_parallel_index: int = 0) -> Settings:
    """Our settings in ``--kv-transfer-config``.

    Raises:
        ConfigError: naming the key, the expected and the seen value.
    """
    settings = read_settings(
        transfer.kv_connector_extra_config,
        envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        data_parallel_index,
        role=transfer.kv_role,
    )
    if settings.lend_back is not None and not transfer.is_kv_producer:
        hint = "with lend_back decode also lends"
        raise ConfigError("kv_role", "kv_both", transfer.kv_role, hint)
    return settings


def check_reachable(settings: Settings) -> None:
    """Check the side channel of an engine that lends, without opening its port.

    Raises:
        FieldError: no host can be advertised, or other hosts could reach it unauthenticated.
    """
    host = settings.side_channel_host
    for reached in (host, advertised_host(host, settings.advertise_host)):
        settings.security.require(reached)


def answer_in_tree_keys(config: VllmConfig) -> None:
    """Log how NixlConnector's keys are translated, a line each."""
    transfer = config.kv_transfer_config
    for note in in_our_keys(transfer.kv_connector_extra_config, transfer.kv_role).notes:
        log.info("pdconn: %s", note)


def check_supported(config: VllmConfig, transfer: KVTransferConfig | None = None) -> None:
    """Refuse a configuration with which answers would be wrong, or settings ignored.

    Args:
        transfer: ours, where ``config`` has MultiConnector's.

    Raises:
        ConfigError: naming the expected and the seen value.
    """
    _check_blocks(config)
    _check_memory(config, transfer or config.kv_transfer_config)
    if _set_in(config, "aux_output_config", "enable_return_routed_experts"):
        hint = "decode does not compute the prompt, so it does not know its experts"
        raise ConfigError("enable_return_routed_experts", False, True, hint)


def _set_in(config: VllmConfig, part: str, name: str) -> Any:
    """A setting of vLLM's that decides whether an engine is served.

    Raises:
        ConfigError: this vLLM has no such setting, and may have it by another name.
    """
    found: Any = config
    for owner, each in (("VllmConfig", part), (part, name)):
        if not hasattr(found, each):
            hint = "this vLLM works differently, and pdconn does not support it yet"
            raise ConfigError(f"vLLM's {owner}", f"one with {each}", "none by this name", hint)
        found = getattr(found, each)
    return found


def _check_blocks(config: VllmConfig) -> None:
    """Check that a block id means the same tokens on every rank, in one pool of blocks."""
    # With context parallelism ranks of one stage hold different tokens of a block.  HiSparse has a
    # second pool of blocks, on the host.
    for name in _CONTEXT_PARALLEL:
        size = _set_in(config, "parallel_config", name)
        if size != 1:
            hint = "pdconn does not support blocks whose tokens are spread over ranks yet"
            raise ConfigError(name, 1, size, hint)
    if _set_in(config, "attention_config", "hisparse_config") is not None:
        hint = "pdconn cannot lend blocks of its host pool yet"
        raise ConfigError("attention_config.hisparse_config", "none", "one", hint)


def _check_memory(config: VllmConfig, transfer: KVTransferConfig) -> None:
    """Check that KV memory is registered in place, and is not moved later."""
    if _set_in(config, "model_config", "enable_sleep_mode"):
        check_sleep(transfer)
    device, buffer = _set_in(config, "device_config", "device_type"), transfer.kv_buffer_device
    if buffer == "cpu" != device:
        hint = "pdconn registers KV memory where it is, without buffers on the host"
        raise ConfigError("kv_buffer_device", device, buffer, hint)
