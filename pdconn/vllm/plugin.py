"""Our place in vLLM's processes: the plugin entry point, and the log.

The entry point registers the connector's names.
"""

from __future__ import annotations

import logging
import os

from pdconn.vllm.patches.connector_names import register_names

_LOGGERS = ("pdconn", "transport", "registration")


def register() -> None:
    """Called once in every vLLM process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register_names(KVConnectorFactory, as_nixl=os.environ.get("PDCONN_AS_NIXL") == "1")


def join_vllm_log() -> None:
    """Let our loggers write where vLLM's does, unless the user gave them handlers."""
    theirs = logging.getLogger("vllm")
    for name in _LOGGERS:
        ours = logging.getLogger(name)
        if not ours.handlers and theirs.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False
