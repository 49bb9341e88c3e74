"""vLLM's plugin entry point, which registers the connector's names, and logging."""

from __future__ import annotations

import logging
import os

from pdconn.vllm.patches.connector_names import register_names

_LOGGERS = ("pdconn", "transport", "registration")


def register() -> None:
    """Register the connector's names; vLLM calls it once in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register_names(KVConnectorFactory, as_nixl=os.environ.get("PDCONN_AS_NIXL") == "1")


def join_vllm_log() -> None:
    """Add vLLM's log handlers to our loggers, unless the user has configured some."""
    theirs = logging.getLogger("vllm")
    for name in _LOGGERS:
        ours = logging.getLogger(name)
        if not ours.handlers and theirs.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False
