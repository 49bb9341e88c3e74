"""Our configuration is checked when vLLM first asks for our class, before any weights are loaded.

vLLM builds a connector after the model is in memory.  A mistake in ``kv_connector_extra_config``
would be reported then, minutes into a start.  But it asks for the class much earlier, in the API
server, to see whether it supports the hybrid KV cache manager::

    VllmConfig.__post_init__ ─► supports_hma_config ─► get_connector_class(kv_transfer_config)
                                                           └─► pdconn.vllm.PdconnConnector

No method of the class is called there with the configuration, so it is found up the stack.  If it
is not there (``--no-disable-hybrid-kv-cache-manager`` leaves the question out), nothing is refused
early: the connector checks the same when it is built.

Nothing is replaced.  Checked at the start: what is not found here is checked later.
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
    """A mistake in our configuration.

    No ValueError: pydantic, in which vLLM asks, would put words of its own around one.
    """


def check_asked_configuration() -> None:
    """Check what our class is being asked for with, if vLLM's configuration is being made.

    Raises:
        ConfigRefused: naming the key, what was expected and what came.
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
        # The side channel is served where the scheduler is, on the first node of an engine.
        if transfer.is_kv_producer and config.parallel_config.node_rank == 0:
            check_reachable(settings)
    except FieldError as error:
        raise ConfigRefused(error.field, error.expected, error.seen, error.hint) from error


def asked_configuration(frame: FrameType | None) -> tuple[Any, Any] | None:
    """The ``VllmConfig`` in the making, and the ``KVTransferConfig`` that names our class.

    None where a class is asked for at another time, as in workers, which need not be where the
    side channel is.
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
