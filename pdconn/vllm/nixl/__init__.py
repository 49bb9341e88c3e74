"""pdconn under the name of vLLM's in-tree connector.

Some routers and operators know connectors by their names only, and many manifests say
``NixlConnector``.  vLLM takes the class from the module path by whatever name is asked for, so here
that name is ours::

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "pdconn.vllm.nixl", ...}

Where no module path can be added, ``PDCONN_AS_NIXL=1`` does the same in vLLM's registry
(:mod:`pdconn.vllm.nixl.registry`).  Importing this package does not import vLLM; asking for the
class does.
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
