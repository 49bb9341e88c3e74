"""The vLLM connector: ``kv_connector_module_path = "pdconn.vllm"``, ``PdconnConnector``.

``PdConnector`` is an older name of the same class.  Importing this package does not import vLLM;
asking for the class does, and checks the configuration that vLLM asks for it with.
"""

from typing import Any

__all__ = ["PdConnector", "PdconnConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from pdconn.vllm.connector import PdconnConnector
        from pdconn.vllm.patches.early_check import check_asked_configuration

        check_asked_configuration()
        return PdconnConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
