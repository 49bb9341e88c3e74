"""The names of our connector in vLLM's registry."""

from __future__ import annotations

NAMES = ("PdconnConnector", "PdConnector")
"""Our names.  The second is the former one; another project has a connector of that name, too."""

REPLACED = ("NixlConnector", "NixlPullConnector")
"""vLLM's two names for its connector that pulls; the one that pushes is kept."""

MODULES = {
    "pdconn.vllm": NAMES,
    "pdconn.vllm.connector": NAMES,
    "pdconn.vllm.nixl": REPLACED[:1],
}
"""Values of ``kv_connector_module_path``, and the names of our class in each module."""
