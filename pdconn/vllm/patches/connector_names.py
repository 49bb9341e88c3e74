"""Our connector's names in vLLM's registry, and the in-tree connector's where the user asks for it.

Where ``kv_connector_module_path`` is given, vLLM finds the class there.  Without it, it looks a
name up in a registry that refuses names which it has already, as it has ``NixlConnector``.

Replaced: entries of ``KVConnectorFactory._registry`` under the names in
:data:`pdconn.vllm.nixl.registry.REPLACED`, with ``PDCONN_AS_NIXL=1`` alone.
Checked at the start: vLLM refuses a connector whose name it does not find.
Tested by ``tests/vllm/nixl/test_names.py``.
"""

from __future__ import annotations

from typing import Any

from pdconn.vllm.nixl.registry import NAMES, REPLACED

SOURCES = {
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector": (
        31,
        31,
    ),
}

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
