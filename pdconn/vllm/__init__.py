"""The vLLM connector: ``kv_connector_module_path = "pdconn.vllm"``, ``PdConnector``.

Importing this package does not import vLLM; asking for ``PdConnector`` does.
"""

from typing import Any

__all__ = ["PdConnector"]


def __getattr__(name: str) -> Any:
    if name == "PdConnector":
        from pdconn.vllm.connector import PdConnector

        return PdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
