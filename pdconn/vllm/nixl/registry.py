"""The names under which vLLM's registry knows our connector."""

from __future__ import annotations

from typing import Any

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

_MODULE, _CLASS = "pdconn.vllm", "PdconnConnector"
"""The package, and not the module below it, so that every question is answered there."""


def register_names(factory: Any, *, as_nixl: bool) -> None:
    """Register our names, and with ``as_nixl`` the in-tree connector's as well.

    May be called again; what another plugin has registered under our names is left alone.

    Args:
        factory: vLLM's ``KVConnectorFactory``.
    """
    for name in NAMES:
        if name not in factory._registry:
            factory.register_connector(name, _MODULE, _CLASS)
    for name in REPLACED if as_nixl else ():
        factory._registry.pop(name, None)
        factory.register_connector(name, _MODULE, _CLASS)
