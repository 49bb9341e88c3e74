"""pdconn under the name of vLLM's in-tree connector.

Some routers and operators match connectors by name only, and many manifests contain
``NixlConnector``.  vLLM looks up this name in the configured module, so here it is our class::

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "pdconn.vllm.nixl", ...}

Where no module path can be added, ``PDCONN_AS_NIXL=1`` does the same in vLLM's registry
(:mod:`pdconn.vllm.nixl.connector_registry`).  Importing this package does not
import vLLM; reading the class does.
"""

from typing import Any

__all__ = ["NixlConnector"]


def __getattr__(name: str) -> Any:
    if name == "NixlConnector":
        from pdconn.vllm.connector import PdconnConnector
        from pdconn.vllm.patches.early_check import check_asked_configuration

        check_asked_configuration()
        return PdconnConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
