"""The vLLM connector: ``kv_connector_module_path = "pdconn.vllm"``, ``PdConnector``."""

from pdconn.vllm.connector import PdConnector

__all__ = ["PdConnector"]
