"""Our configuration is checked when vLLM first looks up our class, before weights are loaded.

vLLM creates a connector after the model is in memory, so an error in ``kv_connector_extra_config``
would be reported minutes into a start.  But it looks up the class much earlier, in the API server,
to see whether it supports the hybrid KV cache manager::

    VllmConfig.__post_init__ ─► supports_hma_config ─► get_connector_class(kv_transfer_config)
                                                           └─► pdconn.vllm.PdconnConnector

No method of the class is called there with the configuration, so it is taken from the stack.  If it
is not there (``--no-disable-hybrid-kv-cache-manager`` skips the look-up), nothing is refused early:
the connector checks the same when it is created.

Nothing is replaced.  Checked at the start: a configuration that is not found here is checked later.
Tested by ``tests/vllm/patches/test_early_check.py``.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from transport.errors import FieldError

SOURCES = {
    "vllm.config.vllm:VllmConfig.__post_init__": (1414, 1510),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class": (
        97,
        97,
    ),
}

_ASKS, _WITH = "get_connector_class", "kv_transfer_config"


class ConfigRefused(FieldError):
    """Our configuration is invalid.

    It is no ValueError, since vLLM calls us inside pydantic, which would wrap one.
    """


def check_asked_configuration() -> None:
    """Check the configuration for which our class is looked up, if it is under construction.

    Raises:
        ConfigRefused: naming the key, the expected and the seen value.
    """
    found = asked_configuration(inspect.currentframe())
    if found is None:
        return
    from pdconn.vllm.supported import check_reachable, check_supported, read_transfer

    config, transfer = found
    try:
        if config.model_config is not None:
            check_supported(config, transfer)
        settings = read_transfer(transfer)
        # The scheduler, on the first node of an engine, serves the side channel.
        if transfer.is_kv_producer and config.parallel_config.node_rank == 0:
            check_reachable(settings)
    except FieldError as error:
        raise ConfigRefused(error.field, error.expected, error.seen, error.hint) from error


def asked_configuration(frame: FrameType | None) -> tuple[Any, Any] | None:
    """The ``VllmConfig`` under construction, and the ``KVTransferConfig`` that names our class.

    None if the class is looked up at another time, as in workers, which may be on other nodes than
    the side channel.
    """
    transfer = None
    while frame is not None:
        if transfer is None and frame.f_code.co_name == _ASKS:
            transfer = frame.f_locals.get(_WITH)
        made = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and type(made).__name__ == "VllmConfig":
            return None if transfer is None else (made, transfer)
        frame = frame.f_back
    return None
