"""The names under which vLLM's registry knows our connector."""

from __future__ import annotations

NAMES = ("PdconnConnector", "PdConnector")
"""Ours.  The second is the older one; another project has a connector of that name, too."""

REPLACED = ("NixlConnector", "NixlPullConnector")
"""vLLM's two names for the connector that does what ours does; the one that pushes is kept."""

MODULES = {
    "pdconn.vllm": NAMES,
    "pdconn.vllm.connector": NAMES,
    "pdconn.vllm.nixl": REPLACED[:1],
}
"""``kv_connector_module_path``, and the names that vLLM finds our class by in each."""
