"""The connector of an engine that kills itself where it is asked to.

Named by ``kv_connector_module_path``.
"""

from __future__ import annotations

from typing import Any

from pdconn.vllm.connector import PdconnConnector
from tests.vllm.engines.streams.points import make_mortal


class Mortal(PdconnConnector):
    """Right, until its engine reaches a point (:mod:`tests.vllm.engines.streams.points`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        make_mortal()
        super().__init__(*args, **kwargs)
