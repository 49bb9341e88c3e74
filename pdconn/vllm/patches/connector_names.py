"""Our connector's names in vLLM's registry, and the in-tree connector's if the user requests it.

With ``kv_connector_module_path`` vLLM finds the class there.  Without it, vLLM looks up a name in a
registry, which refuses names that it has, such as ``NixlConnector``.

Replaced: entries of ``KVConnectorFactory._registry`` under the names in
:data:`pdconn.vllm.nixl.connector_registry.REPLACED`, with ``PDCONN_AS_NIXL=1`` alone.
Checked at the start: vLLM refuses a connector with an unknown name.
Tested by ``tests/vllm/nixl/test_names.py``.
"""

from __future__ import annotations

from typing import Any

from pdconn.vllm.nixl.connector_registry import NAMES, REPLACED

SOURCES = {
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector": (
        31,
        31,
    ),
}

_MODULE, _CLASS = "pdconn.vllm", "PdconnConnector"
"""The package, through whose ``__getattr__`` the class is found."""


def register_names(factory: Any, *, as_nixl: bool) -> None:
    """Register our names, and with ``as_nixl`` the in-tree connector's as well.  Idempotent.

    Classes of another plugin under our names are kept.

    Args:
        factory: vLLM's ``KVConnectorFactory``.
    """
    for name in NAMES:
        if name not in factory._registry:
            factory.register_connector(name, _MODULE, _CLASS)
    for name in REPLACED if as_nixl else ():
        factory._registry.pop(name, None)
        factory.register_connector(name, _MODULE, _CLASS)
