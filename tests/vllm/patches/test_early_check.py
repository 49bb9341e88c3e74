"""Mistakes in our configuration end an engine while vLLM's configuration is made."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from pdconn.vllm.patches.early_check import ConfigRefused
    from pdconn.vllm.plugin import register

OURS = {"kv_connector": "PdconnConnector", "kv_role": "kv_producer"}
BY_MODULE = {**OURS, "kv_connector_module_path": "pdconn.vllm"}
NAMES = [
    OURS,
    {**OURS, "kv_connector": "PdConnector"},
    BY_MODULE,
    {**OURS, "kv_connector": "NixlConnector", "kv_connector_module_path": "pdconn.vllm.nixl"},
]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    for name in ("PdConnector", "PdconnConnector"):
        KVConnectorFactory._registry.pop(name, None)
    register()
    for name in ("POD_IP", "VLLM_HOST_IP", "PDCONN_SECRET", "PDCONN_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def made(extra: dict[str, Any], how: dict[str, str] = BY_MODULE, **more: Any) -> VllmConfig:
    transfer = KVTransferConfig(**how, kv_connector_extra_config=extra)
    return VllmConfig(kv_transfer_config=transfer, **more)


@pytest.mark.parametrize("how", NAMES, ids=lambda how: str(list(how.values())[::2]))
def test_a_typo_is_refused_as_the_configuration_is_made(how: dict[str, str]) -> None:
    with pytest.raises(ConfigRefused, match="got 'verifi'; did you mean 'verify'"):
        made({"verifi": "off"}, how)
    assert made({"verify": "off"}, how).kv_transfer_config is not None


def test_everything_that_is_wrong_is_in_the_message() -> None:
    with pytest.raises(ConfigRefused) as caught:
        made({"verifi": "off", "kv_lease_duration": -1, "store": {"root": "/kv"}})
    for words in ("'verifi'", "kv_lease_duration", "store.capacity"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"side_channel_host": "0.0.0.0", "advertise_host": "0.0.0.0"}, "advertise_host"),
        ({"side_channel_host": "10.0.0.1"}, "a shared secret"),
        ({"advertise_host": "10.0.0.1"}, "a shared secret"),
        ({"secret_file": "/nowhere"}, "secret_file"),
        ({"lend_back": True}, "kv_role"),
    ],
)
def test_what_the_side_channel_would_refuse_later_is_refused(
    extra: dict[str, Any], words: str
) -> None:
    how = {**BY_MODULE, "kv_role": "kv_consumer"} if "lend_back" in extra else BY_MODULE
    with pytest.raises(ConfigRefused, match=words):
        made(extra, how)


def test_only_the_node_of_the_scheduler_must_be_reachable() -> None:
    extra = {"side_channel_host": "10.0.0.1"}
    second = ParallelConfig(
        nnodes=2, node_rank=1, tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    made(extra, parallel_config=second)
    with pytest.raises(ConfigRefused):
        made(extra)


def test_our_entry_of_multi_connector_is_checked() -> None:
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    child = {**BY_MODULE, "kv_connector_extra_config": {"verifi": "off"}}
    with pytest.raises(ConfigRefused, match="verifi"):
        made({"connectors": [child]}, multi)


def test_asked_for_at_another_time_nothing_is_refused() -> None:
    """The control: a worker asks for the class, and need not be where the side channel is."""
    transfer = KVTransferConfig(**BY_MODULE, kv_connector_extra_config={"verifi": "off"})
    found = KVConnectorFactory.get_connector_class(transfer)
    assert found.__name__ == "PdconnConnector"
